"""How many bits the fields of bfloat16 weights carry (NeuZip, arXiv 2410.20650, section 3.1, Figures 1 and 5)."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PART = 2**24


@dataclasses.dataclass(frozen=True, eq=False)
class EntropyReport:
    """Entropies in bits, and histograms (2, 256 and 128 counts)."""

    sign: float
    exponent: float
    mantissa: float
    joint: float
    "of the 16-bit pattern"
    sign_counts: NDArray[np.int64]
    exponent_counts: NDArray[np.int64]
    mantissa_counts: NDArray[np.int64]

    @property
    def ratio_sum(self) -> float:
        """16 bits over the sum of the three entropies."""
        return 16 / max(self.sign + self.exponent + self.mantissa, 1e-9)

    @property
    def ratio_joint(self) -> float:
        """16 bits over the joint entropy, which no coder of single weights beats."""
        return 16 / max(self.joint, 1e-9)


def entropy(counts: NDArray) -> float:
    """Bits per symbol of symbols that occur so often, or with such shares.

    >>> entropy(np.array([2, 1, 1]))
    1.5
    """
    shares = np.asarray(counts, np.float64)
    shares = shares[shares > 0] / shares.sum()
    return float(-(shares * np.log2(shares)).sum()) + 0.0


def pattern_counts(t: Tensor) -> NDArray[np.int64]:
    """How often each of the 65,536 patterns occurs in a bfloat16 tensor. Raises TypeError for another dtype."""
    if t.dtype != torch.bfloat16:
        raise TypeError(f"a tensor of {t.dtype}; entropies are those of bfloat16: convert it first")
    flat = t.detach().contiguous().view(torch.int16).reshape(-1)
    counts = np.zeros(2**16, np.int64)
    for part in flat.split(PART):
        counts += torch.bincount(part.int() & 0xFFFF, minlength=2**16).cpu().numpy()
    return counts


def report_of_counts(counts: NDArray) -> EntropyReport:
    """The report of 65,536 counts, or shares, by pattern: counts of several tensors add up."""
    cube = np.asarray(counts).reshape(2, 256, 128)
    sign, exponent, mantissa = cube.sum((1, 2)), cube.sum((0, 2)), cube.sum((0, 1))
    parts = [entropy(part) for part in (sign, exponent, mantissa)]
    return EntropyReport(*parts, entropy(cube.reshape(-1)), sign, exponent, mantissa)


def entropy_report(t: Tensor) -> EntropyReport:
    """Entropies of sign, exponent, mantissa and the whole pattern of a bfloat16 tensor, with their histograms."""
    return report_of_counts(pattern_counts(t))
