"""Buffers that share an allocation: to ask a device's allocator takes longer than to part what it gives."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

UNIT = 16
"Words (int32) of whose multiples a buffer takes its room: 64 bytes, as sections do."


class Layout:
    """Where buffers of so many int32, by name, lie in an allocation: one behind the other."""

    def __init__(self, **counts: int) -> None:
        self.parts = [size for count in counts.values() for size in (count, -count % UNIT)]
        starts = [0, *itertools.accumulate(self.parts)]
        self.words = starts[-1]
        self.offsets = list(zip(counts, [4 * start for start in starts[:-1:2]], strict=True))

    def room(self, device: torch.device, *, zeros: bool = False) -> Room:
        """An allocation, with anything in it, or with zeros."""
        make = torch.zeros if zeros else torch.empty
        return Room(self, make(self.words, dtype=torch.int32, device=device))


class Room:
    """Buffers in an allocation, which is free again when none of them is left.

    A kernel is launched with their addresses. To make tensors of them takes longer, and can wait until the device has
    something to do.
    """

    def __init__(self, layout: Layout, whole: Tensor) -> None:
        self._layout, self._whole = layout, whole
        self._tensors: dict[str, Tensor] | None = None

    def places(self) -> dict[str, int]:
        """Addresses by name."""
        first = self._whole.data_ptr()
        return {name: first + offset for name, offset in self._layout.offsets}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The buffers by name, int32."""
        if self._tensors is None:
            layout = self._layout
            parts = self._whole.split_with_sizes(layout.parts)[::2]
            self._tensors = {name: part for (name, _), part in zip(layout.offsets, parts, strict=True)}
        return self._tensors

    def bytes(self, name: str, count: int) -> Tensor:
        """The first bytes of one, uint8."""
        return self.tensors[name].view(torch.uint8)[:count]
