"""Host side of the kernels: buffers and grids. Decoding waits for nothing; encoding reads three numbers back."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from paperlm_kernels.neuzip import decode_errors, fix4, kernel_decode, kernel_encode
from paperlm_kernels.neuzip.codebook import ESCAPE, Codebook
from paperlm_kernels.neuzip.container import aligned
from paperlm_kernels.neuzip.fields import SCAN, WARP, plane_bytes
from paperlm_kernels.neuzip.geometry import MOST_UNITS, OCTET
from paperlm_kernels.neuzip.header import Codec, Header, Section
from paperlm_kernels.neuzip.streams import TooLongError

if TYPE_CHECKING:
    from paperlm_kernels.neuzip.record import Packed

WARPS = 4
"One thread a lane."
SUMMED = 2**24
"Weights whose words are multiplied at once, each by its factor, to verify them."
_OCTET = {7: torch.int64, 3: torch.int32, 1: torch.int16, 0: torch.uint8}
"Integers that hold sign and mantissa of eight weights."


def octets_of(plane: Tensor, k: int) -> Tensor:
    """A plane as one integer for each octet; its buffer has the zeros that the last one may need."""
    size = k + 1
    count = -(-plane.numel() // size)
    whole = plane.as_strided((count * size,), (1,)) if plane.numel() % size else plane
    return whole.view(_OCTET[k])


def _whole(t: Tensor, numel: int) -> bool:
    """Whether eight weights can be read and written as words: a view may begin at any element of its storage."""
    return numel % OCTET == 0 and t.data_ptr() % 16 == 0


def _log(block: int | None) -> int:
    return block.bit_length() - 1 if block else 0


def run_decode(packed: Packed, target: Tensor, check: bool) -> None:
    """Decodes into a contiguous bfloat16 tensor. check: a stream that ends elsewhere sets the device's error word."""
    header: Header = packed.header
    s, g, device = packed.sections, header.geometry, packed.device
    plane = s[Section.PLANE]
    common = (octets_of(plane, header.mant_bits), plane, s.get(Section.NORM, plane), s[Section.PATCH],
              s[Section.PATCH_DIR], target.view(torch.int16).view(-1))  # fmt: skip
    meta = {
        "OCTETS": g.octets, "LANES": g.lanes, "K": header.mant_bits, "LOG_NORM": _log(header.block_norm),
        "WHOLE": _whole(target, header.numel), "num_warps": WARPS,
    }  # fmt: skip
    with torch.cuda.device_of(target):
        if header.codec == Codec.FIX4:
            kernel_decode.decode_fix4_kernel[(header.blocks,)](
                s[Section.PAYLOAD], *common, header.numel, packed.lowest, **meta
            )
        else:
            kernel_decode.decode_kernel[(header.blocks,)](
                s[Section.PAYLOAD], s[Section.BLOCK_DIR], s[Section.LANE_UNITS], packed.book.table(device), *common,
                decode_errors.word(device), header.numel, LIMIT=g.limit, UNIT=g.unit, CHECK=check, **meta,
            )  # fmt: skip


