"""Times the tiles that a product may take, on each matrix: what those of `paperlm_kernels.ternary_linear` come from.

    python -m paperlm_kernels.bench.ops.ternary_linear.sweep --compile      # fills Triton's cache, on all processors
    python -m paperlm_kernels.bench.ops.ternary_linear.sweep --out sweep.jsonl

prints, for each matrix and number of tokens, the product by cuBLAS in bfloat16, by the tiles that are chosen, and by
the best three, in microseconds. A tile whose result has another bit than that of the chosen ones is named.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from paperlm_kernels.bench.cold import cold_times, copies_of
from paperlm_kernels.bench.ops.ternary_linear.declared import CASES, WIDTHS, Case
from paperlm_kernels.bench.ops.ternary_linear.methods import EPS, Inputs
from paperlm_kernels.rmsnorm_quantize import rmsnorm_quantize
from paperlm_kernels.ternary_linear import pack_ternary
from paperlm_kernels.ternary_linear.launch import GEMV_TOKENS, FewTiles, Tiles, processors, run_linear

SHARED = 220 * 1024
"Bytes of shared memory that a program of an H200 may have, less what it needs for itself."
SUMS = 128
"Registers of a thread that its sums may take."
AnyTiles = Tiles | FewTiles


def few_candidates(case: Case) -> Iterator[FewTiles]:
    """Of the dot products of four bytes: 8 to 64 words of weights a thread and step."""
    for rows, words, warps, stages in itertools.product((4, 8, 16, 32), (64, 128, 256), (1, 2, 4, 8), (1, 3)):
        steps = -(-case.columns // (16 * words))
        if 8 <= rows * words // (32 * warps) <= 64 and rows * case.tokens <= 64 and stages <= steps + 1:
            for splits in sorted({1, min(steps, max(1, 264 // -(-case.rows // rows)))}):
                yield FewTiles(rows, words, warps, stages, splits)


def candidates(case: Case, programs: int) -> Iterator[Tiles]:
    """Of the matrix units, on so many multiprocessors."""
    M, N, width = case.tokens, case.rows, -(-case.columns // 128) * 32
    if M <= 64:
        lanes, steps = (max(8, 1 << (M - 1).bit_length()),), (64, 128, 256)
        pairs, stages_of = ((32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8), (256, 8)), (3, 5)
    else:
        lanes, steps, stages_of = (64, 128, 256) if M <= 256 else (128, 256), (32, 64), (3, 4)
        pairs = ((64, 4), (128, 4), (128, 8), (256, 8))
    for tokens, (rows, warps), step, stages in itertools.product(lanes, pairs, steps, stages_of):
        shared = stages * step * (rows + 4 * tokens)
        if step > width or tokens * rows > SUMS * 32 * warps or shared > (SHARED // 2 if M <= 64 else SHARED):
            continue
        tiles = -(-M // tokens) * -(-N // rows)
        most = max(1, width // step // 2)
        for splits in sorted({1, min(most, -(-2 * programs // tiles))} if M <= 256 else {1}):
            yield Tiles(tokens, rows, step, warps, stages, splits)


def all_candidates(case: Case, programs: int) -> list[AnyTiles]:
    """What a case is tried with."""
    few = few_candidates(case) if case.tokens <= GEMV_TOKENS else ()
    return [*few, *(() if case.tokens == 1 else candidates(case, programs))]


def cases_of(sizes: list[str], tokens: list[int]) -> list[Case]:
    """Matrices of the sizes, each with so many tokens, those with the first number first."""
    matrices = {name.rsplit("_m", 1)[0]: case for name, case in CASES.items()}
    return [
        dataclasses.replace(case, name=f"{name}_m{M}", tokens=M)
        for M in tokens
        for size in sizes
        for name, case in matrices.items()
        if name.startswith(f"{size}_")
    ]


def call_of(inputs: Inputs, tiles: AnyTiles | None) -> Callable[[], torch.Tensor]:
    """A product with its own copy of the weights."""
    q = rmsnorm_quantize(inputs.x, None, eps=EPS)
    data, alpha, N = pack_ternary(inputs.weight).data, inputs.alpha.clone(), inputs.case.rows
    return lambda tiles=tiles: run_linear(q.codes, q.scale, q.rowsum, data, alpha, N, torch.bfloat16, tiles)


def compile_tiles(given: tuple[AnyTiles, list[Case]]) -> str | None:
    """Compiles one tile for some cases by running it; what went wrong."""
    tiles, cases = given
    try:
        for case in cases:
            call_of(Inputs(case, torch.device("cuda"), 0), tiles)()
        torch.cuda.synchronize()
    except Exception as error:  # whatever a compiler says
        return f"{tiles}: {type(error).__name__}: {str(error)[:200]}"
    return None


def compile_all(cases: list[Case], programs: int, workers: int, seconds: float) -> None:
    """Fills Triton's cache in several processes; what is not done in time is compiled when it is timed."""
    wanted: dict[AnyTiles, dict[tuple, Case]] = {}
    for case in cases:
        for tiles in all_candidates(case, programs):
            # what Triton compiles anew: sizes of the weights that are multiples of 16
            words = -(-case.columns // 128) * 8
            kind = (case.rows % 16 == 0, isinstance(tiles, Tiles) or words % 16 == 0)
            form = dataclasses.replace(tiles, splits=min(2, tiles.splits or 1))
            wanted.setdefault(form, {}).setdefault(kind, case)
    end = time.monotonic() + seconds
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    jobs = [pool.submit(compile_tiles, (tiles, [*kinds.values()])) for tiles, kinds in wanted.items()]
    done = 0
    for job in jobs:
        try:
            if said := job.result(timeout=max(0.1, end - time.monotonic())):
                print(said, flush=True)
            done += 1
        except TimeoutError:
            break
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"{done} of {len(jobs)} tiles compiled in {seconds - (end - time.monotonic()):.0f} s", flush=True)


