"""A few numbers on their way from a device to the host, which does not wait for them before it has to."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

SLOT = 256
"Bytes of a place for them; a codebook and what goes with it fit."


class ReadBack:
    """A copy of a contiguous tensor (int32, at most SLOT bytes), begun on the current stream.

    A card writes into page-locked memory, without which the host would wait at once. Such memory takes long to get, and
    is used again.
    """

    _free: ClassVar[dict[torch.device, list[tuple[Tensor, np.ndarray, Any]]]] = {}

    def __init__(self, note: Tensor) -> None:
        self._count, self._found = note.numel(), None
        if note.device.type != "cuda":
            self._found = note.numpy().copy()
            return
        self._slots = self._free.setdefault(note.device, [])
        if self._slots:
            self._slot = self._slots.pop()
        else:
            pinned = torch.empty(SLOT // 4, dtype=torch.int32, pin_memory=True)
            self._slot = (pinned, pinned.numpy(), torch.cuda.Event())
        room, self._host, self._event = self._slot
        room[: self._count].copy_(note, non_blocking=True)
        self._event.record()

    def wait(self) -> np.ndarray:
        """The numbers (int32), when they are there."""
        if self._found is None:
            self._event.synchronize()
            self._found = self._host[: self._count].copy()
            self._slots.append(self._slot)
        return self._found
