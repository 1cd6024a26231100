"""Vocabulary order: which ids share a tile of the gradient filter (paper section 4.3, "vocabulary sorting")."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 1024


def mean_logit_order(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, logit_scale: float = 1.0
) -> Tensor:
    """Ids in ascending order of the mean logit of the counting tokens (target >= 0), (V,) int64.

    hidden (N, D), weight (V, D), bias (V,) or None, target (N,). The logits are those before the softcap: the mean of a
    linear map is the map of the mean, so this is one vector product instead of the published kernel's atomic sums, and
    the same in every run. (The mean of capped logits can order ids differently; only tile membership hangs on it.)
    """
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    total = hidden.new_zeros(hidden.shape[1], dtype=wide)
    for rows, ids in zip(hidden.split(ROWS), target.split(ROWS), strict=True):
        total += torch.where((ids >= 0)[:, None], rows.to(wide), 0.0).sum(0)
    mean = total / (target >= 0).sum().clamp(min=1)
    logits = logit_scale * (weight @ mean.to(weight.dtype)).to(wide)
    return torch.argsort(logits if bias is None else logits + bias, stable=True)
