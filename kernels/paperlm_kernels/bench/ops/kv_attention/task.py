"""One method on one case."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from paperlm_kernels.bench import clocks
from paperlm_kernels.bench.declared import Contender
from paperlm_kernels.bench.operation import Operation, Row, Task
from paperlm_kernels.bench.ops.kv_attention.declared import CASES
from paperlm_kernels.bench.ops.kv_attention.methods import METHODS, Inputs
from paperlm_kernels.bench.peers import AbsentError
from paperlm_kernels.bench.timed import time_row


def rows_of(operation: Operation, task: Task) -> Iterator[Row]:
    """Rows of a task."""
    device, case = torch.device(task.device), task.sized(CASES)
    name = clocks.device_name(device)
    try:
        contender = METHODS[task.method](Inputs(case, device, task.seed))
        first = contender.call("decode")
        y = first()
    except (AbsentError, ImportError) as reason:
        yield operation.outcome(task, name, f"absent: {reason}")
        return
    size = case.token_bytes(contender.bits)
    yield operation.row(task, name, "bytes_per_token", "bytes", [size], how="computed: of one layer")
    for part in task.measures:
        if part in contender.parts:
            yield _time(operation, task, contender, part, name)
        elif part == "error":
            exact = contender.truth()
            error = ((y.double() - exact).norm() / exact.norm()).item()
            yield operation.row(task, name, "error", "relative", [error])
        elif part == "determinism":
            same = all(torch.equal(first(), y) for _ in range(2))
            yield operation.row(task, name, "determinism", "bitwise equal", [float(same)], runs=3)
        else:
            yield operation.lacks(task, name, part)


def _time(operation: Operation, task: Task, contender: Contender, part: str, name: str) -> Row:
    case, bits = contender.case, contender.bits
    size = case.batch * case.context * case.token_bytes(bits)
    floor = partial(case.floor, bits) if part == "decode" else None
    return time_row(operation, task, contender, part, name, size=size, floor=floor, bits=bits)
