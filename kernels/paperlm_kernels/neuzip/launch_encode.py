"""Host side of encoding. It reads back one small buffer: lengths of streams, number of patches, and the codebook."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from torch import Tensor

from paperlm_kernels.neuzip import kernel_codebook, kernel_encode
from paperlm_kernels.neuzip.codebook import STORED, SYMBOLS, Codebook
from paperlm_kernels.neuzip.container import aligned
from paperlm_kernels.neuzip.fields import SCAN, WARP, plane_bytes
from paperlm_kernels.neuzip.geometry import MOST_UNITS, OCTET
from paperlm_kernels.neuzip.header import Codec, Header, Section
from paperlm_kernels.neuzip.launch import is_whole, log_of, octets_of
from paperlm_kernels.neuzip.launcher import Launcher, on_device
from paperlm_kernels.neuzip.streams import TooLongError

_NORMALIZER = Launcher(kernel_encode.normalizer_kernel)
_COUNT = Launcher(kernel_codebook.count_kernel)
_CODEBOOK = Launcher(kernel_codebook.codebook_kernel)
_LOWEST = Launcher(kernel_codebook.lowest_kernel)
_SIZE = Launcher(kernel_encode.size_kernel)
_SCAN = Launcher(kernel_encode.scan_kernel, warps=8)
_WRITE = Launcher(kernel_encode.write_kernel)
_FIX4 = Launcher(kernel_encode.fix4_kernel)
_PATCH = Launcher(kernel_encode.patch_kernel)

COUNTING = 8
"Programs that count on a multiprocessor: as many as run at once, for each adds to the counters that all share."
MOST_STEPS = 8184
"Steps that one of them can count."
SCANNED = 4096
"Blocks whose sizes are added up at once."
TOTALS = 64
"Bytes in front of the codebook, in the buffer that is read back: words, patches, the largest lane."


def _new(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A section, in a buffer of a multiple of 64 bytes."""
    size = aligned(max(1, count * dtype.itemsize))
    return torch.empty(size // dtype.itemsize, dtype=dtype, device=device)[:count]


@dataclasses.dataclass
class _Job:
    """What the kernels of one tensor share."""

    weights: Tensor
    norm: Tensor
    header: Header
    constants: dict[str, int]

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def new(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return _new(count, dtype, self.device)

    def run(self, launcher: Launcher, *tensors: Tensor) -> None:
        """A kernel with a program for each block."""
        launcher(self.header.blocks, (self.weights, self.norm, *tensors), (self.header.numel,), self.constants)


@dataclasses.dataclass
class _Found:
    """Sections, with room for the patches; what says which exponents are patched, and which steps have some."""

    sections: dict[Section, Tensor]
    index: Tensor
    escaping: Tensor
    book: Codebook | None = None
    lowest: int = 0


def _job(t: Tensor, header: Header) -> _Job:
    n, count = header.block_norm, header.numel
    weights = t.view(torch.int16).view(-1)
    norm = _new(-(-count // n) if n else 0, torch.uint8, t.device)
    if n:
        first_warp = header.norm_semantics == "authors_v1" and WARP < n < SCAN
        _NORMALIZER(-(-count // SCAN), (weights, norm), (count,), {"N": n, "FIRST_WARP": first_warp, "STEP": SCAN})
    g = header.geometry
    constants = {
        "OCTETS": g.octets, "LANES": g.lanes, "UNIT": g.unit, "LIMIT": g.limit, "WHOLE": is_whole(t, count),
        "K": header.mant_bits, "LOG_NORM": log_of(n),
    }  # fmt: skip
    return _Job(weights, norm, header, constants)


def run_encode(
    t: Tensor, header: Header, book: Codebook | None
) -> tuple[Header, dict[Section, Tensor], Codebook | None, int]:
    """What `reference.encode` gives, of a contiguous bfloat16 tensor with at least one element, on its device; and of
    FIX4 the lowest exponent.

    Waits for the device once. Raises TooLongError.
    """
    with on_device(t):
        job = _job(t, header)
        found = _fix4(job) if header.codec == Codec.FIX4 else _pfx(job, book)
        patches = found.sections[Section.PATCH]
        if patches.numel():
            job.run(_PATCH, found.index, found.escaping, patches, found.sections[Section.PATCH_DIR])
        header = dataclasses.replace(header, patches=patches.numel())
    if header.block_norm:
        found.sections[Section.NORM] = job.norm
    return header, found.sections, found.book, found.lowest


@functools.cache
def _at_once(device: torch.device) -> int:
    """Programs that count."""
    if device.type != "cuda":
        return COUNTING
    return COUNTING * torch.cuda.get_device_properties(device).multi_processor_count


def _counts(job: _Job) -> Tensor:
    """How often each exponent but 0 occurs, on the device."""
    header, g = job.header, job.header.geometry
    counts = torch.zeros(256, dtype=torch.int64, device=job.device)
    programs = max(min(header.blocks, _at_once(job.device)), -(-header.blocks * g.octets // MOST_STEPS))
    numbers = (header.numel, header.blocks, programs)
    _COUNT(programs, (job.weights, job.norm, counts), numbers, job.constants)
    return counts


def codebook_tables(counts: Tensor, numel: int, limit: int, stored: Tensor) -> dict[str, Tensor]:
    """`Codebook.of_counts` on the device, as its tables by name. counts: of the exponents of so many weights but of 0,
    which is what remains (256, int64). `stored` is written, the other tables are made."""
    device = counts.device
    tables = {
        "stored": stored, "index": _new(256, torch.uint8, device), "packing": _new(SYMBOLS, torch.int32, device),
        "decoding": _new(1 << limit, torch.int32, device),
    }  # fmt: skip
    scratch = torch.empty(1024, dtype=torch.int32, device=device)
    _CODEBOOK(1, (counts, *tables.values(), scratch), (numel, limit, 8), {})
    return tables


def lowest_of(counts: Tensor, numel: int, lowest: Tensor) -> Tensor:
    """`fix4.lowest_exponent` on the device, of counts as `codebook_tables` takes them: written into `lowest` (one
    uint8). Returns the index of the exponents (256, uint8), 15 for those that are patched."""
    index = _new(256, torch.uint8, counts.device)
    _LOWEST(1, (counts, lowest, index), (numel,), {})
    return index


def _scanned(job: _Job, totals: Tensor, patch_counts: Tensor, words: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Directories of the blocks' words and patches, the first only where `words` are not `patch_counts`."""
    blocks, streams = job.header.blocks, words is not patch_counts
    patch_directory = job.new(blocks + 1)
    directory = job.new(blocks + 1) if streams else patch_directory
    tensors = (words, most, patch_counts, directory, patch_directory, totals)
    _SCAN(1, tensors, (blocks,), {"STREAMS": streams, "STEP": SCANNED})
    return directory, patch_directory


def _per_block(job: _Job, number: int) -> list[Tensor]:
    return [torch.empty(job.header.blocks, dtype=torch.int32, device=job.device) for _ in range(number)]


def _flags(job: _Job) -> Tensor:
    """A byte for each step of each block."""
    return torch.zeros(job.header.blocks * job.header.geometry.octets, dtype=torch.uint8, device=job.device)


def _read_back(note: Tensor) -> tuple[int, int, int, np.ndarray]:
    """Words, patches, units of the largest lane; and the bytes behind. The one place that waits."""
    found = note.cpu().numpy()
    words, patches, largest = found[:12].view(np.int32).tolist()
    return words, patches, largest, found[TOTALS:]


def _pfx(job: _Job, book: Codebook | None) -> _Found:
    g, blocks, device = job.header.geometry, job.header.blocks, job.device
    note = torch.empty(TOTALS + aligned(STORED), dtype=torch.uint8, device=device)
    if book is None:
        tables = codebook_tables(_counts(job), job.header.numel, g.limit, note[TOTALS : TOTALS + STORED])
    else:
        tables = {which: book.table(device, which) for which in ("stored", "index", "packing")}
    stored, index, packing = tables["stored"], tables["index"], tables["packing"]
    units, sums, escaping = job.new(blocks * g.lanes, torch.uint8), job.new(blocks), _flags(job)
    words, most, patch_counts = _per_block(job, 3)
    common = (stored, index, packing, units)
    job.run(_SIZE, *common, words, most, patch_counts, escaping, sums)
    directory, patch_directory = _scanned(job, note.view(torch.int32), patch_counts, words, most)
    total, patches, largest, in_bytes = _read_back(note)
    if largest > MOST_UNITS:
        raise TooLongError
    payload = job.new(total + g.guard)
    payload[total:].zero_()
    plane = job.new(plane_bytes(job.header.numel, job.header.mant_bits), torch.uint8)
    octets = octets_of(plane, job.header.mant_bits)
    job.run(_WRITE, *common, directory, payload, payload.view(torch.uint8), octets)
    if book is None:  # while the device writes
        book = Codebook.from_bytes(in_bytes[:STORED], g.limit)
        book.keep(device, tables)
    sections = {
        Section.CODEBOOK: stored, Section.BLOCK_DIR: directory, Section.LANE_UNITS: units, Section.PAYLOAD: payload,
        Section.PLANE: plane, Section.BLOCK_SUM: sums, Section.PATCH_DIR: patch_directory,
        Section.PATCH: job.new(patches),
    }  # fmt: skip
    return _Found(sections, index, escaping, book)


def _fix4(job: _Job) -> _Found:
    header, device = job.header, job.device
    note = torch.empty(2 * TOTALS, dtype=torch.uint8, device=device)
    lowest, escaping = note[TOTALS : TOTALS + 1], _flags(job)
    index = lowest_of(_counts(job), header.numel, lowest)
    payload, sums = job.new(-(-header.numel // OCTET)), job.new(header.blocks)
    plane = job.new(plane_bytes(header.numel, header.mant_bits), torch.uint8)
    (patch_counts,) = _per_block(job, 1)
    job.run(_FIX4, lowest, payload, octets_of(plane, header.mant_bits), patch_counts, escaping, sums)
    _, patch_directory = _scanned(job, note.view(torch.int32), patch_counts, patch_counts, patch_counts)
    _, patches, _, in_bytes = _read_back(note)
    sections = {
        Section.CODEBOOK: lowest, Section.PAYLOAD: payload, Section.PLANE: plane, Section.BLOCK_SUM: sums,
        Section.PATCH_DIR: patch_directory, Section.PATCH: job.new(patches),
    }  # fmt: skip
    return _Found(sections, index, escaping, lowest=int(in_bytes[0]))
