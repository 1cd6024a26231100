"""A few numbers on their way from a device to the host, which does not wait for them before it has to."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

WORDS = 64
"Of a place for them, int32; a codebook and what goes with it fit."


class ReadBack:
    """A place on the host to which kernels of a device write, and from which the host reads when they have ended.

    Of a card it is page-locked memory, which takes long to get: it is used again, and never given back, for a kernel
    may still write to it when a packing that was begun is dropped.
    """

    _free: ClassVar[dict[torch.device, list[tuple[Tensor, np.ndarray, Any]]]] = {}
    _all: ClassVar[list[Tensor]] = []

    def __init__(self, device: torch.device) -> None:
        self._slots = self._free.setdefault(device, [])
        try:
            self._slot = self._slots.pop()
        except IndexError:
            on_card = device.type == "cuda"
            room = torch.zeros(WORDS, dtype=torch.int32, device="cpu", pin_memory=on_card)
            if on_card:
                self._all.append(room)
            self._slot = room, room.numpy(), torch.cuda.Event() if on_card else None
        self.room: Tensor = self._slot[0]
        "WORDS int32, for the kernels."

    def sent(self) -> None:
        """To be called when the last kernel that writes was launched, on its stream."""
        if self._slot[2] is not None:
            self._slot[2].record()

    def wait(self) -> np.ndarray:
        """The numbers (int32), when they are there; to be called once."""
        _, host, event = self._slot
        if event is not None:
            event.synchronize()
        found = host.copy()
        self._slots.append(self._slot)
        return found
