"""Exponents as prefix codes in the private streams of 128 lanes: the definition, in NumPy.

All lanes of some blocks go in lockstep: an operation of NumPy is one step of some thousand streams. The kernels give
the same bytes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from paperlm_kernels.neuzip.codebook import ESCAPE, EXPONENTS, Codebook
from paperlm_kernels.neuzip.errors import StreamError
from paperlm_kernels.neuzip.geometry import MOST_UNITS, Geometry

CHUNK = 2**19
"Weights that are coded together: what they need stays in the second-level cache of a core."


@dataclasses.dataclass
class Streams:
    """What the exponents of a tensor become.

    payload: words (uint32), the guard of zeros at the end included. directory: where each block begins in it, and the
    end (blocks + 1). units: of each lane (blocks, 128), `Geometry.unit` bits each. patches: place in the block |
    exponent << 24, by block and place. patch_directory: like directory.
    """

    payload: NDArray[np.uint32]
    directory: NDArray[np.uint32]
    units: NDArray[np.uint8]
    patches: NDArray[np.uint32]
    patch_directory: NDArray[np.uint32]


def chunks(blocks: int, geometry: Geometry) -> list[tuple[int, int]]:
    """Ranges of blocks that are coded together."""
    step = max(1, CHUNK // geometry.block)
    return [(first, min(first + step, blocks)) for first in range(0, blocks, step)]


class TooLongError(Exception):
    """A lane needs more units than a byte holds."""


class Encoder:
    """Collects the streams of one chunk of blocks after the other."""

    def __init__(self, book: Codebook, geometry: Geometry) -> None:
        self.book, self.geometry = book, geometry
        self.payload: list[NDArray[np.uint8]] = []
        self.units: list[NDArray[np.uint8]] = []
        self.patches: list[NDArray[np.uint32]] = []
        self.patch_counts: list[NDArray[np.int64]] = []

    def add(self, exponents: NDArray[np.uint8]) -> None:
        """Exponents of whole blocks (padded with the first of the palette). Raises TooLongError."""
        g = self.geometry
        blocks = len(exponents) // g.block
        entries = self.book.encoding.take(exponents.view(np.uint16))
        self._patch(exponents, entries, blocks)
        # of each half of an octet the two codes in one, then step and half first, so that a step reads one vector
        pairs = entries.reshape(-1, 2)
        first, second = pairs[:, 0], pairs[:, 1]
        length = first >> np.uint32(16) & np.uint32(255)
        both = (first & np.uint32(0xFFFF)) | (second & np.uint32(0xFFFF)) << length
        length += second >> np.uint32(16) & np.uint32(255)
        rows, by_step = blocks * g.lanes, (blocks, g.octets, g.lanes, 2)
        both, length = (np.ascontiguousarray(a.reshape(by_step).transpose(1, 3, 0, 2)) for a in (both, length))
        both, length = both.reshape(g.octets * 2, rows), length.reshape(g.octets * 2, rows)
        most = g.octets * 4 * g.limit // 32 + 2
        scratch = np.empty((rows, most), np.uint32)
        flat = scratch.reshape(-1)
        place = np.arange(rows, dtype=np.int64) * most
        begin = place.copy()
        window, filled = np.zeros(rows, np.uint64), np.zeros(rows, np.uint64)
        for code, bits in zip(both, length, strict=True):
            window |= code.astype(np.uint64) << filled
            filled += bits
            flat[place] = window.astype(np.uint32)  # also where it is not full: then it is written again
            full = filled & np.uint64(32)
            window >>= full
            place += (full >> np.uint64(5)).view(np.int64)
            filled &= np.uint64(31)
        flat[place] = window.astype(np.uint32)
        bits = (place - begin) * 32 + filled.view(np.int64)
        units = -(-bits // g.unit)
        if units.max(initial=0) > MOST_UNITS:
            raise TooLongError
        # each block ends on a word: its last lane has zeros behind
        taken = units.reshape(blocks, g.lanes).copy()
        pad = -taken.sum(axis=1) % (32 // g.unit)
        parts = scratch.view(np.dtype(f"u{g.unit // 8}"))[:, : int(units.max(initial=0)) + 3]
        columns = np.arange(parts.shape[1])
        parts[g.lanes - 1 :: g.lanes][columns >= taken[:, -1:]] = 0
        taken[:, -1] += pad
        parts = parts[columns < taken.reshape(-1, 1)].view(np.uint8)
        self.payload.append(parts)
        self.units.append(units.astype(np.uint8).reshape(blocks, g.lanes))

    def _patch(self, exponents: NDArray[np.uint8], entries: NDArray[np.uint32], blocks: int) -> None:
        pairs = np.flatnonzero(entries >> 24)
        both = (pairs[:, None] * 2 + np.arange(2)).reshape(-1)
        where = both[self.book.index[exponents[both]] == ESCAPE]
        place = where % self.geometry.block
        self.patches.append((place | exponents[where].astype(np.int64) << 24).astype(np.uint32))
        self.patch_counts.append(np.bincount(where // self.geometry.block, minlength=blocks))

    def finish(self) -> Streams:
        """Everything added."""
        units = np.concatenate(self.units) if self.units else np.zeros((0, self.geometry.lanes), np.uint8)
        words = self.geometry.words(units)
        guard = np.zeros(4 * self.geometry.guard, np.uint8)
        return Streams(
            payload=np.concatenate([*self.payload, guard]).view(np.uint32),
            directory=_directory(words),
            units=units,
            patches=np.concatenate([np.zeros(0, np.uint32), *self.patches]),
            patch_directory=_directory(np.concatenate([np.zeros(0, np.int64), *self.patch_counts])),
        )


def _directory(sizes: NDArray[np.int64]) -> NDArray[np.uint32]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.uint32)


def decode_blocks(
    streams: Streams, book: Codebook, geometry: Geometry, first: int, last: int, *, check: bool = True
) -> NDArray[np.uint16]:
    """Exponents of the blocks first to last - 1, each shifted by 7 as in a pattern, flat; patches applied.

    Raises StreamError (`check`) where a lane ends elsewhere than its size says. Whatever the payload holds, nothing is
    read outside of it: a lane takes at most its guard more.
    """
    g = geometry
    blocks = last - first
    begin = int(streams.directory[first])
    words = streams.payload[begin : int(streams.directory[last]) + g.guard].astype(np.uint64)
    windows = words[:-1] | words[1:] << np.uint64(32)  # any 32 bits of the stream are in one of them
    units = streams.units[first:last].astype(np.int64)
    start = np.cumsum(units, axis=1) - units
    start *= g.unit
    start += (streams.directory[first:last].astype(np.int64) - begin)[:, None] * 32
    position = start.reshape(-1)
    units, start = units.reshape(-1), position.copy()
    out = np.empty((blocks, g.octets, g.lanes, 4), np.uint32)
    table = book.decoding
    mask = np.uint64(len(table) - 1)
    length = np.uint32(127)
    for t in range(g.octets):
        for half in range(2):
            window = windows.take(position >> 5)
            window >>= (position & 31).view(np.uint64)
            entry = table.take((window & mask).view(np.int64))
            taken = entry & length
            out[:, t, :, 2 * half] = entry.reshape(blocks, -1)
            window >>= taken.astype(np.uint64)
            entry = table.take((window & mask).view(np.int64))
            out[:, t, :, 2 * half + 1] = entry.reshape(blocks, -1)
            taken += entry & length
            position += taken
    if check and not np.array_equal(-(-(position - start) // g.unit), units):
        raise StreamError("a stream ends elsewhere than its size says: the container is damaged; take another copy")
    exponents = (out.reshape(-1) & np.uint32(EXPONENTS)).view(np.uint16)
    apply_patches(exponents, streams.patches, streams.patch_directory, first, last, g.block)
    return exponents


def apply_patches(
    shifted: NDArray[np.uint16],
    patches: NDArray[np.uint32],
    directory: NDArray[np.uint32],
    first: int,
    last: int,
    block: int,
) -> None:
    """Puts the patched exponents of some blocks where they belong, shifted by 7."""
    start, end = int(directory[first]), int(directory[last])
    mine = patches[start:end].astype(np.int64)
    counts = np.diff(directory[first : last + 1].astype(np.int64))
    offsets = np.repeat(np.arange(last - first) * block, counts)
    shifted[offsets + (mine & 0xFFFFFF)] = mine >> 24 << 7
