"""Times the tiles that a product may take, on each matrix: what those of `paperlm_kernels.ternary_linear` come from.

    python -m paperlm_kernels.bench.ops.ternary_linear.sweep --cases 7b_m16,3b_o_m1 --out sweep.jsonl

compiles them in several processes, then prints, for each matrix and number of tokens, the product by cuBLAS in
bfloat16, by the tiles that are chosen, and by the best three, in microseconds. Tiles whose result has another bit than
that of the chosen ones, and those that failed, are named. Each case is timed in a process of its own: after an access
outside of memory nothing else works in one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from paperlm_kernels.bench.cards import BANDWIDTH, bandwidth_of
from paperlm_kernels.bench.clocks import device_name
from paperlm_kernels.bench.cold import cold_times, copies_of
from paperlm_kernels.bench.ops.ternary_linear.declared import CASES, Case
from paperlm_kernels.bench.ops.ternary_linear.methods import EPS, Inputs
from paperlm_kernels.bench.rows import circumstances
from paperlm_kernels.rmsnorm_quantize import rmsnorm_quantize
from paperlm_kernels.ternary_linear import pack_ternary
from paperlm_kernels.ternary_linear.hopper import StreamTiles, most_splits
from paperlm_kernels.ternary_linear.launch import GEMV_TOKENS, FewTiles, Tiles, processors, run_linear

SHARED = 220 * 1024
"Bytes of shared memory that a program of an H200 may have, less what it needs for itself."
READ_AHEAD = 32 * 1024
"Bytes of shared memory, the least for few tokens: so many have the best with 16 tokens times 3200 x 8640."
SUMS = 128
"Registers of a thread that its sums may take."
APART = multiprocessing.get_context("forkserver")
"Processes that begin with what is imported here, and with no CUDA of ours."
AnyTiles = Tiles | FewTiles | StreamTiles


def few_candidates(case: Case) -> Iterator[FewTiles]:
    """Of the dot products of four bytes: 8 to 32 words of weights a thread and step."""
    shapes = itertools.product((4, 8, 16, 32), (32, 64, 128, 256), (1, 2, 4, 8), (1, 3, 4, 5))
    for rows, words, warps, stages in shapes:
        steps = -(-case.columns // (16 * words))
        if 8 <= rows * words // (32 * warps) <= 32 and rows * case.tokens <= 64 and stages <= steps + 1:
            for splits in sorted({1, min(steps, max(1, 264 // -(-case.rows // rows)))}):
                yield FewTiles(rows, words, warps, stages, splits)


def candidates(case: Case, programs: int) -> Iterator[Tiles]:
    """Of the matrix units, on so many multiprocessors."""
    M, N, width = case.tokens, case.rows, -(-case.columns // 128) * 32
    few = M <= 64
    if few:
        lanes, steps, stages_of = (max(16, 1 << (M - 1).bit_length()),), (64, 128, 256), (2, 3, 4, 5)
        pairs, waves = ((32, 2), (64, 4), (128, 4), (128, 8)), (1, 2, 3)
    else:
        lanes, steps, stages_of = (64, 128, 256) if M <= 256 else (128, 256), (32, 64), (3, 4)
        pairs, waves = ((64, 4), (128, 4), (128, 8), (256, 8)), (2,) if M <= 256 else ()
    for tokens, (rows, warps), step, stages in itertools.product(lanes, pairs, steps, stages_of):
        shared = stages * step * (rows + 4 * tokens)
        if step > width or tokens * rows > SUMS * 32 * warps or shared > (SHARED // 2 if M <= 16 else SHARED):
            continue
        if few and shared < READ_AHEAD:
            continue
        tiles = -(-M // tokens) * -(-N // rows)
        most = max(1, width // step // 2)
        for splits in sorted({1, *(min(most, -(-wave * programs // tiles)) for wave in waves if tiles < programs)}):
            yield Tiles(tokens, rows, step, warps, stages, splits)


def stream_candidates(case: Case, programs: int) -> Iterator[StreamTiles]:
    """Of the kernel for Hopper, with two programs or more a multiprocessor; on other cards they fail."""
    M, width = case.tokens, -(-case.columns // 128) * 32
    lanes = (max(16, 1 << (M - 1).bit_length()),) if M <= 64 else (64, 128)
    for tokens, rows, chunks, stages in itertools.product(lanes, (64, 128), (1, 2, 4), (3, 4, 5, 6, 8)):
        shared = 32 * stages * chunks * (rows + 4 * tokens)
        if tokens * rows > SUMS * 128 or not READ_AHEAD <= shared <= SHARED // 2:
            continue
        tiles, steps = -(-M // tokens) * -(-case.rows // rows), -(-width // (32 * chunks))
        whole = StreamTiles(tokens, rows, chunks, stages)
        most = max(1, min(steps // 2, most_splits(whole)))
        for splits in sorted({1, *(min(most, -(-wave * programs // tiles)) for wave in (1, 2, 3) if tiles < programs)}):
            yield dataclasses.replace(whole, splits=splits)


def all_candidates(case: Case, programs: int) -> list[AnyTiles]:
    """What a case is tried with, in a random order: where time ends, it ends for no kind of tiles."""
    few = few_candidates(case) if case.tokens <= GEMV_TOKENS else ()
    found = [*few, *(() if case.tokens == 1 else candidates(case, programs))]
    found += stream_candidates(case, programs) if case.tokens > GEMV_TOKENS else ()
    random.Random(0).shuffle(found)
    return found


def form_of(tiles: AnyTiles, case: Case) -> tuple[AnyTiles, bool]:
    """What Triton compiles once: tiles, split or not (for Hopper, and in how many parts), and whether the rows are a
    multiple of 16."""
    split = tiles.splits if isinstance(tiles, StreamTiles) else min(2, tiles.splits or 1)
    return dataclasses.replace(tiles, splits=split), case.rows % 16 == 0


def cases_of(names: list[str]) -> list[Case]:
    """`7b_down_m16` is a matrix with so many tokens, `7b_m16` are all of that size. Raises SystemExit for a misspelt
    one."""
    matrices = {name.rsplit("_m", 1)[0]: case for name, case in CASES.items()}
    known = dict.fromkeys([*matrices, *(name.split("_")[0] for name in matrices)])
    found = {}
    for name in names:
        start, _, M = name.rpartition("_m")
        if start not in known or not M.isdecimal() or int(M) < 1:
            near = difflib.get_close_matches(start or name, known, 1) or ["7b"]
            raise SystemExit(
                f"--cases: {name!r} is no matrix with a number of tokens; did you mean "
                f"'{near[0]}_m{M if M.isdecimal() and int(M) else 16}'?"
            )
        for matrix, case in matrices.items():
            if f"{matrix}_".startswith(f"{start}_"):
                found[f"{matrix}_m{M}"] = dataclasses.replace(case, name=f"{matrix}_m{M}", tokens=int(M))
    return [*found.values()]


def call_of(inputs: Inputs, tiles: AnyTiles | None) -> Callable[[], torch.Tensor]:
    """A product with its own copy of the weights."""
    q = rmsnorm_quantize(inputs.x, None, eps=EPS)
    data, alpha, N = pack_ternary(inputs.weight).data, inputs.alpha.clone(), inputs.case.rows
    return lambda tiles=tiles: run_linear(q.codes, q.scale, q.rowsum, data, alpha, N, torch.bfloat16, tiles)


def compile_tiles(tiles: AnyTiles, case: Case) -> str | None:
    """Compiles tiles by a product with them; what went wrong."""
    try:
        call_of(Inputs(case, torch.device("cuda"), 0), tiles)()
        torch.cuda.synchronize()
    except Exception as error:  # whatever a compiler says
        return f"{tiles}: {type(error).__name__}: {str(error)[:200]}"
    return None


def compile_all(cases: list[Case], programs: int, workers: int, seconds: float) -> set[tuple[AnyTiles, bool]]:
    """Fills Triton's cache in several processes, with a form of each case in turn; those that are done in time."""
    wanted: dict[tuple[AnyTiles, bool], Case] = {}
    for row in itertools.zip_longest(*(all_candidates(case, programs) for case in cases)):
        for tiles, case in zip(row, cases, strict=True):
            if tiles is not None:
                wanted.setdefault(form_of(tiles, case), case)
    start, done = time.monotonic(), set()
    pool = ProcessPoolExecutor(workers, APART)
    jobs = {pool.submit(compile_tiles, form[0], case): form for form, case in wanted.items()}
    with contextlib.suppress(TimeoutError):
        for job in as_completed(jobs, timeout=seconds):
            if said := job.result():
                print(said, flush=True)
            else:
                done.add(jobs[job])
    pool.shutdown(wait=True, cancel_futures=True)  # nothing is compiled while others are timed
    print(f"{len(done)} of {len(jobs)} forms of tiles compiled in {time.monotonic() - start:.0f} s", flush=True)
    return done


