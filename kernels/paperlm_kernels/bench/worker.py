"""One method on one case in a process of its own: a `Task` as JSON is its argument, rows of JSON are its output.

It may be started early, so that its imports overlap with the measurement before it: it touches the device only when a
line arrives on its standard input.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from paperlm_kernels.bench import accuracy, measure
from paperlm_kernels.bench.methods import METHODS, AbsentError, label
from paperlm_kernels.bench.rows import cpu_name, percentiles, row, short
from paperlm_kernels.cross_entropy.data import CASES, IGNORED, Case, Inputs, describe, make_inputs

OP = "cross_entropy"
BOUND = "lower_bound"
RATE = 790e12
"Operations a second of a large bfloat16 product on an H200: the floor that times are compared with."


@dataclasses.dataclass(frozen=True)
class Task:
    """What to measure. `method` is a name of METHODS, or BOUND for the arithmetic, the description of the data and the
    matrix products alone."""

    case: str
    method: str
    measures: tuple[str, ...] = ("loss", "gradient", "both")
    repeats: int = 50
    warmup: int = 3
    seconds: float = 1.5
    seed: int = 0
    permute: bool = False
    small: bool = False
    device: str = "cuda"

    @property
    def sizes(self) -> Case:
        """The case, in its full or small size."""
        case = CASES[self.case]
        return case.small() if self.small else case


def device_name(device: torch.device) -> str:
    """The card, or the processor with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu ({cpu_name()}, {threads} thread{'s' if threads > 1 else ''})"


def make_row(task: Task, device: str, metric: str, unit: str, values: list[float], **extra: Any) -> dict[str, Any]:
    """A row with what identifies the task."""
    case = task.sizes
    identity = {
        "name": task.method,
        "order": "permuted" if task.permute else "natural",
        "scale": "small" if task.small else "full",
        "source": "synthetic",
        "seed": task.seed,
        "shape": {
            "tokens": case.tokens, "counting": case.counting, "vocab": case.vocab, "width": case.width,
            "softcap": case.softcap, "dtype": str(case.dtype).removeprefix("torch."),
        },
        "lower_bound_mib": case.lower_bound,
    }  # fmt: skip
    method = label(task.method) if task.method in METHODS else task.method
    return row(OP, task.case, method, metric, unit, values, device, **identity, **extra)


def outcome(task: Task, device: str, reason: str, **extra: Any) -> dict[str, Any]:
    """The row of a method, or with measure=... of a part of it, that gave no number."""
    return make_row(task, device, "outcome", "", [], outcome=reason, **extra)


def run(task: Task) -> Iterator[dict[str, Any]]:
    """Rows of a task."""
    device = torch.device(task.device)
    torch.set_float32_matmul_precision("high")
    inputs = make_inputs(task.sizes, device=device, seed=task.seed, permute=task.permute)
    if task.method == BOUND:
        yield from _arithmetic(task, inputs, device_name(device))
        if device.type == "cuda":
            yield from _products(task, inputs, device)
        return
    try:
        contender = METHODS[task.method][0](task.sizes, device)
    except AbsentError as absent:
        yield outcome(task, device_name(device), f"absent: {absent}")
        return
    for name in task.measures:
        try:
            if name in measure.MEASURES:
                yield from _time_and_memory(task, contender, inputs, name, device)
            elif name == "error":
                exact = accuracy.truth(inputs, task.sizes.softcap)
                for what, value in accuracy.errors(contender, inputs, exact).items():
                    part = what.removesuffix(" norm")
                    metric = "error" if part == what else "norm"
                    unit = "nats" if part in ("nll", "lse") else "relative"
                    yield make_row(task, device_name(device), metric, unit, [value], measure=part)
                del exact
            elif name == "kernels":
                step = measure.step(contender, inputs, "both")
                for kernel, (ms, launches) in measure.kernel_times(step, device, warmup=task.warmup).items():
                    over = {"over_floor": short(ms / task.sizes.floor(RATE))} if device.type == "cuda" else {}
                    yield make_row(
                        task, device_name(device), "kernel", "ms", [ms], measure=kernel, launches=launches, **over
                    )
            elif name == "determinism":
                same = accuracy.reproducible(contender, inputs)
                bits = [float(all(same.values()))]
                yield make_row(task, device_name(device), "determinism", "bitwise equal", bits, runs=3, parts=same)
        except torch.cuda.OutOfMemoryError:
            yield outcome(task, device_name(device), "out of memory", measure=name)
            inputs.hidden.grad = inputs.weight.grad = None
            torch.cuda.empty_cache()


