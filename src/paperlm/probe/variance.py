"""Variance of the residual stream that leaves each block: how fast activations grow with depth (LNS, Figures 1 and 6).

The paper says "output variance" without a formula, so there are two. Sums are float64, of float32 streams.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from paperlm.probe.blocks import forward_streams


@dataclass(frozen=True)
class OutputVariances:
    """One entry per block, (L,), of the stream leaving it, before any final norm; padding is left out."""

    per_token: np.ndarray
    "variance over the features of a token, its mean removed, averaged over tokens"
    overall: np.ndarray
    "variance over all features of all tokens together"
    tokens: int


@torch.no_grad()
def output_variances(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> OutputVariances:
    """Both variances (divided by the number, not one less). Batches of ids and mask, (B, S), on the model's device."""
    per_token, sums, squares = 0.0, 0.0, 0.0
    tokens = width = 0
    for ids, mask in batches:
        real = mask.bool()
        leaving = forward_streams(model, ids, mask)[1:]
        rows = [stream[real].double() for stream in leaving]
        per_token = per_token + torch.stack([x.var(-1, correction=0).sum() for x in rows])
        sums = sums + torch.stack([x.sum() for x in rows])
        squares = squares + torch.stack([x.square().sum() for x in rows])
        tokens += len(rows[0])
        width = rows[0].shape[-1]
    elements = tokens * width
    overall = squares / elements - (sums / elements).square()
    return OutputVariances(per_token=(per_token / tokens).cpu().numpy(), overall=overall.cpu().numpy(), tokens=tokens)
