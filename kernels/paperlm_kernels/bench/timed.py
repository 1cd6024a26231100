"""The row of a time on cold copies, with the floor of what it reads and the clocks of the card beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paperlm_kernels.bench import clocks
from paperlm_kernels.bench.cards import BANDWIDTH, bandwidth_of
from paperlm_kernels.bench.cold import cold_times, copies_of
from paperlm_kernels.bench.declared import Contender
from paperlm_kernels.bench.operation import Operation, Row, Task
from paperlm_kernels.bench.rows import percentiles, short


def time_row(
    operation: Operation,
    task: Task,
    contender: Contender,
    part: str,
    name: str,
    *,
    size: int,
    floor: Callable[[float], float] | None = None,
    **extra: Any,
) -> Row:
    """A part of a method, in microseconds.

    Args:
        name: of the device.
        size: bytes that a call reads, for the number of copies.
        floor: microseconds that none undercuts at a bandwidth in bytes a second; None: not said.
        extra: more fields of the row.
    """
    device = contender.inputs.device
    calls = [contender.call(part) for _ in range(copies_of(size, device))]
    graph = device.type == "cuda"  # also where calls take longer than their launch: what is timed is the card
    before = clocks.clock_and_power() if graph else None
    taken = cold_times(calls, device, graph=graph, repeats=task.repeats, warmup=task.warmup, seconds=task.seconds)
    extra = {"measure": part, "copies": len(calls), "graph": graph, **extra}
    if graph and floor and (bandwidth := bandwidth_of(name, BANDWIDTH)):
        least = floor(bandwidth)
        extra |= {"floor_us": short(least), "over_floor": short(percentiles(taken)[0] / least)}
    if before and (after := clocks.clock_and_power()):
        extra["sm_clock_mhz"], extra["power_w"] = zip(before, after, strict=True)
    return operation.row(task, name, "time", "us", taken, **extra)
