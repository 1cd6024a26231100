"""Host side of encoding, in two parts: planes are written, lengths counted and sent to the host; then all the rest is
written.

What is sent is one small buffer: lengths of streams, number of patches, and the codebook.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from paperlm_kernels.neuzip import kernel_codebook, kernel_encode, kernel_pairs
from paperlm_kernels.neuzip.codebook import PALETTE, STORED, SYMBOLS, Codebook
from paperlm_kernels.neuzip.container import aligned
from paperlm_kernels.neuzip.fields import SCAN, WARP, plane_bytes
from paperlm_kernels.neuzip.geometry import MOST_UNITS, OCTET
from paperlm_kernels.neuzip.header import Codec, Header, Section
from paperlm_kernels.neuzip.launch import is_aligned, log_of, octets_of
from paperlm_kernels.neuzip.launcher import Launcher, on_device
from paperlm_kernels.neuzip.read_back import ReadBack
from paperlm_kernels.neuzip.sample import check_patches, counted_weights, runs_of
from paperlm_kernels.neuzip.streams import TooLongError

REGISTERS = 64
"Of a thread that counts: with more, fewer programs than COUNTING run at once."
_NORMALIZER = Launcher(kernel_encode.normalizer_kernel)
_COUNT = Launcher(kernel_codebook.count_kernel, maxnreg=REGISTERS)
_CODEBOOK = Launcher(kernel_codebook.codebook_kernel)
_DECODING = Launcher(kernel_codebook.decoding_kernel)
_LOWEST = Launcher(kernel_codebook.lowest_kernel)
_PAIRS = Launcher(kernel_pairs.pairs_kernel)
_SIZE = Launcher(kernel_encode.size_kernel)
_SCAN = Launcher(kernel_encode.scan_kernel, warps=8)
_WRITE = Launcher(kernel_encode.write_kernel)
_FIX4 = Launcher(kernel_encode.fix4_kernel)
_PATCH = Launcher(kernel_encode.patch_kernel)

COUNTING = 8
"Programs that count on a multiprocessor: as many as run at once, for each adds to the counters that all share."
MOST_STEPS = 8184
"Steps that one of them can count."
EXPONENTS = 256
TOLD = 1024
"Entries of a table of pairs of exponents that a program makes."
TOLD_OF_CODES = 256
"And of a table of codes; one has 2^8 or more."
SCANNED = 4096
"Blocks whose sizes are added up at once."
EXPECTED = 4096
"Weights that have one patch, at least, in codes of four bits: Gaussian ones have one of 6,500."
TOTALS = 64
"Bytes in front of the codebook, in the buffer that is read back: words, patches, the largest lane, escaping ones."


def _new(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A section, in a buffer of a multiple of 64 bytes."""
    whole = max(64, -(-count * dtype.itemsize // 64) * 64) // dtype.itemsize
    room = torch.empty(whole, dtype=dtype, device=device)
    return room if whole == count else room[:count]


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

    def scratch(self, count: int) -> Tensor:
        """Of int32, which nothing keeps."""
        return torch.empty(count, dtype=torch.int32, device=self.device)

    def run(self, launcher: Launcher, *tensors: Tensor, numbers: tuple[int, ...] = (), each: int = 1) -> None:
        """A kernel with a program for each block, or so many, given some numbers and the number of weights."""
        every = (self.weights, self.norm, *tensors)
        launcher(each * self.header.blocks, every, (*numbers, self.header.numel), self.constants)


Encoded = tuple[Header, dict[Section, Tensor], Codebook | None, int]
"Header, sections, codebook, and of FIX4 the lowest exponent."


def _job(t: Tensor, header: Header) -> _Job:
    n, count = header.block_norm, header.numel
    weights = t.view(torch.int16).view(-1)
    norm = _new(-(-count // n) if n else 0, torch.uint8, t.device)
    if n:
        first_warp = header.norm_semantics == "authors_v1" and WARP < n < SCAN
        _NORMALIZER(-(-count // SCAN), (weights, norm), (count,), {"N": n, "FIRST_WARP": first_warp, "STEP": SCAN})
    g = header.geometry
    constants = {
        "OCTETS": g.octets, "LANES": g.lanes, "UNIT": g.unit, "LIMIT": g.limit, "ALIGNED": is_aligned(t),
        "GUARD": g.guard, "PALETTE": PALETTE, "K": header.mant_bits, "LOG_NORM": log_of(n),
    }  # fmt: skip
    return _Job(weights, norm, header, constants)


def begin_encode(
    t: Tensor, header: Header, book: Codebook | None, *, all_counted: bool = False
) -> Callable[[], Encoded]:
    """Begins what `reference.encode` does, of a contiguous bfloat16 tensor with at least one element, on its device.

    What is returned ends it; `t` must not change before. It waits until the device has got as far as this, for lengths
    must be known, and raises TooLongError and UnlikeError.
    """
    with on_device(t):
        job = _job(t, header)
        runs = runs_of(header, all_counted)
        finish = _fix4(job, runs) if header.codec == Codec.FIX4 else _pfx(job, book, runs)

    def finish_there() -> Encoded:
        with on_device(t):
            return finish()

    return finish_there


def _with_rest(job: _Job, sections: dict[Section, Tensor], patches: Tensor) -> Header:
    """Adds what all codecs have. Returns the header with the number of patches."""
    sections[Section.PATCH] = patches
    if job.header.block_norm:
        sections[Section.NORM] = job.norm
    return job.header.with_patches(patches.numel())


@functools.cache
def _at_once(device: torch.device) -> int:
    """Programs that count."""
    if device.type != "cuda":
        return COUNTING
    return COUNTING * torch.cuda.get_device_properties(device).multi_processor_count


def _counts(job: _Job, runs: tuple[int, int]) -> tuple[Tensor, int]:
    """How often each exponent but 0 occurs in a block of each run, on the device; and of how many weights that is."""
    header, g = job.header, job.header.geometry
    counts = torch.zeros(256, dtype=torch.int64, device=job.device)
    each = MOST_STEPS // g.octets  # blocks, whole ones
    programs = max(min(runs[0], _at_once(job.device)), -(-runs[0] // each))
    _COUNT(programs, (job.weights, job.norm, counts), (header.numel, *runs, programs), job.constants)
    return counts, counted_weights(header, *runs)


def codebook_tables(
    counts: Tensor, numel: int, limit: int, stored: Tensor, escaping: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """`Codebook.of_counts` on the device, as its tables by name, and what `decoding_table` makes the last one of.
    counts: of the exponents of so many weights but of 0, which is what remains (256, int64). `stored` is written, the
    other tables are made. escaping: how many of these weights have no index (one int32), written."""
    device = counts.device
    tables = {
        "stored": stored, "index": _new(256, torch.uint8, device), "packing": _new(SYMBOLS, torch.int32, device),
    }  # fmt: skip
    scratch = torch.empty(1024, dtype=torch.int32, device=device)
    _CODEBOOK(1, (counts, *tables.values(), scratch, escaping), (numel, limit, 8), {})
    return tables, scratch


def decoding_table(scratch: Tensor, limit: int) -> Tensor:
    """`Codebook.decoding` (2^limit, int32) of what `codebook_tables` left."""
    table = _new(1 << limit, torch.int32, scratch.device)
    _DECODING(-(-(1 << limit) // TOLD_OF_CODES), (table, scratch), (limit,), {"PART": TOLD_OF_CODES})
    return table


def lowest_of(counts: Tensor, numel: int, lowest: Tensor, escaping: Tensor) -> Tensor:
    """`fix4.lowest_exponent` on the device, of counts as `codebook_tables` takes them: written into `lowest` (one
    uint8), and how many have no code into `escaping` (one int32). Returns the index of the exponents (256, uint8), 15
    for those that are patched."""
    index = _new(256, torch.uint8, counts.device)
    _LOWEST(1, (counts, lowest, index, escaping), (numel,), {})
    return index


def _scan(job: _Job, note: Tensor, patch_directory: Tensor, directory: Tensor | None, most: Tensor | None) -> ReadBack:
    """Turns sizes of blocks into directories, and sends the totals. directory, most: of streams, where there are."""
    streams = directory is not None
    tensors = (most, directory, patch_directory, note) if streams else (patch_directory,) * 3 + (note,)
    _SCAN(1, tensors, (job.header.blocks,), {"STREAMS": streams, "STEP": SCANNED})
    return ReadBack(note)


def _totals(read_back: ReadBack) -> tuple[int, int, int, int, np.ndarray]:
    """Words, patches, units of the largest lane, counted weights that escape; and the bytes behind. The one place that
    waits."""
    found = read_back.wait()
    words, patches, largest, escaping = found[:4].tolist()
    return words, patches, largest, escaping, found.view(np.uint8)[TOTALS:]


def _note(device: torch.device, behind: int) -> Tensor:
    """What is read back: totals, and so many bytes."""
    return torch.empty((TOTALS + aligned(behind)) // 4, dtype=torch.int32, device=device)


def _pfx(job: _Job, book: Codebook | None, runs: tuple[int, int]) -> Callable[[], Encoded]:
    header, g, blocks, device = job.header, job.header.geometry, job.header.blocks, job.device
    note, left = _note(device, STORED if book is None else 0), None
    if book is None:
        stored = note.view(torch.uint8)[TOTALS : TOTALS + STORED]
        tables, left = codebook_tables(*_counts(job, runs), g.limit, stored, note[3:4])
    else:
        tables = {which: book.table(device, which) for which in ("stored", "index", "packing")}
    stored, index, packing = tables["stored"], tables["index"], tables["packing"]
    units, sums = job.new(blocks * g.lanes, torch.uint8), job.new(blocks)
    directory, patch_directory = job.new(blocks + 1), job.new(blocks + 1)
    most, escaping = job.scratch(blocks), job.scratch(blocks)
    pairs = job.scratch(EXPONENTS * EXPONENTS)
    _PAIRS(EXPONENTS * EXPONENTS // TOLD, (stored, index, packing, pairs), (), {"PALETTE": PALETTE, "PART": TOLD})
    plane = job.new(plane_bytes(header.numel, header.mant_bits), torch.uint8)
    octets = octets_of(plane, header.mant_bits)
    common = (stored, pairs)
    job.run(_SIZE, *common, units, directory, most, patch_directory, escaping, sums, octets)
    read_back = _scan(job, note, patch_directory, directory, most)

    def finish() -> Encoded:
        total, count, largest, escaping_some, in_bytes = _totals(read_back)
        if largest > MOST_UNITS:
            raise TooLongError
        if book is None:
            check_patches(count, escaping_some, header, *runs)
        payload, patches, each = job.new(total + g.guard), job.new(count), 2 if count else 1
        job.run(
            _WRITE, *common, index, units, escaping, directory, patch_directory, payload, patches,
            numbers=(each,), each=each,
        )  # fmt: skip
        sections = {
            Section.CODEBOOK: stored, Section.BLOCK_DIR: directory, Section.LANE_UNITS: units, Section.PAYLOAD: payload,
            Section.PLANE: plane, Section.BLOCK_SUM: sums, Section.PATCH_DIR: patch_directory,
        }  # fmt: skip
        found = _with_rest(job, sections, patches)
        own = book
        if own is None:  # while the device writes
            own = Codebook.of_device(in_bytes[:STORED], g.limit)
            own.keep(device, tables | {"decoding": decoding_table(left, g.limit)})
        return found, sections, own, 0

    return finish


def _fix4(job: _Job, runs: tuple[int, int]) -> Callable[[], Encoded]:
    header, blocks = job.header, job.header.blocks
    note = _note(job.device, 1)
    lowest = note.view(torch.uint8)[TOTALS : TOTALS + 1]
    index = lowest_of(*_counts(job, runs), lowest, note[3:4])
    payload, sums = job.new(-(-header.numel // OCTET)), job.new(blocks)
    plane = job.new(plane_bytes(header.numel, header.mant_bits), torch.uint8)
    patch_directory, escaping = job.new(blocks + 1), job.scratch(blocks)
    job.run(_FIX4, lowest, payload, octets_of(plane, header.mant_bits), patch_directory, escaping, sums)
    read_back = _scan(job, note, patch_directory, None, None)
    # before their number is known, in room for those of nearly all tensors, so that nothing waits
    some = job.new(header.numel // EXPECTED + blocks)

    def write(room: Tensor) -> None:
        job.run(_PATCH, index, escaping, room, patch_directory, numbers=(room.numel(),))

    write(some)

    def finish() -> Encoded:
        _, count, _, escaping_some, in_bytes = _totals(read_back)
        check_patches(count, escaping_some, header, *runs)
        if count <= some.numel():
            patches = some[:count].clone()  # what is kept has no spare room
        else:
            patches = job.new(count)
            write(patches)
        sections = {
            Section.CODEBOOK: lowest, Section.PAYLOAD: payload, Section.PLANE: plane, Section.BLOCK_SUM: sums,
            Section.PATCH_DIR: patch_directory,
        }  # fmt: skip
        return _with_rest(job, sections, patches), sections, None, int(in_bytes[0])

    return finish
