"""The core of the host on which times are taken that Python has a part in.

Cores of a shared host are not equally fast, nor the same ones from one second to the next: others may have the second
half of each. On a virtual machine with sixteen, a loop of Python took either 6.5 ms or 11 to 13, and updates of
training, in which a card waits for Python, 145 or 176 ms. So what is timed is held to the core that is fastest just
before.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

ADDITIONS = 10_000
"Of a loop: a third of a millisecond on a fast core."
LOOPS = 3
"On each core, of which the fastest counts: the first is on a core that may have slept."
MOST = 64
"Cores that are tried."
THREADS = Path("/proc/self/task")


def loop_us() -> float:
    """Microseconds of a loop of Python."""
    begin, total = time.perf_counter(), 0
    for number in range(ADDITIONS):
        total += number
    return 1e6 * (time.perf_counter() - begin)


@contextlib.contextmanager
def quiet_core(device: torch.device) -> Iterator[float | None]:
    """Within the block all threads of this process, and those that begin there, are on one core: of those that it may
    use, the one on which a loop of Python is fastest. Gives the loop's microseconds there. Threads stay where they are,
    and it gives None, for a CPU as the device, which computes with many, and where Linux does not say where they are.
    Behind it each thread may use what it might before, one that began within what the calling one might.
    """
    if device.type == "cpu" or not (hasattr(os, "sched_setaffinity") and THREADS.is_dir()):
        yield None
        return
    allowed = os.sched_getaffinity(0)
    before = {thread: os.sched_getaffinity(thread) for thread in _threads()}
    found: dict[int, float] = {}
    try:
        for core in sorted(allowed)[:MOST]:
            with contextlib.suppress(OSError):  # one that a container does not have
                os.sched_setaffinity(0, {core})
                found[core] = min(loop_us() for _ in range(LOOPS))
        best = min(found, key=found.__getitem__, default=None)
        for thread in _threads() if best is not None else ():
            _move(thread, {best})
        yield found.get(best)
    finally:
        for thread in _threads():
            _move(thread, before.get(thread, allowed))


def _threads() -> list[int]:
    """Of this process, by their numbers."""
    return [int(path.name) for path in THREADS.iterdir()]


def _move(thread: int, cores: set[int]) -> None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        os.sched_setaffinity(thread, cores)
