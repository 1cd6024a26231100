"""One method on one case."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from paperlm_kernels.bench import clocks
from paperlm_kernels.bench.operation import Operation, Row, Task
from paperlm_kernels.bench.ops.rmsnorm_quantize.declared import CASES
from paperlm_kernels.bench.ops.rmsnorm_quantize.methods import METHODS, Inputs
from paperlm_kernels.bench.peers import AbsentError
from paperlm_kernels.bench.timed import time_row


def rows_of(operation: Operation, task: Task) -> Iterator[Row]:
    """Rows of a task."""
    device, case = torch.device(task.device), task.sized(CASES)
    name = clocks.device_name(device)
    try:
        contender = METHODS[task.method](Inputs(case, device, task.seed))
        call = contender.call("quantize")
        made = call()
    except (AbsentError, ImportError) as reason:
        yield operation.outcome(task, name, f"absent: {reason}")
        return
    for part in task.measures:
        if part == "quantize":
            yield time_row(operation, task, contender, part, name, size=case.bytes(), floor=case.floor)
        elif part == "error":
            other = (made[0].double() != contender.truth()).double().mean().item()
            yield operation.row(task, name, "error", "share of codes", [other])
        elif part == "determinism":
            same = all(all(map(torch.equal, call(), made)) for _ in range(2))
            yield operation.row(task, name, "determinism", "bitwise equal", [float(same)], runs=3)
        else:
            yield operation.lacks(task, name, part)
