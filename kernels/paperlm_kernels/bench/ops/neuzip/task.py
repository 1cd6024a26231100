"""One method on one case."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from paperlm_kernels.bench import clocks
from paperlm_kernels.bench.cards import bandwidth_of
from paperlm_kernels.bench.cold import cold_times, copies_of
from paperlm_kernels.bench.operation import Operation, Row, Task
from paperlm_kernels.bench.ops.neuzip import on_file
from paperlm_kernels.bench.ops.neuzip.coder import FILE_PARTS, TOKENS, Coder, Inputs
from paperlm_kernels.bench.ops.neuzip.declared import BANDWIDTH, CASES, CHECKPOINT
from paperlm_kernels.bench.ops.neuzip.methods import METHODS
from paperlm_kernels.bench.peers import AbsentError
from paperlm_kernels.bench.rows import percentiles, short


def rows_of(operation: Operation, task: Task) -> Iterator[Row]:
    """Rows of a task: all on one core of a CPU where files are asked for."""
    with on_file.one_core() if on_file.stays_on_one_core(task) else contextlib.nullcontext():
        yield from _rows_of(operation, task)


def _rows_of(operation: Operation, task: Task) -> Iterator[Row]:
    device, case = torch.device(task.device), task.sized(CASES)
    name, given = clocks.device_name(device), task.options if task.case == CHECKPOINT.name else {}
    try:
        coder = METHODS[task.method](Inputs(case, device, task.seed, given.get("weights"), given.get("sha256", "")))
        stored = coder.stored()
        decode = coder.call("decode")
        got = decode().clone()
    except (AbsentError, ImportError) as reason:
        yield operation.outcome(task, name, f"absent: {reason}")
        return
    if coder.lossless and (wrong := _different(got, coder.truth())):
        yield operation.outcome(task, name, f"failed: {wrong} of {case.weights} weights are not decoded to their bits")
        return
    bits = coder.bits_of(stored)
    for part in task.measures:
        if part in coder.parts:
            try:
                measure = _speed if part in FILE_PARTS else _time
                yield measure(operation, task, coder, part, bits, name)
            except AbsentError as reason:
                yield operation.outcome(task, name, f"absent: {reason}", measure=part)
            except on_file.DifferentError as reason:
                yield operation.outcome(task, name, f"failed: {reason}", measure=part)
        elif part == "bits":
            yield operation.row(task, name, "bits", "bits per weight", [bits])
        elif part == "error":
            truth = coder.truth().double()
            error = ((got.double() - truth).norm() / truth.norm()).item()
            yield operation.row(task, name, "error", "relative", [error])
        elif part == "determinism":
            same = all(torch.equal(decode().view(torch.int16), got.view(torch.int16)) for _ in range(2))
            yield operation.row(task, name, "determinism", "bitwise equal", [float(same)], runs=3)
        elif part == "kernels":
            for which in (part for part in coder.parts if part not in (*TOKENS, *FILE_PARTS)):
                call = coder.call(which)
                step = clocks.Step(lambda: None, lambda _, call=call: call())
                for kernel, (ms, launches) in clocks.kernel_times(step, device, warmup=task.warmup).items():
                    yield operation.row(
                        task, name, "kernel", "us", [1e3 * ms], measure=f"{which} {kernel}", launches=launches
                    )
        else:
            yield operation.lacks(task, name, part)


def _different(got: torch.Tensor, weights: torch.Tensor) -> int:
    return int((got.view(torch.int16).to(weights.device) != weights.view(torch.int16)).sum())


def _speed(operation: Operation, task: Task, coder: Coder, part: str, bits: float, name: str) -> Row:
    found, place = on_file.speeds(coder, part, task)
    extra = {"measure": part, "cores": 1, "bits": short(bits), "folder": str(place)}
    return operation.row(task, name, "throughput", "MB/s", found, **extra)


def _time(operation: Operation, task: Task, coder: Coder, part: str, bits: float, name: str) -> Row:
    device, case = coder.inputs.device, coder.case
    # packing reads one tensor of two bytes a weight, which is enough for large ones not to stay in a cache
    calls = [coder.call(part)] if part in ("encode", "update") else [
        coder.call(part) for _ in range(copies_of(int(case.weights * bits / 8), device))
    ]  # fmt: skip
    before = clocks.clock_and_power() if device.type == "cuda" else None
    taken = cold_times(
        calls, device, graph=part in TOKENS, repeats=task.repeats, warmup=task.warmup, seconds=task.seconds
    )
    median = percentiles(taken)[0]
    extra: dict[str, Any] = {
        "measure": part, "copies": len(calls), "bits": short(bits), "gb_per_s": short(2e-3 * case.weights / median)
    }  # fmt: skip
    if device.type == "cuda":
        if bandwidth := bandwidth_of(name, BANDWIDTH):
            floor = (case.product_floor if part in TOKENS else case.floor)(bits, bandwidth)
            extra |= {"floor_us": short(floor), "over_floor": short(median / floor)}
        if before and (after := clocks.clock_and_power()):
            extra["sm_clock_mhz"], extra["power_w"] = zip(before, after, strict=True)
    return operation.row(task, name, "time", "us", taken, **extra)
