"""Time and peak memory of a step, the card's clock and power, and what there is to measure with.

Memory: the highest number of allocated bytes above what was allocated when the measured part began. Times are those of
the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from paperlm_kernels.bench.rows import cpu_name

AT_LEAST = 10
HOW_MEMORY = {
    "cuda": "PyTorch's CUDA allocator, torch.cuda.max_memory_allocated",
    "cpu": "every allocation by PyTorch's CPU allocator, from its profiler; not what BLAS allocates for itself",
}
"Kind of device -> how `peak_memory` has its number."
KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(2**33), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
"""Environment of a process that measures on a CPU: glibc keeps freed memory, as the allocator of a GPU does. Otherwise
half of the time of a step with large matrices is the kernel's, for pages that it has just taken back."""
Part = Callable[[], Any]


@dataclasses.dataclass
class Step:
    """`prepare()` is not measured; `run(what prepare returned)` is."""

    prepare: Part
    run: Callable[[Any], Any]


def times(step: Step, device: torch.device, *, repeats: int, warmup: int, seconds: float) -> list[float]:
    """Milliseconds of each of `repeats` repetitions, or of as many (10 or more) as fit into about `seconds`."""
    elapsed = 0.0
    for _ in range(max(1, warmup)):
        synchronize(device)
        begin = time.perf_counter()
        step.run(step.prepare())
        synchronize(device)
        elapsed = time.perf_counter() - begin
    number = repetitions(elapsed, repeats=repeats, seconds=seconds)
    if device.type != "cuda":
        return [_cpu_time(step) for _ in range(number)]
    # No waiting between repetitions: the device then never waits for Python, as in training.
    events = []
    for _ in range(number):
        state = step.prepare()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step.run(state)
        end.record()
        events.append((start, end))
        del state
    synchronize(device)
    return [start.elapsed_time(end) for start, end in events]


def repetitions(elapsed: float, *, repeats: int, seconds: float) -> int:
    """How many repetitions of `elapsed` seconds: `repeats`, or as many (10 or more) as fit into about `seconds`."""
    return max(min(repeats, AT_LEAST), min(repeats, int(seconds / elapsed)))


def _cpu_time(step: Step) -> float:
    state = step.prepare()
    begin = time.perf_counter()
    step.run(state)
    return (time.perf_counter() - begin) * 1e3


def kernel_times(
    step: Step, device: torch.device, *, warmup: int, runs: int = 5, name_of: Callable[[str], str] | None = None
) -> dict[str, tuple[float, float]]:
    """Kernel (on a CPU: operator) -> milliseconds and launches a run, the longest first; those of less than half a
    percent together as "others". name_of: of the whole name, what is told in place of the kernel; then all are told."""
    for _ in range(max(1, warmup)):
        step.run(step.prepare())
    synchronize(device)
    gpu = device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        for _ in range(runs):
            # each by itself: a gradient that is still there would be added to
            step.run(step.prepare())
        synchronize(device)
    found: dict[str, list[float]] = {}
    for event in profile.key_averages():
        # operators, too, are listed with the time of the kernels that they start
        if gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        microseconds = event.self_device_time_total if gpu else event.self_cpu_time_total
        parts = found.setdefault((name_of or _short)(event.key), [0.0, 0.0])
        parts[0] += microseconds / 1e3 / runs
        parts[1] += event.count / runs
    if name_of is not None:
        return {name: (ms, launches) for name, (ms, launches) in found.items()}
    total = sum(ms for ms, _ in found.values())
    listed = sorted(((v, k) for k, v in found.items() if v[0] >= total / 200), reverse=True)
    others = [v for v in found.values() if v[0] < total / 200]
    kernels = {name: (ms, launches) for (ms, launches), name in listed}
    return kernels | {"others": (sum(ms for ms, _ in others), sum(n for _, n in others))}


def _short(kernel: str) -> str:
    """`void at::native::sum_kernel<float, 4>(...)` -> `sum_kernel`."""
    return re.split(r"[<(]", kernel.removeprefix("void "), maxsplit=1)[0].strip().split("::")[-1] or kernel


def peak_memory(step: Step, device: torch.device) -> float:
    """Peak of allocated memory while the step runs, in MiB above that at its start."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    state = step.prepare()
    with peak_within(device) as peak:
        step.run(state)
    return peak[0]


@contextlib.contextmanager
def peak_within(device: torch.device) -> Iterator[list[float]]:
    """Peak of allocated memory within the block, in MiB above that at its start: behind it, the one number of the list
    that it gives."""
    found: list[float] = []
    if device.type != "cuda":
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            yield found
        found.append(_cpu_peak(profile))
        return
    synchronize(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield found
    synchronize(device)
    found.append((torch.cuda.max_memory_allocated() - before) / 2**20)


def _cpu_peak(profile: torch.profiler.profile) -> float:
    """The same from the profiler's record of every allocation on the CPU, those inside operators included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    allocations = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    held = peak = 0
    for event in allocations:
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak / 2**20


def matmul_rate(device: torch.device) -> float:
    """Operations a second of an 8192 x 8192 x 8192 product in bfloat16 on random data, the median of ten."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = Step(lambda: None, lambda _: a @ b)
    taken = sorted(times(product, device, repeats=10, warmup=3, seconds=10))
    return 2 * 8192**3 / (taken[len(taken) // 2] / 1e3)


def clock_and_power() -> tuple[float, float] | None:
    """The card's SM clock in MHz and power draw in W, or None where they cannot be read."""
    card = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    query = ["nvidia-smi", "-i", card, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        clock, power = (float(part) for part in done.stdout.split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return clock, power


def out_of_memory(error: RuntimeError) -> bool:
    """Whether an error of PyTorch says that the device's memory is full."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)


def device_name(device: torch.device) -> str:
    """The card, or the processor with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu ({cpu_name()}, {threads} thread{'s' if threads > 1 else ''})"


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
