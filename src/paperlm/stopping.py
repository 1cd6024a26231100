"""A process that is asked to end finishes its step first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """A list that is filled when the process is asked to end, so that it can write a checkpoint first."""
    asked: list[int] = []
    handlers = {s: signal.signal(s, lambda number, _: asked.append(number)) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
