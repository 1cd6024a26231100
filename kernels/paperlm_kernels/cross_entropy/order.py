"""Vocabulary order: which ids share a tile of the gradient filter (paper section 4.3, "vocabulary sorting")."""

from __future__ import annotations

import torch
from torch import Tensor


def mean_logit_order(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """Ids in ascending order of the mean logit of the counting tokens (target >= 0), (V,) int64.

    hidden (N, D), weight (V, D), bias (V,) or None, target (N,). The mean of a linear map is the map of the mean,
    so this is one
    vector product instead of the published kernel's atomic sums, and the same in every run. It is the mean before the
    softcap, which is monotone; a logit scale does not change the order either.
    """
    counts = (target >= 0).to(hidden.dtype)
    mean = (counts @ hidden) / counts.sum(dtype=torch.float32).clamp(min=1).to(hidden.dtype)
    logits = weight @ mean
    return torch.argsort(logits if bias is None else logits + bias, stable=True)
