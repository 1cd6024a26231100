"""The kind of code that NeuZip's authors take, an asymmetric numeral system of exponents, in our reference of it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paperlm_kernels.bench.ops.neuzip.coder import Coder
from paperlm_kernels.bench.ops.neuzip.peers import CHUNK, on_a_cpu_alone
from paperlm_kernels.neuzip import rans

Chunks = tuple[np.ndarray, list[np.ndarray]]
"States and words of chunks of one length."


@dataclasses.dataclass(frozen=True)
class RansStored:
    """whole: chunks of CHUNK exponents; rest: a shorter one, or none. items: uint8, sign and mantissa."""

    whole: Chunks
    rest: Chunks
    shares: np.ndarray
    items: np.ndarray

    @property
    def bits(self) -> int:
        """A chunk has its state, its words and where they begin, in 32 bits; shares have 16."""
        chunks = sum(rans.bits(*part) + 32 * len(part[1]) for part in (self.whole, self.rest))
        return chunks + 16 * 256 + 8 * len(self.items)


class Rans(Coder):
    """Chunks of as many exponents as the authors ask nvCOMP for. In NumPy, a symbol at a time: it is not timed."""

    parts: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def absent(cls, device: str) -> str | None:
        return on_a_cpu_alone(device) or super().absent(device)

    def stored(self) -> RansStored:
        patterns = self.inputs.weights.view(torch.int16).numpy().view(np.uint16)
        exponents = (patterns >> 7 & 0xFF).astype(np.uint8)
        items = (patterns >> 8 & 0x80 | patterns & 0x7F).astype(np.uint8)
        shares = rans.shares_of(np.bincount(exponents, minlength=256))
        whole = len(exponents) // CHUNK * CHUNK
        left = len(exponents) - whole
        parts = exponents[:whole].reshape(-1, CHUNK), exponents[whole:].reshape(min(1, left), left)
        return RansStored(*(rans.encode(part, shares) for part in parts), shares, items)

    def decode(self, stored: RansStored, out: Tensor) -> Tensor:
        items = stored.items.astype(np.uint16)
        parts = (stored.whole, CHUNK), (stored.rest, len(items) % CHUNK)
        found = np.concatenate([rans.decode(*part, stored.shares, steps).reshape(-1) for part, steps in parts])
        patterns = (items & 0x80) << 8 | found.astype(np.uint16) << 7 | items & 0x7F
        return out.copy_(torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16))

    def bits_of(self, stored: Any) -> float:
        return stored.bits / self.case.weights
