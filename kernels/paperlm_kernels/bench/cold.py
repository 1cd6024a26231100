"""Microseconds of short operations whose operands are not in a cache: copies of them take turns.

A weight matrix in two bits, or a cache of keys and values, is often smaller than the second-level cache of a card,
where a model with dozens of layers never finds it. So each call has operands of its own, together larger than that.
With few tokens a call takes less than its launch from Python; there all calls are one CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from paperlm_kernels.bench.clocks import repetitions, synchronize
from paperlm_kernels.bench.cores import quiet_core

TOGETHER = 256 * 2**20
"Bytes of all copies: several times the second-level cache of an H200."
MOST_COPIES = 512
AWAKE = 0.5
"""Seconds for which calls are repeated before any is timed, where Python starts them one by one on a card: a core of
the host that has waited, as it does while kernels are compiled, seems slow at first. Of four rounds of 50 packings in a
row, the first took 379 us each and the last 259."""


def copies_of(bytes_each: int, device: torch.device) -> int:
    """How many copies of operands of so many bytes take turns; on a CPU, whose times are compared with nothing, two."""
    if device.type != "cuda":
        return 2
    return max(2, min(MOST_COPIES, -(-TOGETHER // bytes_each)))


def cold_times(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    graph: bool,
    repeats: int,
    warmup: int,
    seconds: float,
) -> list[float]:
    """Microseconds of a call, each value the mean of a round through all of them. graph: a round is one CUDA graph;
    else, on a card, all are started from the core of the host that is the fastest then (`cores`)."""

    def once() -> None:
        for call in calls:
            call()

    for _ in range(max(1, warmup)):
        once()
    synchronize(device)
    if device.type == "cuda" and not graph:
        with quiet_core(device):
            stay_awake(once, device, AWAKE)
            return _device_times(once, len(calls), device, repeats, seconds)
    if device.type != "cuda":
        begin = time.perf_counter()
        once()
        number = repetitions(time.perf_counter() - begin, repeats=repeats, seconds=seconds)
        return [_cpu_round(once) / len(calls) for _ in range(number)]
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        once()
    captured.replay()
    return _device_times(captured.replay, len(calls), device, repeats, seconds)


def _device_times(
    around: Callable[[], None], calls: int, device: torch.device, repeats: int, seconds: float
) -> list[float]:
    """Microseconds of a call, of rounds in a row."""
    synchronize(device)
    begin = time.perf_counter()
    around()
    synchronize(device)
    number = repetitions(time.perf_counter() - begin, repeats=repeats, seconds=seconds)
    events = []
    for _ in range(number):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        around()
        end.record()
        events.append((start, end))
    synchronize(device)
    return [1e3 * start.elapsed_time(end) / calls for start, end in events]


def stay_awake(once: Callable[[], None], device: torch.device, seconds: float) -> None:
    """Repeats a round for so long, each when the one before has ended."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        once()
        synchronize(device)


def _cpu_round(once: Callable[[], None]) -> float:
    begin = time.perf_counter()
    once()
    return 1e6 * (time.perf_counter() - begin)