def block_sums(t: Tensor, header: Header) -> Tensor:
    """`reference.block_sums` of a contiguous tensor on its device, int32."""
    size, bits = header.geometry.block, t.view(torch.int16).view(-1)
    factors = torch.arange(size // 2, dtype=torch.int32, device=t.device) * 2 + 1
    found = []
    for part in bits.split(max(1, SUMMED // size) * size):
        whole = torch.nn.functional.pad(part, (0, -len(part) % size)).view(torch.int32).view(-1, size // 2)
        found.append((whole * factors).sum(1, dtype=torch.int32))
    return torch.cat(found)


def _new(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A section with zeros up to a multiple of 64 bytes behind it."""
    size = aligned(max(1, count * dtype.itemsize))
    return torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)[:count]


def _directory(sizes: Tensor) -> Tensor:
    """Exclusive sums and the total, int32."""
    out = _new(sizes.numel() + 1, torch.int32, sizes.device)
    torch.cumsum(sizes, 0, dtype=torch.int32, out=out[1:])
    return out


@dataclasses.dataclass
class _Job:
    """What the kernels of one tensor share."""

    weights: Tensor
    norm: Tensor
    header: Header
    meta: dict[str, int]

    def new(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return _new(count, dtype, self.weights.device)

    def run(self, kernel: Any, *arguments: Any, **more: Any) -> None:
        kernel[(self.header.blocks,)](self.weights, self.norm, *arguments, self.header.numel, **self.meta, **more)


def _job(t: Tensor, header: Header) -> _Job:
    n, count = header.block_norm, header.numel
    weights = t.view(torch.int16).view(-1)
    norm = _new(-(-count // n) if n else 0, torch.uint8, t.device)
    if n:
        kernel_encode.normalizer_kernel[(triton.cdiv(count, SCAN),)](
            weights, norm, count, N=n, FIRST_WARP=header.norm_semantics == "authors_v1" and WARP < n < SCAN, STEP=SCAN
        )
    g = header.geometry
    meta = {
        "OCTETS": g.octets, "LANES": g.lanes, "WHOLE": _whole(t, count), "K": header.mant_bits, "LOG_NORM": _log(n),
        "num_warps": WARPS,
    }  # fmt: skip
    return _Job(weights, norm, header, meta)


def run_encode(
    t: Tensor, header: Header, book: Codebook | None
) -> tuple[Header, dict[Section, Tensor], Codebook | None]:
    """What `reference.encode` gives, of a contiguous bfloat16 tensor with at least one element, on its device.

    Reads back the 256 counts, if there is no codebook, and three numbers. Raises TooLongError.
    """
    with torch.cuda.device_of(t):
        job = _job(t, header)
        counts = None
        if book is None or header.codec == Codec.FIX4:
            found = torch.zeros(256, dtype=torch.int64, device=t.device)
            job.run(kernel_encode.count_kernel, found)
            counts = found.cpu().numpy()
            counts[0] -= header.blocks * header.geometry.block - header.numel
        if header.codec == Codec.FIX4:
            sections, index = _fix4(job, fix4.lowest_exponent(counts))
        else:
            book = book or Codebook.of_counts(counts, header.geometry.limit)
            sections, index = _pfx(job, book)
        patches = sections[Section.PATCH]
        if patches.numel():
            kernel_encode.patch_kernel[(header.blocks,)](
                job.weights, job.norm, index, patches, sections[Section.PATCH_DIR], header.numel,
                BLOCK=header.geometry.block, K=header.mant_bits, LOG_NORM=job.meta["LOG_NORM"], STEP=SCAN,
                num_warps=WARPS,
            )  # fmt: skip
        header = dataclasses.replace(header, patches=patches.numel())
    if header.block_norm:
        sections[Section.NORM] = job.norm
    return header, sections, book


def _plane(job: _Job) -> tuple[Tensor, Tensor]:
    plane = job.new(plane_bytes(job.header.numel, job.header.mant_bits), torch.uint8)
    return plane, octets_of(plane, job.header.mant_bits)


def _pfx(job: _Job, book: Codebook) -> tuple[dict[Section, Tensor], Tensor]:
    """Sections, with room for the patches, and the index that says which exponents are patched."""
    g, blocks, device = job.header.geometry, job.header.blocks, job.weights.device
    index, codes = book.table(device, "index"), book.table(device, "codes")
    units, sums = job.new(blocks * g.lanes, torch.uint8), job.new(blocks)
    words, most, patch_counts = (torch.empty(blocks, dtype=torch.int32, device=device) for _ in range(3))
    job.run(kernel_encode.size_kernel, index, codes, units, words, most, patch_counts, sums, UNIT=g.unit)
    directory, patch_directory = _directory(words), _directory(patch_counts)
    longest, total, patches = torch.stack([most.max(), directory[-1], patch_directory[-1]]).tolist()
    if longest > MOST_UNITS:
        raise TooLongError
    payload = job.new(total + g.guard)
    plane, octets = _plane(job)
    in_units = payload.view(torch.uint8 if g.unit == 8 else torch.int16)
    job.run(
        kernel_encode.write_kernel, index, codes, units, directory, in_units, octets, LIMIT=g.limit, UNIT=g.unit
    )  # fmt: skip
    return {
        Section.CODEBOOK: book.table(device, "stored"), Section.BLOCK_DIR: directory, Section.LANE_UNITS: units,
        Section.PAYLOAD: payload, Section.PLANE: plane, Section.BLOCK_SUM: sums, Section.PATCH_DIR: patch_directory,
        Section.PATCH: job.new(patches),
    }, index  # fmt: skip


def _fix4(job: _Job, lowest: int) -> tuple[dict[Section, Tensor], Tensor]:
    header, device = job.header, job.weights.device
    payload, sums = job.new(-(-header.numel // OCTET)), job.new(header.blocks)
    plane, octets = _plane(job)
    patch_counts = torch.empty(header.blocks, dtype=torch.int32, device=device)
    kernel_encode.fix4_kernel[(header.blocks,)](
        job.weights, job.norm, payload, octets, patch_counts, sums, header.numel, lowest, **job.meta
    )
    index = torch.full((256,), ESCAPE, dtype=torch.uint8, device=device)
    index[lowest : lowest + fix4.WIDE] = 0
    stored = job.new(1, torch.uint8)
    stored.fill_(lowest)
    patch_directory = _directory(patch_counts)
    return {
        Section.CODEBOOK: stored, Section.PAYLOAD: payload, Section.PLANE: plane, Section.BLOCK_SUM: sums,
        Section.PATCH_DIR: patch_directory, Section.PATCH: job.new(int(patch_directory[-1])),
    }, index  # fmt: skip
