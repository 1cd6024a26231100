"""What kernels found wrong while they decoded: a word on each device, read when someone asks."""

from __future__ import annotations

import torch
from torch import Tensor

from paperlm_kernels.neuzip.errors import StreamError

_WORDS: dict[torch.device, Tensor] = {}


def word(device: torch.device) -> Tensor:
    """The device's word (int32, one element), 0 as long as nothing was found."""
    if device not in _WORDS:
        _WORDS[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return _WORDS[device]


def raise_found(device: torch.device | str) -> None:
    """See `paperlm_kernels.neuzip.raise_decode_errors`."""
    wanted = torch.device(device)
    for known, found in _WORDS.items():
        same = known.type == wanted.type and wanted.index in (None, known.index)
        if same and bool(found.item()):
            found.zero_()
            raise StreamError(f"a stream that was unpacked on {known} ends elsewhere than its size says: the packed "
                              "tensor is damaged; load it again with check='full'")  # fmt: skip