def _arithmetic(task: Task, inputs: Inputs, device: str) -> Iterator[dict[str, Any]]:
    case = task.sizes
    bounds = {"loss": torch.float32.itemsize / 2**20, "gradient": case.lower_bound, "both": case.lower_bound}
    for name, value in bounds.items():
        yield make_row(task, device, "peak_memory", "MiB", [value], measure=name)
    facts = describe(inputs, case.softcap)
    yield make_row(task, device, "softmax_share", "share", [facts.above], at_least=facts.eps)
    yield make_row(task, device, "softmax_rank", "ids", [facts.rank], at_least=facts.eps)
    for tiles, share in facts.alive.items():
        yield make_row(task, device, "alive_share", "share", [share], tiles=tiles, at_least=facts.eps)


def _products(task: Task, inputs: Inputs, device: torch.device) -> Iterator[dict[str, Any]]:
    """Times of the three matrix products of the loss by cuBLAS, on these data: what a method can hope for."""
    kept = inputs.target != IGNORED
    hidden, weight = inputs.hidden[kept], inputs.weight
    logits = hidden @ weight.T
    products = {"logits": lambda: hidden @ weight.T, "dE": lambda: logits @ weight, "dC": lambda: logits.T @ hidden}
    for name, product in products.items():
        step = measure.Step(lambda: None, lambda _, product=product: product())
        taken = measure.times(step, device, repeats=task.repeats, warmup=task.warmup, seconds=task.seconds)
        yield make_row(task, device_name(device), "product", "ms", taken, measure=name)


@cache
def _matmul_rate(device: torch.device) -> float:
    return measure.matmul_rate(device)


def _time_and_memory(
    task: Task, contender: Any, inputs: Inputs, name: str, device: torch.device
) -> Iterator[dict[str, Any]]:
    if (name == "gradient" and not contender.own_gradient) or (name == "both_cold" and device.type != "cuda"):
        return
    case, settings = task.sizes, dict(contender.settings)
    step = measure.step(contender, inputs, name)
    speed: dict[str, Any] = {}
    if device.type == "cuda":
        speed["matmul_tflops"] = round(_matmul_rate(device) / 1e12, 1)
        before = measure.clock_and_power()
    taken = measure.times(step, device, repeats=task.repeats, warmup=task.warmup, seconds=task.seconds)
    if device.type == "cuda":
        if before and (after := measure.clock_and_power()):
            speed["sm_clock_mhz"], speed["power_w"] = zip(before, after, strict=True)
        for key, rate in (("", RATE), ("_measured", speed["matmul_tflops"] * 1e12)):
            floor = case.floor(rate)
            speed[f"floor{key}_ms"] = short(floor)
            speed[f"over_floor{key}"] = short(percentiles(taken)[0] / floor)
    mean = short(sum(taken) / len(taken))
    common = {"measure": name, "settings": settings}
    yield make_row(task, device_name(device), "time", "ms", taken, **common, mean=mean, warmup=task.warmup, **speed)
    if name == "both_cold":
        return
    peak = measure.peak_memory(step, device)
    over = short(peak / case.lower_bound)
    yield make_row(task, device_name(device), "peak_memory", "MiB", [peak], **common, over_bound=over)


def main() -> None:
    """Entry point of the process."""
    # Whatever a library prints must not mix with the rows.
    rows = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    given = json.loads(sys.argv[1])
    task = Task(**{**given, "measures": tuple(given["measures"])})
    if task.method in METHODS and task.device != "cpu":
        for module in METHODS[task.method][0].func.modules:
            importlib.import_module(module)
    if not sys.stdin.readline():
        return
    for found in run(task):
        print(json.dumps(found), file=rows, flush=True)


if __name__ == "__main__":
    main()
