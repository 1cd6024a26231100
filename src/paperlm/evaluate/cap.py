"""A GPU with less memory than it has, as if it were the smaller card that a number was printed on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paperlm.result import Result

GIB = 2**30


@contextlib.contextmanager
def capped(device: Any, gib: float | None) -> Iterator[None]:
    """At most `gib` GiB of the card for PyTorch's allocator, and all of it afterwards; None: nothing is changed. A card
    that has no more than that keeps what it has."""
    if gib is None:
        yield
        return
    # the allocator's functions ask for a card's index
    index = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total), index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, index)


def under_cap(device: Any, gib: float | None, measure: Callable[[], Result]) -> Result:
    """What `measure` finds under a cap (`capped`), model and stores included; out_of_memory where they need more.

    Without a cap the error of a card that is too small is the caller's, as that of any job.
    """
    try:
        with capped(device, gib):
            return measure()
    except torch.cuda.OutOfMemoryError:
        if gib is None:
            raise
    return Result(outcome="out_of_memory")
