"""Which weights are counted before a tensor gets its code: all of a small one, and of a large one some blocks.

A code needs no exact counts, only shares, and whatever it is made of, it codes every tensor without loss. Counting all
weights of a large tensor took as long as writing them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paperlm_kernels.neuzip.header import Header

COUNTED = 2**23
"Weights that are counted, about: an exponent of a share of 10^-5 occurs 84 times among them."
SPREAD = 40503
"""Odd, about 2^16 over the golden ratio: of each run of blocks another one is counted, so that what repeats in a
tensor, as the heads of an attention do, is not met at the same place each time."""


def runs_of(header: Header) -> tuple[int, int]:
    """How many blocks are counted, and out of how many each: (all, 1), or whole blocks of runs of so many."""
    run = header.numel // COUNTED
    return (header.blocks, 1) if run < 2 else ((header.blocks - 1) // run, run)


def counted_weights(header: Header, runs: int, run: int) -> int:
    """Weights of those blocks."""
    return header.numel if run == 1 else runs * header.geometry.block


def counted_of(exponents: NDArray[np.uint8], header: Header, runs: int, run: int) -> NDArray[np.uint8]:
    """The exponents of those blocks, of all exponents of a tensor (flat)."""
    if run == 1:
        return exponents
    number = np.arange(runs)
    blocks = number * run + ((number * SPREAD) & 0xFFFF) % run
    size = header.geometry.block
    return exponents[: (header.blocks - 1) * size].reshape(-1, size)[blocks].reshape(-1)