def timed(calls: list[Callable[[], torch.Tensor]]) -> float:
    """Microseconds of a call."""
    return median(cold_times(calls, torch.device("cuda"), graph=True, repeats=15, warmup=1, seconds=0.03))


def sweep(case: Case, programs: int, seconds: float, ready: Container[tuple[AnyTiles, bool]]) -> Iterator[dict]:
    """Rows of one case: bf16, chosen, and those candidates whose form is `ready`, for so long, or until the card is
    lost. Its time begins with the candidates."""
    inputs = Inputs(case, torch.device("cuda"), 0)
    copies = copies_of(case.rows * case.columns // 4, inputs.device)
    copies = min(copies, 128)
    device = device_name(inputs.device)
    bandwidth = bandwidth_of(device, BANDWIDTH)
    floor = case.floor(2, bandwidth) if bandwidth else None
    about = {"case": case.name, "tokens": case.tokens, "rows": case.rows, "columns": case.columns,
             "floor_us": floor and round(floor, 3), **circumstances(device)}  # fmt: skip
    weights = [inputs.weight.bfloat16() for _ in range(copies_of(2 * case.rows * case.columns, inputs.device))]
    yield about | {"tiles": "bf16", "us": timed([lambda w=w: F.linear(inputs.x, w) for w in weights])}
    del weights
    calls = [call_of(inputs, None) for _ in range(copies)]
    right = calls[0]()
    yield about | {"tiles": "chosen", "us": timed(calls)}
    end = time.monotonic() + seconds
    for tiles in all_candidates(case, programs):
        if form_of(tiles, case) not in ready:
            continue
        if time.monotonic() > end:
            return
        row = about | {"tiles": dataclasses.asdict(tiles), "kind": type(tiles).__name__}
        try:
            same = torch.equal(calls[0](tiles), right)
            row |= {"us": timed([partial(call, tiles) for call in calls]), "same": same}
        except Exception as error:  # a tile that does not fit the card
            yield row | {"failed": f"{type(error).__name__}: {str(error)[:120]}"}
            with contextlib.suppress(Exception):
                torch.cuda.synchronize()
                continue
            return
        yield row


def send_rows(case: Case, seconds: float, ready: Container[tuple[AnyTiles, bool]], into: Connection) -> None:
    """`sweep`, into a pipe."""
    for row in sweep(case, processors(torch.device("cuda")), seconds, ready):
        into.send(row)


def rows_apart(send: Callable[..., None], *given: Any) -> list[dict]:
    """What `send(*given, pipe)` has sent from a process of its own, to its end or until it died."""
    out, into = APART.Pipe(duplex=False)
    process = APART.Process(target=send, args=(*given, into))
    process.start()
    into.close()
    found = []
    with contextlib.suppress(EOFError):
        while True:
            found.append(out.recv())
    process.join()
    return found


def short(row: dict) -> str:
    """`64x16 step 128 warps 4 stages 4 splits 1`."""
    tiles = row["tiles"]
    rows = f"{tiles['rows']}x{tiles['tokens']}" if "tokens" in tiles else f"{tiles['rows']} rows"
    step = tiles.get("step") or tiles.get("words") or tiles["chunks"]
    return f"{rows} step {step} warps {tiles['warps']} stages {tiles['stages']} splits {tiles['splits']}"


def summary(case: Case, found: list[dict]) -> str:
    """One case in a line."""
    us = {row["tiles"]: row["us"] for row in found if isinstance(row["tiles"], str)}
    if len(us) < 2:
        return f"{case.name}: its process ended before the chosen tiles were timed"
    tried = [row for row in found if "kind" in row]
    ranked = sorted((row for row in tried if "us" in row), key=lambda row: row["us"])
    best = "; ".join(f"{row['us']:.2f} {short(row)}" for row in ranked[:3])
    gain = us["bf16"] / ranked[0]["us"] if ranked else 0.0
    line = (
        f"{case.name}: bf16 {us['bf16']:.2f}, chosen {us['chosen']:.2f} ({us['bf16'] / us['chosen']:.2f}x), floor "
        f"{found[0]['floor_us']}, best of {len(ranked)} ({gain:.2f}x): {best}"
    )
    if failed := [row for row in tried if "failed" in row]:
        line += f"; FAILED: {len(failed)}, the last {short(failed[-1])}: {failed[-1]['failed']}"
    if wrong := [short(row) for row in ranked if not row["same"]]:
        line += f"; WRONG: {wrong}"
    return line
