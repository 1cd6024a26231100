"""Learning rate: linear warm-up from 0, then cosine to a fraction of the peak."""

from __future__ import annotations

import math
from typing import Protocol


class Scheduled(Protocol):
    """Settings of a job that its rate follows from."""

    peak_lr: float
    warmup_steps: int
    steps: int
    final_lr_fraction: float


def learning_rate(update: int, job: Scheduled) -> float:
    """Rate of an update, counted from 0.

    update < W: peak * update / W; else peak * (f + (1-f) * (1 + cos(pi * (update-W)/(T-W))) / 2). The first update has
    rate 0 when there is a warm-up. The authors' loop makes one more update, at 1e-7 of the peak; ours does not.
    """
    warmup, total, floor = job.warmup_steps, job.steps, job.final_lr_fraction
    if update < warmup:
        return job.peak_lr * update / warmup
    progress = (update - warmup) / max(1, total - warmup)
    return job.peak_lr * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)
