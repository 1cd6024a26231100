"""Host side of encoding, in two parts: planes are written, lengths counted and sent to the host; then all the rest is
written.

What is sent is one small buffer: lengths of streams, number of patches, and the codebook. So that the card need not
wait while it is on its way, the rest is first written into room for as much as the last tensor with that header took,
or the one that is replaced, and a little more. Where it fits it stays there; else a kernel writes it once more.

A card is done with a layer's weights before Python has launched what comes next. So buffers share allocations, kernels
are found once, and tensors are made of buffers when somebody asks for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from paperlm_kernels.neuzip import kernel_codebook, kernel_encode, kernel_pairs
from paperlm_kernels.neuzip.buffers import Layout, Room
from paperlm_kernels.neuzip.codebook import PALETTE, STORED, SYMBOLS, Codebook
from paperlm_kernels.neuzip.coding import Later, Taken
from paperlm_kernels.neuzip.fields import SCAN, WARP, plane_bytes
from paperlm_kernels.neuzip.geometry import MOST_UNITS, OCTET
from paperlm_kernels.neuzip.header import Codec, Header, Section
from paperlm_kernels.neuzip.launch import is_aligned, log_of, octets_of
from paperlm_kernels.neuzip.launcher import Launcher, Starts, on_device
from paperlm_kernels.neuzip.read_back import WORDS, ReadBack
from paperlm_kernels.neuzip.sample import check_patches, counted_weights, runs_of
from paperlm_kernels.neuzip.streams import TooLongError

REGISTERS = 64
"Of a thread that counts: with more, fewer programs than COUNTING run at once."
_NORMALIZER = Launcher(kernel_encode.normalizer_kernel)
_COUNT = Launcher(kernel_codebook.count_kernel, maxnreg=REGISTERS)
_CODEBOOK = Launcher(kernel_codebook.codebook_kernel)
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
TOLD_OF_CODES = 256
"And of a table of codes; one has 2^8 or more."
SCANNED = 4096
"Blocks whose sizes are added up at once."
EXPECTED = 4096
"Weights that have one patch, at least, in codes of four bits: Gaussian ones have one of 6,500."
SPARE_WORDS = 2048
SPARE_PATCHES = 8
SPARE = 16
"""Room for what is expected, and a word more for each SPARE_WORDS of it, a patch for each SPARE_PATCHES, and SPARE.
Two Gaussian tensors of 2^24 weights differ by one word of 10,000. What is fewer by more than that has no room there
either: spare room stays as long as the tensor."""
LEFT = 1024
"Words that `kernel_codebook.codebook_kernel` writes for itself and for the table to decode with."
TOTALS = 16
"Words in front of what else the host is sent: words, patches, units of the largest lane, escaping ones."
NOTED = WORDS
"Words that the host is sent with a codebook: TOTALS and, behind them, the stored one;"
NOTED_OF_FIX4 = 2 * TOTALS
"and with codes of four bits: TOTALS and the lowest exponent, which lies behind them in what is kept."

_BYTES = ("stored", "lowest", "index", "units", "norm")
"Buffers of uint8; most others are int32."

Encoded = tuple[Header, Later, Codebook | None, int]
"Header, sections, codebook, and of FIX4 the lowest exponent."


def _words(size: int) -> int:
    """int32 with room for so many bytes."""
    return -(-size // 4)


def tables_layout(limit: int) -> Layout:
    """What is kept as long as a codebook is, and in front of it what the host is sent with it."""
    return Layout(
        note=TOTALS, stored=_words(STORED), packing=SYMBOLS, index=_words(EXPONENTS), decoding=1 << limit
    )  # fmt: skip


class Plan:
    """What does not change between tensors with the same header (without patches), on a device, that all begin on 16
    bytes, or do not. `tables` are of prefix codes alone, `patch_room` and `early` of codes of four bits."""

    def __init__(self, header: Header, device: torch.device, on_16: bool) -> None:
        g, blocks, n, count = header.geometry, header.blocks, header.block_norm, header.numel
        streams = header.codec == Codec.PFX
        self.programs = COUNTING
        if device.type == "cuda":
            self.programs *= torch.cuda.get_device_properties(device).multi_processor_count
        self.starts = Starts({
            "OCTETS": g.octets, "LANES": g.lanes, "UNIT": g.unit, "ALIGNED": on_16,
            "GUARD": g.guard, "PALETTE": PALETTE, "K": header.mant_bits, "LOG_NORM": log_of(n), "N": n or 0,
            "FIRST_WARP": header.norm_semantics == "authors_v1" and n is not None and WARP < n < SCAN,
            "SCAN": SCAN, "STREAMS": streams, "STEP": SCANNED, "NOTED": NOTED if streams else NOTED_OF_FIX4,
            "PART": TOLD, "CODES": TOLD_OF_CODES, "MOST": MOST_UNITS,
        }, device)  # fmt: skip
        self.stored = sum(header.lengths().values())
        "Bytes of all sections but streams and patches."
        self.sizes = {"plane": plane_bytes(count, header.mant_bits), "norm": -(-count // n) if n else 0}
        scratch = {"counts": 2 * EXPONENTS, "escaping": blocks}
        kept = {name: _words(size) for name, size in self.sizes.items()}
        kept |= {"sums": blocks, "patch_directory": blocks + 1}
        if streams:
            self.tables = tables_layout(g.limit)
            self.sizes["units"] = blocks * g.lanes
            scratch |= {"left": LEFT, "pairs": EXPONENTS * EXPONENTS, "most": blocks, "note": NOTED}
            kept |= {"directory": blocks + 1, "units": _words(self.sizes["units"])}
        else:
            scratch |= {"index": _words(EXPONENTS)}
            kept |= {"note": TOTALS, "lowest": 1, "payload": -(-count // OCTET)}
            self.patch_room = count // EXPECTED + blocks
            self.early = Layout(patches=self.patch_room)
        self.scratch, self.kept = Layout(**scratch), Layout(**kept)
        self.last: Taken | None = None
        "Of the last tensor that was packed so."


_plan_of = functools.lru_cache(1024)(Plan)


class Job:
    """One tensor on its way: its buffers, by the names that they have in the kernels."""

    def __init__(self, t: Tensor, header: Header) -> None:
        self.weights, self.header, self.device = t, header, t.device
        self.plan = _plan_of(header, t.device, is_aligned(t))
        self.at: dict[str, int] = {}
        self._rooms: list[Room] = []
        self._given: dict[str, Tensor] = {}
        self.give("weights", t)
        self.take(self.plan.scratch, zeros=True)  # counters, and a note, begin at 0
        self.kept = self.take(self.plan.kept)
        if header.block_norm:
            self.run(_NORMALIZER, -(-header.numel // SCAN), header.numel)
        else:
            self.give("norm", t)  # it is not read

    def give(self, name: str, t: Tensor) -> None:
        """A tensor that is there."""
        self._given[name], self.at[name] = t, t.data_ptr()

    def take(self, layout: Layout, *, zeros: bool = False) -> Room:
        """New buffers, in place of those that had the same names."""
        room = layout.room(self.device, zeros=zeros)
        self.at |= room.places()
        self._rooms.append(room)
        return room

    def tensor(self, name: str) -> Tensor:
        """A buffer as the kernels have it."""
        if name == "plane":
            return octets_of(self.section(name), self.header.mant_bits)
        found = self._given.get(name)
        if found is None:
            found = next(room.tensors[name] for room in reversed(self._rooms) if name in room.tensors)
        if found.dtype == torch.bfloat16:
            return found.view(torch.int16)
        return found.view(torch.uint8 if name in _BYTES else torch.int64 if name == "counts" else torch.int32)

    def section(self, name: str) -> Tensor:
        """A buffer that is kept, of which the last word may not be full: uint8."""
        return self.kept.bytes(name, self.plan.sizes[name])

    def run(self, launcher: Launcher, programs: int, *numbers: int) -> None:
        """Launches a kernel."""
        self.plan.starts.run(launcher, programs, self.at, self.tensor, *numbers)

    def drop(self, room: Room) -> None:
        """A room is not needed."""
        self._rooms.remove(room)

    def count(self, runs: tuple[int, int]) -> int:
        """How often each exponent but 0 occurs in a block of each run, as "counts"; and of how many weights that is."""
        each = MOST_STEPS // self.header.geometry.octets  # blocks, whole ones
        programs = max(min(runs[0], self.plan.programs), -(-runs[0] // each))
        self.run(_COUNT, programs, self.header.numel, *runs, programs)
        return counted_weights(self.header, *runs)

    def scan(self) -> ReadBack:
        """Turns sizes of blocks into directories, and sends the totals and the note behind them."""
        read_back = ReadBack(self.device)
        self.give("host", read_back.room)
        self.run(_SCAN, 1, self.header.blocks)
        read_back.sent()
        return read_back


def _every(plan: Plan, kept: Room, patches: Tensor) -> dict[Section, Tensor]:
    """The sections that all codecs have."""
    tensors, sizes = kept.tensors, plan.sizes
    sections = {
        Section.PLANE: kept.bytes("plane", sizes["plane"]), Section.BLOCK_SUM: tensors["sums"],
        Section.PATCH_DIR: tensors["patch_directory"], Section.PATCH: patches,
    }  # fmt: skip
    return sections | ({Section.NORM: kept.bytes("norm", sizes["norm"])} if sizes["norm"] else {})


def begin_encode(
    t: Tensor, header: Header, book: Codebook | None, *, all_counted: bool = False, like: Taken | None = None
) -> Callable[[], Encoded]:
    """Begins what `reference.encode` does, of a contiguous bfloat16 tensor with at least one element, on its device.
    like: what a tensor took that had about the same values.

    What is returned ends it, on the same stream; `t` must not change before. It waits until the device has got as far
    as lengths are known, and raises TooLongError and UnlikeError.
    """
    with on_device(t):
        job = Job(t, header)
        runs = runs_of(header, all_counted)
        like = like or job.plan.last
        finish = _fix4(job, runs, like) if header.codec == Codec.FIX4 else _pfx(job, book, runs, like)

    def finish_there() -> Encoded:
        with on_device(t):
            return finish()

    return finish_there


def _totals(read_back: ReadBack) -> tuple[int, int, int, int, np.ndarray]:
    """Words, patches, units of the largest lane, counted weights that escape; and the bytes behind. The one place that
    waits."""
    found = read_back.wait()
    words, patches, largest, escaping = found[:4].tolist()
    return words, patches, largest, escaping, found[TOTALS:].view(np.uint8)


class Guess:
    """How much room there is for what is expected, and what may be kept in it."""

    def __init__(self, like: Taken) -> None:
        words, patches = like
        spare_words, spare_patches = words // SPARE_WORDS + SPARE, patches // SPARE_PATCHES + SPARE if patches else 0
        self.fewest, self.words = max(0, words - spare_words), words + spare_words
        self._fewest_patches, self.patches = patches - spare_patches, patches + spare_patches

    def holds(self, words: int, patches: int) -> bool:
        """Whether it is all there, and little room left."""
        return self.fewest <= words <= self.words and self._fewest_patches <= patches <= self.patches


def _pfx(job: Job, book: Codebook | None, runs: tuple[int, int], like: Taken | None) -> Callable[[], Encoded]:
    header, g, plan, device = job.header, job.header.geometry, job.plan, job.device
    units = plan.sizes["units"]
    if book is None:
        counted = job.count(runs)
        own = job.take(plan.tables)
        job.run(_CODEBOOK, 1, counted, g.limit, 8)
    else:
        for name in ("stored", "index", "packing"):  # and the note that is sent says nothing
            job.give(name, book.table(device, name))
        job.give("decoding", book.table(device, "packing"))  # none is written
        job.run(_PAIRS, EXPONENTS * EXPONENTS // TOLD)
    job.run(_SIZE, header.blocks, header.numel)
    read_back = job.scan()

    def write(fewest: int, words: int, patches: int) -> Room:
        room = job.take(Layout(payload=words + g.guard, patches=patches))
        parts, each = (1 << g.limit) // TOLD_OF_CODES if book is None else 0, 2 if patches else 1
        numbers = parts, g.limit, each, fewest, words, patches, header.numel
        job.run(_WRITE, parts + each * header.blocks, *numbers)
        return room

    guess = Guess(like) if like else None
    streams = write(guess.fewest, guess.words, guess.patches) if guess else None

    def finish() -> Encoded:
        words, count, largest, escaping, stored = _totals(read_back)
        if largest > MOST_UNITS:
            raise TooLongError
        if book is None:  # what escapes an old one is looked at where it is kept, by `Packed.update_later`
            check_patches(count, escaping, header, *runs)
        nonlocal streams
        if streams is None or not guess.holds(words, count):
            if streams is not None:
                job.drop(streams)
                streams = None  # so that its room can be used for what follows
            streams = write(words, words, count)
        taken = plan.last = words, count
        kept, written = job.kept, streams  # the job, and with it what only kernels need, is free again

        def sections() -> dict[Section, Tensor]:
            return {
                Section.CODEBOOK: own.bytes("stored", STORED) if book is None else book.table(device, "stored"),
                Section.BLOCK_DIR: kept.tensors["directory"], Section.LANE_UNITS: kept.bytes("units", units),
                Section.PAYLOAD: written.tensors["payload"][: words + g.guard],
                **_every(plan, kept, written.tensors["patches"][:count]),
            }  # fmt: skip

        def places() -> dict[str, int]:
            table = own.places()["decoding"] if book is None else book.table(device).data_ptr()
            return kept.places() | written.places() | {"table": table}

        later = Later(device, plan.stored + 4 * (words + g.guard + count), taken, sections, places)
        if book is not None:
            return header.with_patches(count), later, book, 0
        made = Codebook.of_device(stored[:STORED], g.limit)
        made.keep_later(device, lambda: {
            "stored": own.bytes("stored", STORED), "index": own.bytes("index", EXPONENTS),
            "packing": own.tensors["packing"], "decoding": own.tensors["decoding"],
        })  # fmt: skip
        return header.with_patches(count), later, made, 0

    return finish


def _fix4(job: Job, runs: tuple[int, int], like: Taken | None) -> Callable[[], Encoded]:
    header, plan = job.header, job.plan
    counted = job.count(runs)
    job.run(_LOWEST, 1, counted)
    job.run(_FIX4, header.blocks, header.numel)
    for name in ("most", "directory"):  # not touched without streams, but a launch needs an address
        job.give(name, job.kept.tensors["patch_directory"])
    read_back = job.scan()

    def write(layout: Layout, patches: int) -> Room:
        room = job.take(layout)
        job.run(_PATCH, header.blocks, patches, header.numel)
        return room

    guess = Guess(like) if like else None
    room = guess.patches if guess else plan.patch_room
    early = write(Layout(patches=room) if guess else plan.early, room)

    def finish() -> Encoded:
        _, count, _, escaping, lowest = _totals(read_back)
        check_patches(count, escaping, header, *runs)
        taken = plan.last = 0, count
        nonlocal early
        kept, whole = job.kept, None
        if count > room:
            job.drop(early)
            early = None  # so that its room can be used for what follows
            written = write(Layout(patches=count), count)
        else:
            written = early
            if not (guess and guess.holds(0, count)):
                whole = early.tensors["patches"][:count].clone()  # what is kept has little spare room
                written = None

        def sections() -> dict[Section, Tensor]:
            patches = whole if written is None else written.tensors["patches"][:count]
            return {
                Section.CODEBOOK: kept.tensors["lowest"].view(torch.uint8)[:1],
                Section.PAYLOAD: kept.tensors["payload"], **_every(plan, kept, patches),
            }  # fmt: skip

        def places() -> dict[str, int]:
            there = {"patches": whole.data_ptr()} if written is None else written.places()
            return kept.places() | there

        later = Later(job.device, plan.stored + 4 * count, taken, sections, places)
        return header.with_patches(count), later, None, int(lowest[0])

    return finish