def timed(calls: list[Callable[[], torch.Tensor]]) -> float:
    """Microseconds of a call."""
    return median(cold_times(calls, torch.device("cuda"), graph=True, repeats=15, warmup=1, seconds=0.03))


def sweep(case: Case, programs: int, end: float) -> Iterator[dict]:
    """Rows of one case: bf16, chosen, and every candidate, until time is up."""
    inputs = Inputs(case, torch.device("cuda"), 0)
    copies = copies_of(case.rows * case.columns // 4, inputs.device)
    copies = min(copies, 128)
    about = {"case": case.name, "tokens": case.tokens, "rows": case.rows, "columns": case.columns,
             "floor_us": round(case.floor(2), 3)}  # fmt: skip
    weights = [inputs.weight.bfloat16() for _ in range(copies_of(2 * case.rows * case.columns, inputs.device))]
    yield about | {"tiles": "bf16", "us": timed([lambda w=w: F.linear(inputs.x, w) for w in weights])}
    del weights
    calls = [call_of(inputs, None) for _ in range(copies)]
    right = calls[0]()
    yield about | {"tiles": "chosen", "us": timed(calls)}
    for tiles in all_candidates(case, programs):
        if time.monotonic() > end:
            return
        row = about | {"tiles": dataclasses.asdict(tiles), "kind": type(tiles).__name__}
        try:
            same = torch.equal(calls[0](tiles), right)
            row |= {"us": timed([partial(call, tiles) for call in calls]), "same": same}
        except Exception as error:  # a tile that does not fit the card
            row |= {"failed": f"{type(error).__name__}: {str(error)[:120]}"}
        yield row


def short(row: dict) -> str:
    """`64x16 step 128 warps 4 stages 4 splits 1`."""
    tiles = row["tiles"]
    rows = f"{tiles['rows']}x{tiles['tokens']}" if "tokens" in tiles else f"{tiles['rows']} rows"
    step = tiles.get("step", tiles.get("words"))
    return f"{rows} step {step} warps {tiles['warps']} stages {tiles['stages']} splits {tiles['splits']}"


def summary(found: list[dict]) -> str:
    """One case in a line."""
    bf16, chosen = (next(row["us"] for row in found if row["tiles"] == name) for name in ("bf16", "chosen"))
    ranked = sorted((row for row in found if row.get("kind") and "us" in row), key=lambda row: row["us"])
    best = "; ".join(f"{row['us']:.2f} {short(row)}" for row in ranked[:3])
    wrong = [short(row) for row in ranked if not row["same"]]
    gain = bf16 / ranked[0]["us"] if ranked else 0.0
    return (
        f"{found[0]['case']}: bf16 {bf16:.2f}, chosen {chosen:.2f} ({bf16 / chosen:.2f}x), floor "
        f"{found[0]['floor_us']}, best of {len(ranked)} ({gain:.2f}x): {best}" + (f"; WRONG: {wrong}" if wrong else "")
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(reversed(WIDTHS)), help="models, the first ones first")
    parser.add_argument("--tokens", default="16,1,256,4096", help="numbers of tokens, the first ones first")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which nothing new is begun")
    parser.add_argument("--compile", action="store_true", help="compile only")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--out", type=Path, help="a file of rows, JSON")
    given = parser.parse_args()
    cases = cases_of(given.sizes.split(","), [int(M) for M in given.tokens.split(",")])
    if given.compile:
        compile_all(cases, 132, given.workers, given.seconds)
        return
    end, programs = time.monotonic() + given.seconds, processors(torch.device("cuda"))
    for case in cases:
        if time.monotonic() > end:
            print(f"no time for {case.name} and what follows")
            break
        found = list(sweep(case, programs, end))
        print(summary(found), flush=True)
        if given.out:
            with given.out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)


if __name__ == "__main__":
    main()
