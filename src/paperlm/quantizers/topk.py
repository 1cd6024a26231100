"""TopK: which of a token's entries are largest in magnitude."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def largest_entries(x: Tensor, count: int) -> Tensor:
    """True at the `count` entries of largest magnitude of each row of x (..., N); of equal ones at the first.

    Exactly so many, whatever ties there are (BitNet a4.8, Section 2.1). Magnitudes are compared in float32.
    """
    import torch

    # A magnitude's bits are ordered as it is. With the place from the right below them no two entries are equal.
    places = torch.arange(x.shape[-1] - 1, -1, -1, device=x.device)
    keys = (x.float().abs().view(torch.int32).long() << 32) | places
    return keys >= keys.topk(count, -1, sorted=False).values.amin(-1, keepdim=True)
