"""Exponents in four bits: the 15 consecutive ones that occur most, and patches for the rest. NumPy, the definition.

No stream and no table: larger than the prefix code (12 bits a weight and the patches), and decoded as fast as memory
can be read. It is no part of NeuZip (arXiv 2410.20650).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WIDE = 15


def lowest_exponent(counts: NDArray[np.int64]) -> int:
    """Of 256 counts, where the 15 consecutive exponents that cover most begin; the lowest such."""
    return int(np.convolve(counts, np.ones(WIDE, np.int64), mode="valid").argmax())


def window(lowest: int) -> NDArray[np.bool_]:
    """Which of the 256 exponents have a code."""
    return (np.arange(256) >= lowest) & (np.arange(256) < lowest + WIDE)


def encode(exponents: NDArray[np.uint8], lowest: int, block: int) -> tuple[NDArray, NDArray, NDArray]:
    """Words of eight codes (code j in bits 4j), patches and their directory. Code 0 is patched, c is lowest + c - 1."""
    codes = np.zeros(-(-len(exponents) // 8) * 8, np.uint8)
    table = np.zeros(256, np.uint8)
    table[lowest : lowest + WIDE] = np.arange(1, WIDE + 1)
    codes[: len(exponents)] = table.take(exponents)
    where = np.flatnonzero(codes[: len(exponents)] == 0)
    patches = (where % block | exponents[where].astype(np.int64) << 24).astype(np.uint32)
    counts = np.bincount(where // block, minlength=-(-len(exponents) // block))
    directory = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
    return (codes[::2] | codes[1::2] << np.uint8(4)).view(np.uint32), patches, directory


def decode(words: NDArray[np.uint32], lowest: int) -> NDArray[np.uint16]:
    """Exponents of all codes, each shifted by 7; those of code 0 are to be patched."""
    table = np.arange(lowest - 1, lowest + WIDE).astype(np.uint16) << np.uint16(7)
    table[0] = 0
    pairs = table[np.arange(256) & 15].astype(np.uint32) | table[np.arange(256) >> 4].astype(np.uint32) << 16
    return pairs.take(words.view(np.uint8)).view(np.uint16)
