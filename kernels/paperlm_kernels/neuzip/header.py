"""The header of a container: its fields, their bytes, and what is refused in them."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import struct
import zlib

from paperlm_kernels.neuzip.errors import (
    HeaderChecksumError,
    HeaderError,
    MagicError,
    SectionError,
    ShapeError,
    TruncatedError,
    VersionError,
)
from paperlm_kernels.neuzip.fields import MANT_BITS, NORM_BLOCKS, SEMANTICS, plane_bytes
from paperlm_kernels.neuzip.geometry import LANES, OCTET, OCTETS, Geometry

MAGIC = b"\x89NZB\r\n\x1a\n"
"Damaged by whoever takes it for text."
MAJOR, MINOR = 1, 0
ALIGNED = 64
MOST, MOST_AXES = 2**40, 8
"Elements and axes of a tensor."
MOST_SECTIONS = 64
_FIXED = struct.Struct("<8sHHI12BI8QQIIIIQ")
_ENTRY = struct.Struct("<IIQQ")
assert _FIXED.size == 128 and _ENTRY.size == 24


class Codec(enum.IntEnum):
    """How the weights are kept. 3 is kept free for an asymmetric numeral system."""

    RAW = 0
    PFX = 1
    FIX4 = 2


class Section(enum.IntEnum):
    """Parts of a container."""

    CODEBOOK = 1
    BLOCK_DIR = 2
    LANE_UNITS = 3
    PAYLOAD = 4
    PLANE = 5
    NORM = 6
    PATCH_DIR = 7
    PATCH = 8
    BLOCK_SUM = 9


DTYPES = {"bfloat16": 1, "float16": 2, "float32": 3}
NAMES = {number: name for name, number in DTYPES.items()}
SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
LOSSY, SUMS = 1, 2
"Flags."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """What a container says of its tensor. geometry is None, and mant_bits of no effect on the bytes, for RAW."""

    dtype: str
    codec: Codec
    shape: tuple[int, ...]
    mant_bits: int = 7
    block_norm: int | None = None
    norm_semantics: str = "true_max"
    geometry: Geometry | None = None
    patches: int = 0

    @functools.cached_property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @functools.cached_property
    def blocks(self) -> int:
        """Blocks of the geometry; 0 for RAW."""
        return self.geometry.blocks(self.numel) if self.geometry else 0

    @property
    def lossy(self) -> bool:
        """Whether mantissa bits were left out."""
        return self.mant_bits != 7

    def with_patches(self, patches: int) -> Header:
        """The same but for the number of patches; faster than dataclasses.replace, and once a packing."""
        made = object.__new__(Header)
        made.__dict__.update(self.__dict__, patches=patches)
        return made

    def lengths(self) -> dict[Section, int]:
        """Bytes of the sections whose length follows from the header; all that there are but PAYLOAD of PFX."""
        if self.codec == Codec.RAW:
            return {Section.PLANE: self.numel * SIZES[self.dtype]}
        found = {
            Section.PLANE: plane_bytes(self.numel, self.mant_bits),
            Section.PATCH_DIR: 4 * (self.blocks + 1),
            Section.PATCH: 4 * self.patches,
            Section.BLOCK_SUM: 4 * self.blocks,
        }
        if self.codec == Codec.PFX:
            # 15 exponents, 256 lengths of half a byte
            found |= {
                Section.CODEBOOK: 143, Section.BLOCK_DIR: 4 * (self.blocks + 1), Section.LANE_UNITS: LANES * self.blocks
            }  # fmt: skip
        else:
            found |= {Section.CODEBOOK: 1, Section.PAYLOAD: 4 * -(-self.numel // OCTET)}
        if self.block_norm:
            found[Section.NORM] = -(-self.numel // self.block_norm)
        return found

    def to_bytes(self, table: list[tuple[Section, int, int, int]], total: int) -> bytes:
        """The header with its table of sections (id, CRC-32, offset, length) and its own CRC-32."""
        g = self.geometry
        size = _FIXED.size + _ENTRY.size * len(table) + 4
        raw = self.codec == Codec.RAW
        small = (
            DTYPES[self.dtype], self.codec, 0 if self.codec != Codec.PFX else 2, 0 if g is None else g.limit,
            self.mant_bits, (self.block_norm or 1).bit_length() - 1,
            0 if g is None else g.lanes.bit_length() - 1, 0 if g is None else g.octets.bit_length() - 1,
            0, 0, SEMANTICS.index(self.norm_semantics), len(self.shape),
        )  # fmt: skip
        fixed = _FIXED.pack(
            MAGIC, MAJOR, MINOR, size, *small, self.lossy * LOSSY | (not raw) * SUMS, *self.shape,
            *[0] * (8 - len(self.shape)), self.numel, self.blocks, int(self.codec == Codec.PFX), self.patches,
            len(table), total,
        )  # fmt: skip
        data = fixed + b"".join(_ENTRY.pack(*entry) for entry in table)
        return data + struct.pack("<I", zlib.crc32(data))


def parse_header(data: memoryview, *, checksum: bool) -> tuple[Header, dict[Section, tuple[int, int, int]]]:
    """The header of a container and its sections: CRC-32, offset and length of each.

    checksum: compare the header's CRC-32. Everything else is always looked at. Raises a ContainerError that says what
    is wrong: MagicError, VersionError, TruncatedError, HeaderChecksumError, HeaderError, ShapeError, SectionError.
    """
    if bytes(data[:8]) != MAGIC:
        raise MagicError("this does not begin as a container of weights does; is it another file, or text-converted?")
    if len(data) < _FIXED.size + 4:
        raise TruncatedError(f"{len(data)} bytes are fewer than a header has; take the whole container")
    _, major, _, size, *rest = _FIXED.unpack_from(data)
    if major != MAJOR:
        raise VersionError(f"a container of version {major}; this reads version {MAJOR}: use the version that wrote it")
    small, flags, shape, (numel, blocks, books, patches, sections, total) = rest[:12], rest[12], rest[13:21], rest[21:]
    if sections > MOST_SECTIONS or size != _FIXED.size + _ENTRY.size * sections + 4:
        raise HeaderError(f"a header of {size} bytes for {sections} sections: the container is damaged")
    if len(data) < size or total != len(data):
        raise TruncatedError(f"{len(data)} bytes of a container of {total}; take the whole of it and nothing behind it")
    if checksum and zlib.crc32(data[: size - 4]) != struct.unpack_from("<I", data, size - 4)[0]:
        raise HeaderChecksumError("the header's CRC-32 is another: the container is damaged; take another copy")
    header = _header(small, shape, patches)
    expected = (
        header.numel, header.blocks, int(header.codec == Codec.PFX),
        header.lossy * LOSSY | (header.codec != Codec.RAW) * SUMS,
    )  # fmt: skip
    if (numel, blocks, books, flags) != expected:
        kind = ShapeError if numel != header.numel else HeaderError
        raise kind(
            f"{numel} elements in {blocks} blocks with {books} codebooks and flags {flags}, where the other fields "
            f"make it {expected}: the container is damaged"
        )
    entries = [_ENTRY.unpack_from(data, _FIXED.size + _ENTRY.size * i) for i in range(sections)]
    return header, _sections(header, entries, size, total)


def _header(small: list[int], shape: list[int], patches: int) -> Header:
    dtype, codec, together, limit, k, log_norm, log_lanes, log_octets, order, rounding, semantics, ndim = small
    if codec not in tuple(Codec):
        raise VersionError(f"codec {codec}; this reads {', '.join(f'{c.value} ({c.name})' for c in Codec)}")
    norm = 1 << log_norm if log_norm else None
    raw, pfx = codec == Codec.RAW, codec == Codec.PFX
    geometry = None if raw else Geometry(1 << min(log_octets, 10), limit)
    right = (
        dtype in NAMES
        and k in MANT_BITS
        and (norm is None or (norm in NORM_BLOCKS and k != 7))
        and semantics < len(SEMANTICS)
        and (semantics == 0 or norm is not None)
        and ndim <= MOST_AXES
        and not any(shape[ndim:])
        and (order, rounding) == (0, 0)
        and (dtype == 1 or (raw and k == 7))
        and together == (2 if pfx else 0)
        and limit in ((11, 12) if pfx else (4,) if codec == Codec.FIX4 else (0,))
        and log_lanes == (0 if raw else LANES.bit_length() - 1)
        and (log_octets == 0 if raw else geometry.octets in OCTETS and log_octets < 10)
        and (patches == 0 or not raw)
    )
    if not right:
        raise HeaderError(f"fields of the header {small} that no writer of version {MAJOR} gives: container damaged")
    # an axis of 0 makes no room for others of any size
    if math.prod(max(1, axis) for axis in shape[:ndim]) > MOST:
        raise ShapeError(f"a tensor of more than 2^{MOST.bit_length() - 1} elements: the container is damaged")
    return Header(
        dtype=NAMES[dtype], codec=Codec(codec), shape=tuple(shape[:ndim]), mant_bits=k, block_norm=norm,
        norm_semantics=SEMANTICS[semantics], geometry=geometry, patches=patches,
    )  # fmt: skip


def _sections(
    header: Header, entries: list[tuple[int, int, int, int]], size: int, total: int
) -> dict[Section, tuple[int, int, int]]:
    end = size
    found: dict[Section, tuple[int, int, int]] = {}
    for number, crc, offset, length in sorted(entries, key=lambda entry: entry[2]):
        if offset % ALIGNED or offset < end or offset + length > total:
            raise SectionError(
                f"section {number} of {length} bytes at {offset} lies outside of the container, is not aligned to "
                f"{ALIGNED}, or overlaps: the container is damaged"
            )
        end = offset + length
        if number in tuple(Section):
            if number in found:
                raise SectionError(f"section {Section(number).name} is there twice: the container is damaged")
            found[Section(number)] = (crc, offset, length)
    lengths = header.lengths()
    wanted = set(lengths) | ({Section.PAYLOAD} if header.codec == Codec.PFX else set())
    if set(found) != wanted:
        names = ", ".join(section.name for section in sorted(set(found) ^ wanted))
        raise SectionError(f"sections missing or of no use here: {names}; the container is damaged")
    for section, right in lengths.items():
        if found[section][2] != right:
            raise SectionError(f"section {section.name} has {found[section][2]} bytes, not {right}: container damaged")
    return found
