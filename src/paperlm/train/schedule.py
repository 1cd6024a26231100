"""Learning rate and weight decay of an update: linear warm-up from 0, then a cosine, or straight lines in one or two
phases."""

from __future__ import annotations

import math
from typing import Protocol


class Scheduled(Protocol):
    """Settings of a job that its rate follows from."""

    peak_lr: float
    warmup_steps: int
    steps: int
    final_lr_fraction: float | None


class Phased(Scheduled, Protocol):
    """Settings of a job whose rate and decay may change in the middle."""

    schedule: str
    second_peak_lr: float | None
    phase_step: int
    end_rate: float
    weight_decay: float
    second_weight_decay: float | None


def learning_rate(update: int, job: Scheduled) -> float:
    """Rate of an update, counted from 0, that falls as a cosine.

    update < W: peak * update / W; else peak * (f + (1-f) * (1 + cos(pi * (update-W)/(T-W))) / 2). The first update has
    rate 0 when there is a warm-up. The authors' loop makes one more update, at 1e-7 of the peak; ours does not.
    """
    warmup, total, floor = job.warmup_steps, job.steps, job.final_lr_fraction
    if update < warmup:
        return job.peak_lr * update / warmup
    progress = (update - warmup) / max(1, total - warmup)
    return job.peak_lr * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def rate_and_decay(update: int, job: Phased) -> tuple[float, float]:
    """Rate and weight decay of an update, counted from 0.

    schedule linear: peak * update / W up to W, then end + (peak - end) * (T - update) / (T - W). two_phase: from
    `phase_step` on the same line with the second peak, so that the rate jumps onto it, and the second decay. Both lines
    run to the same end at T, which no update reaches. BitNet b1.58's training tips (March 2024), of whose plot these
    lines have the points; a warm-up that reaches into the second phase rises to that one's peak.
    """
    second = job.schedule == "two_phase" and update >= job.phase_step
    decay = job.second_weight_decay if second and job.second_weight_decay is not None else job.weight_decay
    if job.schedule == "cosine":
        return learning_rate(update, job), decay
    peak, warmup, total, end = job.second_peak_lr if second else job.peak_lr, job.warmup_steps, job.steps, job.end_rate
    if update < warmup:
        return peak * update / warmup, decay
    return end + (peak - end) * (total - update) / max(1, total - warmup), decay
