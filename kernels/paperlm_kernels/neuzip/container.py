"""Containers (`.nzb`): sections to bytes and back, with every check that keeps a decoder inside of its buffers.

What passes `read_container` can be decoded without a look at any index: a lane begins inside the payload and reads at
most the guard beyond its end, table indices are masked, patches lie in their block. Nothing is executed or unpickled.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from paperlm_kernels.neuzip.codebook import Codebook
from paperlm_kernels.neuzip.errors import (
    CodebookError,
    DirectoryError,
    HeaderError,
    PatchError,
    SectionChecksumError,
    SectionError,
)
from paperlm_kernels.neuzip.header import ALIGNED, Codec, Header, Section, parse_header

CHECKS = ("full", "header", "none")
WORDS = frozenset(
    {Section.BLOCK_DIR, Section.PAYLOAD, Section.PATCH_DIR, Section.PATCH, Section.BLOCK_SUM},
)
"Sections of 32-bit words; the others are bytes."
Arrays = dict[Section, NDArray]
AT_ONCE = 2**20
"Bytes of codes that are looked through together, which bounds the memory."


def aligned(size: int) -> int:
    """The next multiple of 64.

    >>> aligned(65), aligned(128)
    (128, 128)
    """
    return -(-size // ALIGNED) * ALIGNED


def write_container(header: Header, sections: Mapping[Section, NDArray]) -> bytes:
    """The bytes of a container. Sections are NumPy arrays, in the order of their ids."""
    parts = [(section, np.ascontiguousarray(sections[section]).view(np.uint8)) for section in sorted(sections)]
    offset = aligned(len(header.to_bytes([(section, 0, 0, 0) for section, _ in parts], 0)))
    table = []
    for section, data in parts:
        table.append((section, zlib.crc32(data), offset, len(data)))
        offset = aligned(offset + len(data))
    out = np.zeros(offset, np.uint8)
    head = header.to_bytes(table, offset)
    out[: len(head)] = np.frombuffer(head, np.uint8)
    for (_, data), (_, _, start, length) in zip(parts, table, strict=True):
        out[start : start + length] = data
    return out.tobytes()


def read_container(data: bytes | bytearray | memoryview, check: str = "full") -> tuple[Header, Arrays]:
    """Header and sections of a container, which are views of it.

    check: "full" compares all checksums, and the zeros between sections; "header" the header's; "none" no checksum.
    Whatever could lead a decoder out of its buffers is looked at in each case.

    Raises a ContainerError; ValueError for another `check`.
    """
    if check not in CHECKS:
        raise ValueError(f"check={check!r}; it is one of {', '.join(CHECKS)}")
    view = memoryview(data).cast("B")
    header, table = parse_header(view, checksum=check != "none")
    if check == "full":
        _checksums(view, table)
    everything = np.frombuffer(view, np.uint8)
    sections: Arrays = {}
    for section, (_, offset, length) in table.items():
        part = everything[offset : offset + length]
        if section in WORDS and length % 4:
            raise SectionError(f"section {section.name} of {length} bytes holds no whole words: container damaged")
        sections[section] = part.view("<u4") if section in WORDS else part
    if header.codec != Codec.RAW:
        check_sections(header, sections)
    return header, sections


def _checksums(view: memoryview, table: Mapping[Section, tuple[int, int, int]]) -> None:
    end = int.from_bytes(view[12:16], "little")
    for section, (crc, offset, length) in sorted(table.items(), key=lambda item: item[1][1]):
        if zlib.crc32(view[offset : offset + length]) != crc:
            raise SectionChecksumError(f"section {section.name} has another CRC-32: damaged; take another copy")
        # (sections of later versions may lie between)
        if offset - end < ALIGNED and any(view[end:offset]):
            raise HeaderError("bytes between the sections are not zero: the container is damaged; take another copy")
        end = offset + length
    if len(view) - end < ALIGNED and any(view[end:]):
        raise HeaderError("bytes behind the last section are not zero: the container is damaged; take another copy")


def check_sections(header: Header, sections: Mapping[Section, NDArray]) -> None:
    """What a decoder takes for granted of a coded tensor. Raises CodebookError, DirectoryError, PatchError."""
    g, blocks = header.geometry, header.blocks
    if header.codec == Codec.PFX:
        Codebook.from_bytes(sections[Section.CODEBOOK], g.limit)
        directory = sections[Section.BLOCK_DIR].astype(np.int64)
        payload = sections[Section.PAYLOAD]
        if directory[0] != 0 or directory[-1] + g.guard != len(payload) or directory[-1] >= 2**31:
            raise DirectoryError("the directory of blocks does not end where the payload does: container damaged")
        spans = g.words(sections[Section.LANE_UNITS].reshape(blocks, g.lanes))
        if not np.array_equal(np.diff(directory), spans):
            raise DirectoryError("blocks do not have the sizes of their lanes: the container is damaged")
        if payload[directory[-1] :].any():
            raise DirectoryError("the words behind the payload are not zero: the container is damaged")
    elif sections[Section.CODEBOOK][0] > 256 - 15:
        raise CodebookError(f"a lowest exponent of {sections[Section.CODEBOOK][0]}, 241 at most: container damaged")
    directory = sections[Section.PATCH_DIR].astype(np.int64)
    patches = sections[Section.PATCH]
    if directory[0] != 0 or directory[-1] != len(patches) or (np.diff(directory) < 0).any():
        raise PatchError("the directory of patches does not rise to their number: the container is damaged")
    if len(patches):
        block = np.repeat(np.arange(blocks), np.diff(directory))
        places = block * g.block + (patches & np.uint32(0xFFFFFF)).astype(np.int64)
        inside = (places < np.minimum((block + 1) * g.block, header.numel)).all()
        if not inside or (np.diff(places) <= 0).any():
            raise PatchError("patches are not in order, or not in their block: the container is damaged")
    if header.codec == Codec.FIX4:
        # code 0 means nothing of its own, so that decoders may take it for different exponents
        codes = sections[Section.PAYLOAD].view(np.uint8)
        expected, seen = places if len(patches) else np.zeros(0, np.int64), 0
        for start in range(0, len(codes), AT_ONCE):
            unsaid = _codes_0(codes[start : start + AT_ONCE]) + 2 * start
            unsaid = unsaid[unsaid < header.numel]
            if not np.array_equal(unsaid, expected[seen : seen + len(unsaid)]):
                break
            seen += len(unsaid)
        else:
            if seen == len(expected):
                return
        raise PatchError("codes 0 are not where the patches are: the container is damaged")


def _codes_0(codes: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Which of the two codes of each byte are 0."""
    (some,) = np.nonzero(((codes & 15) == 0) | (codes < 16))
    both = np.stack([codes[some] & 15, codes[some] >> 4], 1)
    return (2 * some[:, None] + np.arange(2))[both == 0]
