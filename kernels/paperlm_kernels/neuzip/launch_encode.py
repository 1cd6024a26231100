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
"Entries of a table of pairs of exponents that are made at once."
_PAIRED = {"PALETTE": PALETTE, "PART": TOLD}
TOLD_OF_CODES = 256
"And of a table of codes; one has 2^8 or more."
SCANNED = 4096
"Blocks whose sizes are added up at once."
EXPECTED = 4096
"Weights that have one patch, at least, in codes of four bits: Gaussian ones have one of 6,500."
SCRATCH = 1024
"Words that `kernel_codebook.codebook_kernel` writes for itself and for the table to decode with."
TOTALS = 64
"Bytes in front of the codebook, in the buffer that is read back: words, patches, the largest lane, escaping ones."


def _new(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A section, in a buffer of a multiple of 64 bytes."""
    whole = max(64, -(-count * dtype.itemsize // 64) * 64) // dtype.itemsize
    room = torch.empty(whole, dtype=dtype, device=device)
    return room if whole == count else room[:count]


def _together(device: torch.device, *counts: int) -> list[Tensor]:
    """Buffers of so many int32, each in a multiple of 64 bytes, in one: to ask a device's allocator takes longer than
    to part what it gives. The memory is free again when all of them are: they must be given up together."""
    sizes = [size for count in counts for size in (count, -count % 16)]
    return torch.empty(sum(sizes), dtype=torch.int32, device=device).split_with_sizes(sizes)[::2]


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

    def plane(self) -> Tensor:
        return _new(plane_bytes(self.header.numel, self.header.mant_bits), torch.uint8, self.device)

    def run(self, launcher: Launcher, *tensors: Tensor, numbers: tuple[int, ...] = (), each: int = 1) -> None:
        """A kernel with a program for each block, or so many, given some numbers and the number of weights."""
        every = (self.weights, self.norm, *tensors)
        launcher(each * self.header.blocks, every, (*numbers, self.header.numel), self.constants)


Encoded = tuple[Header, dict[Section, Tensor], Codebook | None, int]
"Header, sections, codebook, and of FIX4 the lowest exponent."


def _job(t: Tensor, header: Header) -> _Job:
    n, count = header.block_norm, header.numel
    weights = t.view(torch.int16)
    norm = weights  # without normalizers it is not read
    if n:
        norm = _new(-(-count // n), torch.uint8, t.device)
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
    counts: Tensor, numel: int, limit: int, scratch: Tensor, pairs: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """`Codebook.of_counts` on the device, as its tables by name, but "decoding" with nothing in it yet; and a note
    (`_noted`) with the stored one and how many of these weights have no index. counts: of the exponents of so many
    weights but of 0, which is what remains (256, int64). scratch: SCRATCH int32, for `decoding_table`. pairs:
    EXPONENTS^2 int32, of which the kernels read what they look up."""
    # all of this is kept as long as the codebook is
    note, packing, index, decoding = _together(counts.device, _noted(STORED), SYMBOLS, 64, 1 << limit)
    index, stored = index.view(torch.uint8), _behind(note, STORED)
    tensors = (counts, stored, index, packing, scratch, note[3:4], pairs)
    _CODEBOOK(1, tensors, (numel, limit, 8), _PAIRED)
    return {"stored": stored, "index": index, "packing": packing, "decoding": decoding}, note


def decoding_table(table: Tensor, scratch: Tensor, limit: int) -> None:
    """Writes `Codebook.decoding` (2^limit, int32) of what `codebook_tables` left."""
    _DECODING(-(-(1 << limit) // TOLD_OF_CODES), (table, scratch), (limit,), {"PART": TOLD_OF_CODES})


def lowest_of(counts: Tensor, numel: int, note: Tensor, index: Tensor) -> Tensor:
    """`fix4.lowest_exponent` on the device (one uint8), of counts as `codebook_tables` takes them. It is written into a
    note, and how many have no code; and into `index` (256, uint8) 15 for exponents that are patched."""
    lowest = _behind(note, 1)
    _LOWEST(1, (counts, lowest, index, note[3:4]), (numel,), {})
    return lowest


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


def _noted(behind: int) -> int:
    """Words of a note, which is read back: totals, and so many bytes."""
    return (TOTALS + aligned(behind)) // 4


def _behind(note: Tensor, count: int) -> Tensor:
    """Those bytes."""
    return note.view(torch.uint8)[TOTALS : TOTALS + count]


def _pfx(job: _Job, book: Codebook | None, runs: tuple[int, int]) -> Callable[[], Encoded]:
    # what the device can begin with is launched first, what is needed later is asked for after
    header, g, blocks, device = job.header, job.header.geometry, job.header.blocks, job.device
    counts, counted = _counts(job, runs) if book is None else (None, 0)
    pairs, most, escaping, left, note = _together(device, EXPONENTS * EXPONENTS, blocks, blocks, SCRATCH, _noted(0))
    if book is None:
        tables, note = codebook_tables(counts, counted, g.limit, left, pairs)
        stored, index = tables["stored"], tables["index"]
    else:
        stored, index, packing = (book.table(device, which) for which in ("stored", "index", "packing"))
        _PAIRS(EXPONENTS * EXPONENTS // TOLD, (stored, index, packing, pairs), (), _PAIRED)
    plane = job.plane()
    units, sums, directory, patch_directory = _together(device, blocks * g.lanes // 4, blocks, blocks + 1, blocks + 1)
    units = units.view(torch.uint8)
    common = (stored, pairs)
    octets = octets_of(plane, header.mant_bits)
    job.run(_SIZE, *common, units, directory, most, patch_directory, escaping, sums, octets)
    read_back = _scan(job, note, patch_directory, directory, most)
    if book is None:
        decoding_table(tables["decoding"], left, g.limit)
    sections = {
        Section.CODEBOOK: stored, Section.BLOCK_DIR: directory, Section.LANE_UNITS: units, Section.PLANE: plane,
        Section.BLOCK_SUM: sums, Section.PATCH_DIR: patch_directory,
    }  # fmt: skip

    def finish() -> Encoded:
        total, count, largest, escaping_some, in_bytes = _totals(read_back)
        if largest > MOST_UNITS:
            raise TooLongError
        if book is None:
            check_patches(count, escaping_some, header, *runs)
        payload, patches = _together(device, total + g.guard, count)
        each = 2 if count else 1
        job.run(
            _WRITE, *common, index, units, escaping, directory, patch_directory, payload, patches,
            numbers=(each,), each=each,
        )  # fmt: skip
        sections[Section.PAYLOAD] = payload
        found = _with_rest(job, sections, patches)
        own = book
        if own is None:  # while the device writes
            own = Codebook.of_device(in_bytes[:STORED], g.limit)
            own.keep(device, tables)
        return found, sections, own, 0

    return finish


def _fix4(job: _Job, runs: tuple[int, int]) -> Callable[[], Encoded]:
    header, blocks, device = job.header, job.header.blocks, job.device
    counts, counted = _counts(job, runs)
    note, patch_directory, sums = _together(device, _noted(1), blocks + 1, blocks)
    # patches before their number is known, in room for those of nearly all tensors, so that nothing waits
    index, escaping, some = _together(device, 64, blocks, header.numel // EXPECTED + blocks)
    index = index.view(torch.uint8)
    lowest = lowest_of(counts, counted, note, index)
    plane = job.plane()
    (payload,) = _together(device, -(-header.numel // OCTET))
    job.run(_FIX4, lowest, payload, octets_of(plane, header.mant_bits), patch_directory, escaping, sums)
    read_back = _scan(job, note, patch_directory, None, None)

    def write(room: Tensor) -> None:
        job.run(_PATCH, index, escaping, room, patch_directory, numbers=(room.numel(),))

    write(some)
    sections = {
        Section.CODEBOOK: lowest, Section.PAYLOAD: payload, Section.PLANE: plane, Section.BLOCK_SUM: sums,
        Section.PATCH_DIR: patch_directory,
    }  # fmt: skip

    def finish() -> Encoded:
        _, count, _, escaping_some, in_bytes = _totals(read_back)
        check_patches(count, escaping_some, header, *runs)
        if count <= some.numel():
            patches = some[:count].clone()  # what is kept has no spare room
        else:
            (patches,) = _together(device, count)
            write(patches)
        return _with_rest(job, sections, patches), sections, None, int(in_bytes[0])

    return finish
