"""Which weights are counted before a tensor gets its code: all of a small one, and of a large one some blocks.

A code needs no exact counts, only shares: whatever it is made of, what escapes it is kept aside. Counting all weights
of a large tensor took as long as writing them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paperlm_kernels.neuzip.header import Header

COUNTED = 2**23
"Weights that are counted, about: an exponent of a share of 10^-5 occurs 84 times among them."
SPREAD = 40503
"""Odd, 2^16 over the golden ratio: its multiples modulo 2^16 are spread evenly, so that of each run of blocks another
one is counted, and what repeats in a tensor, as heads of an attention do, is not met at the same place each time."""
LONGEST = 2**15
"Blocks of a run, so that a place within it is computed in 32 bits; of 2^38 weights and more, more are counted."
MOST_ESCAPES = 1e-3
"Share of patched weights above which a code is made anew: an old one; and, beyond what was counted, one of a part."


class UnlikeError(Exception):
    """More weights escape a code than those that were counted say: it has to be made of all."""


def runs_of(header: Header, all_counted: bool = False) -> tuple[int, int]:
    """How many blocks are counted, and out of how many each: (all, 1), or whole blocks of runs of so many. All, where
    a tensor is small or is asked for so."""
    run = min(header.numel // COUNTED, LONGEST)
    return (header.blocks, 1) if all_counted or run < 2 else ((header.blocks - 1) // run, run)


def counted_weights(header: Header, runs: int, run: int) -> int:
    """Weights of those blocks."""
    return header.numel if run == 1 else runs * header.geometry.block


def counted_blocks(runs: int, run: int) -> NDArray[np.int64]:
    """Their numbers, ascending."""
    number = np.arange(runs)
    return number * run + (((number * SPREAD) & 0xFFFF) * run >> 16)


def counted_of(exponents: NDArray[np.uint8], header: Header, runs: int, run: int) -> NDArray[np.uint8]:
    """The exponents of those blocks, of all exponents of a tensor (flat)."""
    if run == 1:
        return exponents
    size = header.geometry.block
    return exponents[: (header.blocks - 1) * size].reshape(-1, size)[counted_blocks(runs, run)].reshape(-1)


def check_patches(patches: int, escaping: int, header: Header, runs: int, run: int) -> None:
    """Of a code of the weights in some blocks, of which so many escape it, and of the whole tensor so many. Raises
    UnlikeError."""
    if run > 1 and patches > (escaping / counted_weights(header, runs, run) + MOST_ESCAPES) * header.numel:
        raise UnlikeError
