"""Angular distance between residual streams: how far a run of blocks turns the stream.

d(l, n) = arccos( <x_l, x_{l+n}> / (|x_l| |x_{l+n}|) ) / pi, between 0 (same direction) and 1 (Gromov et al.,
arXiv 2403.17887; Mix-LN section 3.2). Streams are float32. Cosines are float64 and clamped: in float32 rounding alone
is an angle of 1e-4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from paperlm.probe.blocks import forward_streams

CHUNK = 256
"Tokens at a time: their float64 streams of 40 blocks at width 5,120 are 0.4 GB."


@dataclass(frozen=True)
class AngularDistances:
    """Means over tokens; row l-1, column n-1, (L, L), NaN where l + n > L + 1."""

    raw: np.ndarray
    "over all real tokens but the first of a sequence"
    raw_last: np.ndarray
    "over the last real token of each sequence"
    tokens: int
    sequences: int


@torch.no_grad()
def angular_distances(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> AngularDistances:
    """d(l, n) for all l and n. Batches of ids and mask, (B, S), padded on the right, on the model's device.

    The first token is left out, as it attends to nothing but itself, and with it sequences of one token. A token whose
    stream is zero has no direction: it is left out where it is.
    """
    sums: list[Tensor | float] = [0.0, 0.0]
    counts: list[Tensor | float] = [0.0, 0.0]
    tokens = sequences = 0
    for ids, mask in batches:
        kept = mask.bool().clone()
        kept[:, 0] = False
        # Of the kept tokens of each sequence, the last one.
        last = kept & (kept.flip(1).cumsum(1).flip(1) == 1)
        streams = torch.stack([stream[kept] for stream in forward_streams(model, ids, mask)], dim=1)
        tokens += len(streams)
        sequences += int(last.sum())
        for part, is_last in zip(streams.split(CHUNK), last[kept].split(CHUNK), strict=True):
            distance = _distances(part.double())
            for index, chosen in enumerate((distance, distance[is_last])):
                sums[index] = sums[index] + chosen.nan_to_num(0.0).sum(0)
                counts[index] = counts[index] + chosen.isfinite().sum(0)
    raw, raw_last = (_by_difference(total / count) for total, count in zip(sums, counts, strict=True))
    return AngularDistances(raw=raw, raw_last=raw_last, tokens=tokens, sequences=sequences)


def _distances(streams: Tensor) -> Tensor:
    """(T, L+1, D) -> (T, L+1, L+1); NaN where a stream is zero or not finite."""
    directions = streams / streams.norm(dim=-1, keepdim=True)
    return (directions @ directions.transpose(1, 2)).clamp(-1.0, 1.0).arccos() / math.pi


def _by_difference(pairs: Tensor) -> np.ndarray:
    """Entry (l, m) of the pairs, (L+1, L+1), to entry (l, m - l - 1) of (L, L)."""
    depth = len(pairs) - 1
    values = pairs.cpu().numpy()
    found = np.full((depth, depth), np.nan)
    for start in range(depth):
        found[start, : depth - start] = values[start, start + 1 :]
    return found


def scaled(raw: np.ndarray) -> np.ndarray:
    """Distances for display, each n on a scale of its own: clipped to the 1st to 99th percentile over l, then 0 to 1.

    How the authors of LayerNorm Scaling draw some of their maps (utils/angular_analysis.py): colours of two values of
    n, or of two models, then cannot be compared. An n whose distances are all alike becomes 0. raw: as
    `AngularDistances.raw`.
    """
    found = np.full_like(raw, np.nan)
    for n, column in enumerate(raw.T):
        present = np.isfinite(column)
        if not present.any():
            continue
        low, high = np.percentile(column[present], (1, 99))
        clipped = np.clip(column[present], low, high) - low
        found[present, n] = clipped / (high - low) if high > low else 0.0
    return found
