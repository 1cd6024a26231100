"""One method on one case."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from paperlm_kernels.bench import clocks
from paperlm_kernels.bench.declared import Contender
from paperlm_kernels.bench.operation import Operation, Row, Task
from paperlm_kernels.bench.ops.ternary_linear.declared import CASES
from paperlm_kernels.bench.ops.ternary_linear.methods import METHODS, Inputs
from paperlm_kernels.bench.peers import AbsentError
from paperlm_kernels.bench.timed import time_row


def rows_of(operation: Operation, task: Task) -> Iterator[Row]:
    """Rows of a task."""
    device, case = torch.device(task.device), task.sized(CASES)
    name, method = clocks.device_name(device), METHODS[task.method]
    able = {*method.parts, "determinism", "kernels", *(("error",) if "product" in method.parts else ())}
    if not able & set(task.measures):  # said before it tunes itself, which takes some a minute
        yield operation.outcome(task, name, "absent: it quantizes its input itself, so it has a layer, and no product")
        return
    try:
        contender = method(Inputs(case, device, task.seed))
        first = contender.call(contender.parts[0])
        y = first()
    except (AbsentError, ImportError) as reason:
        yield operation.outcome(task, name, f"absent: {reason}")
        return
    for part in task.measures:
        if part in ("product", "layer") and part in contender.parts:
            yield _time(operation, task, contender, part, name)
        elif part == "error" and "product" in contender.parts:
            exact = contender.truth()
            error = ((y.double() - exact).norm() / exact.norm()).item()
            yield operation.row(task, name, "error", "relative", [error])
        elif part == "determinism":
            same = all(torch.equal(first(), y) for _ in range(2))
            yield operation.row(task, name, "determinism", "bitwise equal", [float(same)], runs=3)
        elif part == "kernels":
            call = contender.call(contender.parts[-1])
            step = clocks.Step(lambda: None, lambda _, call=call: call())
            for kernel, (ms, launches) in clocks.kernel_times(step, device, warmup=task.warmup).items():
                yield operation.row(task, name, "kernel", "us", [1e3 * ms], measure=kernel, launches=launches)
        else:
            yield operation.lacks(task, name, part)


def _time(operation: Operation, task: Task, contender: Contender, part: str, name: str) -> Row:
    case, bits = contender.case, contender.bits
    weight_bytes = int(case.rows * case.columns * bits / 8)
    floor = partial(case.floor, bits)
    return time_row(operation, task, contender, part, name, size=weight_bytes, floor=floor, bits=bits)
