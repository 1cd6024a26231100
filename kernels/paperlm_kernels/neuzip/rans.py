"""An asymmetric numeral system of 32-bit states, for comparison: what NeuZip's own entropy coder (arXiv 2410.20650,
section 3.2, there from a closed library) needs in bits. NumPy; nothing is stored with it.

Rows are coded apart, all in lockstep. A state x is in [2^16, 2^32), shares are multiples of 2^-11, words of 16 bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SHARES = 11
LOW = np.uint64(1 << 16)


def shares_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """256 counts as shares that sum to 2^11, at least 1 for each that occurs; the largest takes up the rounding."""
    total = 1 << SHARES
    shares = np.where(counts > 0, np.maximum(1, np.rint(counts * (total / max(1, counts.sum())))), 0).astype(np.int64)
    while (excess := int(shares.sum()) - total) != 0:
        largest = int(shares.argmax())
        shares[largest] -= min(excess, int(shares[largest]) - 1)
    return shares


def encode(symbols: NDArray[np.uint8], shares: NDArray[np.int64]) -> tuple[NDArray[np.uint32], list[NDArray]]:
    """Final states and words of each row of symbols (rows, steps). Raises ValueError for a symbol without a share."""
    if (shares[symbols] == 0).any():
        raise ValueError("a symbol without a share cannot be coded; make the shares of these symbols' counts")
    starts = np.cumsum(shares) - shares
    state = np.full(len(symbols), LOW, np.uint64)
    words: list[list[int]] = [[] for _ in symbols]
    for step in range(symbols.shape[1] - 1, -1, -1):
        share, start = (table[symbols[:, step]].astype(np.uint64) for table in (shares, starts))
        full = state >= share << np.uint64(32 - SHARES)
        for row in np.flatnonzero(full):
            words[row].append(int(state[row]) & 0xFFFF)
        state = np.where(full, state >> np.uint64(16), state)
        state = (state // share << np.uint64(SHARES)) + start + state % share
    return state.astype(np.uint32), [np.array(row[::-1], np.uint16) for row in words]


def decode(
    states: NDArray[np.uint32], words: list[NDArray], shares: NDArray[np.int64], steps: int
) -> NDArray[np.uint8]:
    """Symbols (rows, steps)."""
    starts = np.cumsum(shares) - shares
    symbol_of = np.repeat(np.arange(256), shares).astype(np.uint8)
    state = states.astype(np.uint64)
    read = np.zeros(len(words), np.int64)
    out = np.empty((len(words), steps), np.uint8)
    for step in range(steps):
        slot = state & np.uint64((1 << SHARES) - 1)
        symbol = symbol_of[slot.astype(np.int64)]
        share, start = (table[symbol].astype(np.uint64) for table in (shares, starts))
        state = share * (state >> np.uint64(SHARES)) + slot - start
        for row in np.flatnonzero(state < LOW):
            state[row] = state[row] << np.uint64(16) | np.uint64(words[row][read[row]])
            read[row] += 1
        out[:, step] = symbol
    return out


def bits(states: NDArray[np.uint32], words: list[NDArray]) -> int:
    """Of everything that `encode` gave."""
    return 32 * len(states) + 16 * sum(len(row) for row in words)
