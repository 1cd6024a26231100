"""Figure 4 of Cut Cross-Entropy: training loss with each loss function, over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from pydantic import Field

from paperlm.figures.base import Drawing
from paperlm.figures.options import Columns, FigureOptions, options_of
from paperlm.figures.paired import p_equivalent, p_greater, smoothed
from paperlm.figures.seed_curves import (
    Runs,
    draw_line,
    drawn,
    finish,
    panels,
    runs_of,
    same_for_all,
    samples_of,
    shared,
)
from paperlm.figures.style import row_styles
from paperlm.plan.project import Project
from paperlm.record.record import Record
from paperlm.tables.claims import CellSamples
from paperlm.tables.contents import Key

DIFFERENCE = "Mean Absolute Difference"
DEVIATION = "Between-Seed Deviation"
EQUIVALENCE, BEYOND = "p of Equivalence", "p of Difference"


class Options(FigureOptions):
    """What is compared, and how."""

    reference: str
    "row that the others are compared with"
    window: int = Field(gt=0)
    "updates that a point of the curves is the mean of"
    margin: float = Field(gt=0)
    "nats within which two losses count as equal"
    last: float = Field(gt=0, le=1)
    "share of the updates, the last ones, whose mean loss is compared"

    def reads(self) -> Columns:
        return {"train": ("update", "tokens", "loss")}

    def names_rows(self) -> dict[str, str]:
        return {"reference": self.reference}

    def statistics(self) -> tuple[str, ...]:
        return (DIFFERENCE, DEVIATION, EQUIVALENCE, BEYOND)


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """Smoothed training loss of each row, and its difference to the reference row's."""
    import pandas as pd

    options = options_of(project, name)
    runs, every = runs_of(project, name, records)
    window, reference = options["window"], options["reference"]
    rows = [
        [row, seed, int(update), int(tokens), loss, value]
        for row, by_seed in runs.items()
        for seed, record in by_seed.items()
        for (update, tokens, loss), value in zip(record.series["train"].rows, _padded(record, window), strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["row", "seed", "update", "tokens", "loss", "smoothed"])
    figure, (left, right) = panels()
    styles = row_styles(project, name)
    for row, by_seed in runs.items():
        curves = np.array([smoothed(_losses(r), window) for r in by_seed.values()])
        draw_line(left, _updates(next(iter(by_seed.values())), curves[0]), curves, styles[row], row)
        paired = shared(runs, row, reference) if row != reference else []
        if paired:
            pairs = [(runs[row][seed], runs[reference][seed]) for seed in paired]
            gaps = np.array([np.subtract(*(smoothed(_losses(r), window) for r in pair)) for pair in pairs])
            draw_line(right, _updates(pairs[0][0], gaps[0]), gaps, styles[row], row)
    for edge in (-options["margin"], options["margin"]):
        right.axhline(edge, color="0.4", linestyle=":", linewidth=1)
    right.axhline(0, color="0.4", linewidth=0.8)
    left.set(xlabel="update", ylabel=f"training loss (nats),\nmean of {window} updates")
    right.set(xlabel="update", ylabel=f"the same minus that of\n{reference} with the same seed")
    finish(project, name, figure, left, runs, every)
    return drawn(project, name, figure, frame, loss_samples(runs, **options), records)


def loss_samples(runs: Runs, reference: str, window: int, margin: float, last: float) -> dict[Key, CellSamples]:
    """What the claims of Figure 4 read, for rows and reference with at least two seeds in common.

    Mean absolute difference of the smoothed curves over the last half of the updates, a value for each seed; deviation
    of the reference's smoothed curves between seeds, as root mean square over the same updates; p of two one-sided
    tests that the mean loss of the last updates (`last`: their share) differs by less than `margin` nats, and p of the
    tests that it differs by more, doubled because there are two sides.
    """
    samples: dict[Key, CellSamples] = {}
    references = runs.get(reference, {})
    if len(references) > 1:
        half = np.array([_last_half(record, window) for record in references.values()])
        deviation = float(np.sqrt(half.var(0, ddof=1).mean()))
        # The sampling error of a standard deviation; windows that do not overlap count as one draw each.
        draws = (len(half) - 1) * max(1, half.shape[1] // window)
        error = deviation * (2 * draws) ** -0.5
        samples[reference, DEVIATION] = CellSamples((deviation,) * len(half), deviation=error * math.sqrt(len(half)))
    for row in runs:
        seeds = shared(runs, row, reference) if row != reference else []
        if len(seeds) < 2:
            continue
        pairs = [(runs[row][seed], references[seed]) for seed in seeds]
        gaps = [float(np.abs(_last_half(a, window) - _last_half(b, window)).mean()) for a, b in pairs]
        ends = [_end(a, last) - _end(b, last) for a, b in pairs]
        samples[row, DIFFERENCE] = samples_of(gaps, seeds, DIFFERENCE)
        beyond = min(p_greater(ends, margin), p_greater([-d for d in ends], margin))
        samples[row, EQUIVALENCE] = same_for_all(p_equivalent(ends, margin), len(seeds))
        samples[row, BEYOND] = same_for_all(min(1.0, 2 * beyond), len(seeds))
    return samples


def _losses(record: Record) -> list[float]:
    return [loss for *_, loss in record.series["train"].rows]


def _padded(record: Record, window: int) -> list[float | None]:
    values = smoothed(_losses(record), window)
    return [None] * (len(record.series["train"].rows) - len(values)) + values.tolist()


def _updates(record: Record, values: np.ndarray) -> np.ndarray:
    return np.array([update for update, *_ in record.series["train"].rows])[-len(values) :]


def _last_half(record: Record, window: int) -> np.ndarray:
    values = smoothed(_losses(record), window)
    return values[_updates(record, values) > record.job["steps"] / 2]


def _end(record: Record, share: float) -> float:
    losses = _losses(record)
    return statistics.fmean(losses[-max(1, round(share * len(losses))) :])
