"""A tensor of bfloat16 patterns to sections and back, in NumPy: the definition, and the codec of a CPU.

Blocks go in chunks that fit a core's cache. What the kernels write and read is the same to the byte.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from paperlm_kernels.neuzip import fields, fix4, mantissas
from paperlm_kernels.neuzip.codebook import Codebook
from paperlm_kernels.neuzip.container import Arrays
from paperlm_kernels.neuzip.errors import BlockSumError
from paperlm_kernels.neuzip.header import Codec, Header, Section
from paperlm_kernels.neuzip.sample import check_patches, counted_of, runs_of
from paperlm_kernels.neuzip.streams import Encoder, Streams, apply_patches, chunks, decode_blocks


def count_exponents(exponents: NDArray[np.uint8]) -> NDArray[np.int64]:
    """How often each of the 256 occurs."""
    even = len(exponents) // 2 * 2
    pairs = np.bincount(exponents[:even].view(np.uint16), minlength=2**16).reshape(256, 256)
    counts = pairs.sum(axis=0) + pairs.sum(axis=1)
    if even < len(exponents):
        counts[exponents[-1]] += 1
    return counts


def block_sums(bits: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """Of whole blocks (blocks, weights): the sum of (2i + 1) times the i-th 32-bit word, modulo 2^32."""
    words = bits.view(np.uint32)
    factors = np.arange(words.shape[1], dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return (words * factors).sum(axis=1, dtype=np.uint32)


def round_trip(bits: NDArray[np.uint16], header: Header) -> NDArray[np.uint16]:
    """What lossy coding makes of weights, without coding them."""
    return mantissas.lossy_split(bits, header.mant_bits, header.block_norm, header.norm_semantics)[-1]


def encode(
    bits: NDArray[np.uint16], header: Header, book: Codebook | None, *, all_counted: bool = False
) -> tuple[Header, Arrays, Codebook | None]:
    """Header (with the number of patches), sections and codebook of flat patterns (uint16). book: one that is there,
    which codes any tensor without loss; None makes the best for what is counted: some blocks
    (`sample`), or all. Raises streams.TooLongError: store them RAW; sample.UnlikeError: count all.
    """
    g, k = header.geometry, header.mant_bits
    count, blocks = len(bits), header.blocks
    exponents = np.empty(blocks * g.block, np.uint8)
    planes, sums, norms = [], [], []
    for first, last in chunks(blocks, g):
        span = slice(first * g.block, min(last * g.block, count))
        part = bits[span]
        if header.lossy:
            exponents[span], items, norm, part = mantissas.lossy_split(
                part, k, header.block_norm, header.norm_semantics
            )
            if norm is not None:
                norms.append(norm)
        else:
            exponents[span], items = fields.split(part)
        planes.append(fields.pack_plane(items, k))
        sums.append(block_sums(_whole(part, (last - first) * g.block).reshape(last - first, -1)))
    sections: Arrays = {Section.PLANE: np.concatenate(planes), Section.BLOCK_SUM: np.concatenate(sums)}
    if header.block_norm:
        sections[Section.NORM] = np.concatenate(norms)
    counts, fresh = None, book is None
    if fresh:
        runs = runs_of(header, all_counted)
        counts = count_exponents(counted_of(exponents[:count], header, *runs))
    if header.codec == Codec.FIX4:
        lowest = fix4.lowest_exponent(counts)
        payload, patches, directory = fix4.encode(exponents[:count], lowest, g.block)
        sections |= {Section.CODEBOOK: np.array([lowest], np.uint8), Section.PAYLOAD: payload}
    else:
        book = book or Codebook.of_counts(counts, g.limit)
        exponents[count:] = book.palette[0]
        encoder = Encoder(book, g)
        for first, last in chunks(blocks, g):
            encoder.add(exponents[first * g.block : last * g.block])
        made = encoder.finish()
        patches, directory = made.patches, made.patch_directory
        sections |= {
            Section.CODEBOOK: book.to_bytes(), Section.BLOCK_DIR: made.directory,
            Section.LANE_UNITS: made.units.reshape(-1), Section.PAYLOAD: made.payload,
        }  # fmt: skip
    if fresh:
        known = np.isin(np.arange(256), book.palette) if book else fix4.window(lowest)
        check_patches(len(patches), int(counts[~known].sum()), header, *runs)
    sections |= {Section.PATCH_DIR: directory, Section.PATCH: patches}
    return dataclasses.replace(header, patches=len(patches)), sections, book


def decode(
    header: Header, sections: Arrays, book: Codebook | None, out: NDArray[np.uint16], *, sums: bool = False
) -> None:
    """Patterns of sections that were looked through, into `out` (flat). sums: compare the sums of the blocks.

    Raises StreamError, BlockSumError.
    """
    g, k, count = header.geometry, header.mant_bits, header.numel
    streams = None
    if header.codec == Codec.PFX:
        streams = Streams(
            sections[Section.PAYLOAD], sections[Section.BLOCK_DIR],
            sections[Section.LANE_UNITS].reshape(header.blocks, g.lanes), sections[Section.PATCH],
            sections[Section.PATCH_DIR],
        )  # fmt: skip
    plane = sections[Section.PLANE]
    for first, last in chunks(header.blocks, g):
        begin, end = first * g.block, min(last * g.block, count)
        if streams:
            shifted = decode_blocks(streams, book, g, first, last)[: end - begin]
        else:
            words = sections[Section.PAYLOAD][begin // 8 : -(-end // 8)]
            shifted = fix4.decode(words, int(sections[Section.CODEBOOK][0]))[: end - begin]
            apply_patches(shifted, sections[Section.PATCH], sections[Section.PATCH_DIR], first, last, g.block)
        if k == 7:
            wide = plane[begin:end].astype(np.uint16)
            wide |= wide << np.uint16(8)
            wide &= np.uint16(0x807F)
            np.bitwise_or(wide, shifted, out=out[begin:end])
        else:
            size = fields.plane_bytes(end - begin, k)
            start = fields.plane_bytes(begin, k)
            items = fields.unpack_plane(plane[start : start + size], k, end - begin)
            n = header.block_norm
            norm = sections[Section.NORM][begin // n : -(-end // n)] if n else None
            out[begin:end] = mantissas.lossy_merge(shifted, items, k, norm, n)
        if sums:
            blocks = _whole(out[begin:end], (last - first) * g.block).reshape(last - first, -1)
            if not np.array_equal(block_sums(blocks), sections[Section.BLOCK_SUM][first:last]):
                raise BlockSumError(
                    f"blocks {first} to {last - 1} have other sums than when they were packed: the container is "
                    "damaged; take another copy"
                )


def _whole(bits: NDArray[np.uint16], size: int) -> NDArray[np.uint16]:
    """With zeros behind."""
    if len(bits) == size:
        return bits
    whole = np.zeros(size, np.uint16)
    whole[: len(bits)] = bits
    return whole
