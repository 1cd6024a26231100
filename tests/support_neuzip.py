"""Helpers of the tests of packed weights."""

from __future__ import annotations

import numpy as np
import torch
from support_ternary import compiled_or_interpreted, everywhere

__all__ = ["bits_of", "compiled_or_interpreted", "every_pattern", "everywhere", "gaussian", "patterns", "same_bits"]


def odd_weights(count, seed=0, finite=True):
    """Gaussian weights, some of them of any other size, zeros and subnormals among them."""
    rng = np.random.default_rng(seed)
    bits = bits_of(gaussian(count, seed)).copy()
    where = rng.random(count) < 0.01
    bits[where] = rng.integers(0, 2**16, where.sum())
    if finite:
        bits[bits & 0x7F80 == 0x7F80] = 0x0001
    return patterns(bits)


def gaussian(count, seed=0, scale=0.02, device="cpu"):
    """bfloat16 weights as a fresh model has them."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=g) * scale).bfloat16().to(device)


def patterns(bits, device="cpu"):
    """bfloat16 of 16-bit patterns."""
    return torch.from_numpy(np.asarray(bits, np.uint16).view(np.int16).copy()).view(torch.bfloat16).to(device)


def every_pattern():
    """All 65,536, in an order that mixes exponents."""
    return patterns(np.random.default_rng(0).permutation(2**16).astype(np.uint16))


def bits_of(t):
    """Patterns of a tensor (NaN equal NaN only where all bits are)."""
    return t.detach().cpu().contiguous().view(torch.int16).numpy().view(np.uint16)


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(bits_of(a), bits_of(b))


class Told:
    """In place of a kernel of Triton's. Each start is a grid, and of each argument what the kernel would have."""

    def __init__(self, kernel):
        self.arg_names, self.starts, self.forms, self.early = kernel.arg_names, [], [], []
        self.buffers, self.streams = set(), []

    def __getitem__(self, grid):
        def compile_and_start(*given, num_warps, maxnreg=None, launch_pdl=False, **constants):
            self.early.append((constants.get("PDL"), launch_pdl))
            places = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in given]
            self.buffers |= {
                name for name, a in zip(self.arg_names, given, strict=False) if isinstance(a, torch.Tensor)
            }
            self.forms.append(constants)
            self.starts.append((grid[0], dict(zip(self.arg_names, [*places, *constants.values()], strict=True))))
            return Compiled(self)

        return compile_and_start


class Compiled:
    """A form of it."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def start(*given, stream=None):
            self.kernel.streams.append(stream)
            self.kernel.starts.append((grid[0], dict(zip(self.kernel.arg_names, given, strict=True))))

        return start
