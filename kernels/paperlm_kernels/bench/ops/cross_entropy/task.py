"""One method on one case of linear cross-entropy, or the case itself: arithmetic, data and matrix products alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from paperlm_kernels.bench import clocks
from paperlm_kernels.bench.operation import Operation, Row, Task
from paperlm_kernels.bench.ops.cross_entropy import accuracy, measure
from paperlm_kernels.bench.ops.cross_entropy.data import IGNORED, Inputs, describe, make_inputs
from paperlm_kernels.bench.ops.cross_entropy.declared import CASES, Case
from paperlm_kernels.bench.ops.cross_entropy.methods import METHODS, Contender
from paperlm_kernels.bench.peers import AbsentError
from paperlm_kernels.bench.rows import percentiles, short

RATE = 790e12
"Operations a second of a large bfloat16 product on an H200: the floor that times are compared with."
Write = Callable[..., Row]
"(metric, unit, values, **extra) -> a row of the task"


def rows_of(operation: Operation, task: Task) -> Iterator[Row]:
    """Rows of a task."""
    device, case = torch.device(task.device), task.sized(CASES)
    torch.set_float32_matmul_precision("high")
    inputs = make_inputs(case, device=device, seed=task.seed, permute=task.options.get("permute", False))
    name = clocks.device_name(device)

    def write(metric: str, unit: str, values: list[float], **extra: Any) -> Row:
        return operation.row(task, name, metric, unit, values, **extra)

    if task.method == operation.first:
        yield from _arithmetic(case, inputs, write)
        if device.type == "cuda":
            yield from _products(task, inputs, device, write)
        return
    try:
        contender = METHODS[task.method](case, device)
    except AbsentError as absent:
        yield operation.outcome(task, name, f"absent: {absent}")
        return
    times: dict[str, list[float]] = {}
    for part in task.measures:
        try:
            if part in (*measure.PARTS, "both_cold"):
                yield from _time_and_memory(task, contender, inputs, part, times, write)
            elif part == "error":
                exact = accuracy.truth(inputs, case.softcap)
                for what, value in accuracy.errors(contender, inputs, exact).items():
                    of = what.removesuffix(" norm")
                    metric = "error" if of == what else "norm"
                    yield write(metric, "nats" if of in ("nll", "lse") else "relative", [value], measure=of)
                del exact
            elif part == "kernels":
                step = measure.step(contender, inputs, "both")
                for kernel, (ms, launches) in clocks.kernel_times(step, device, warmup=task.warmup).items():
                    over = {"over_floor": short(ms / case.floor(RATE))} if device.type == "cuda" else {}
                    yield write("kernel", "ms", [ms], measure=kernel, launches=launches, **over)
            elif part == "determinism":
                same = accuracy.reproducible(contender, inputs)
                bits = [float(all(same.values()))]
                yield write("determinism", "bitwise equal", bits, runs=3, parts=same)
        except RuntimeError as error:
            if not clocks.out_of_memory(error):
                raise
            yield operation.outcome(task, name, "out of memory", measure=part)
            inputs.hidden.grad = inputs.weight.grad = None
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _arithmetic(case: Case, inputs: Inputs, write: Write) -> Iterator[Row]:
    bounds = {"loss": torch.float32.itemsize / 2**20, "gradient": case.lower_bound, "both": case.lower_bound}
    for name, value in bounds.items():
        yield write("peak_memory", "MiB", [value], measure=name, how="computed: the outputs")
    facts = describe(inputs, case.softcap)
    yield write("softmax_share", "share", [facts.above], at_least=facts.eps)
    yield write("softmax_rank", "ids", [facts.rank], at_least=facts.eps)
    for tiles, share in facts.alive.items():
        yield write("alive_share", "share", [share], tiles=tiles, at_least=facts.eps)


def _products(task: Task, inputs: Inputs, device: torch.device, write: Write) -> Iterator[Row]:
    """Times of the three matrix products of the loss by cuBLAS, on these data: what a method can hope for."""
    kept = inputs.target != IGNORED
    hidden, weight = inputs.hidden[kept], inputs.weight
    logits = hidden @ weight.T
    products = {"logits": lambda: hidden @ weight.T, "dE": lambda: logits @ weight, "dC": lambda: logits.T @ hidden}
    for name, product in products.items():
        step = clocks.Step(lambda: None, lambda _, product=product: product())
        taken = clocks.times(step, device, repeats=task.repeats, warmup=task.warmup, seconds=task.seconds)
        yield write("product", "ms", taken, measure=name)


@cache
def _matmul_rate(device: torch.device) -> float:
    return clocks.matmul_rate(device)


def _time_and_memory(
    task: Task, contender: Contender, inputs: Inputs, part: str, times: dict[str, list[float]], write: Write
) -> Iterator[Row]:
    """`times` has those of a CPU when they have been taken, which is once for all parts."""
    case, device = contender.case, contender.device
    on_gpu = device.type == "cuda"
    if (part == "gradient" and not contender.own_gradient) or (part == "both_cold" and not on_gpu):
        return
    repetitions = {"repeats": task.repeats, "warmup": task.warmup, "seconds": task.seconds}
    step = measure.step(contender, inputs, part)
    extra: dict[str, Any] = {}
    if on_gpu:
        extra["matmul_tflops"] = round(_matmul_rate(device) / 1e12, 1)
        before = clocks.clock_and_power()
        taken = clocks.times(step, device, **repetitions)
        if before and (after := clocks.clock_and_power()):
            extra["sm_clock_mhz"], extra["power_w"] = zip(before, after, strict=True)
        for key, rate in (("", RATE), ("_measured", extra["matmul_tflops"] * 1e12)):
            floor = case.floor(rate)
            extra[f"floor{key}_ms"] = short(floor)
            extra[f"over_floor{key}"] = short(percentiles(taken)[0] / floor)
    else:
        if not times:
            times.update(measure.cpu_times(contender, inputs, **repetitions))
        taken = times[part]
    common = {"measure": part, "settings": dict(contender.settings)}
    yield write("time", "ms", taken, **common, mean=short(sum(taken) / len(taken)), warmup=task.warmup, **extra)
    if part == "both_cold":
        return
    peak = clocks.peak_memory(step, device)
    over = short(peak / case.lower_bound)
    yield write("peak_memory", "MiB", [peak], **common, over_bound=over, how=clocks.HOW_MEMORY[device.type])
