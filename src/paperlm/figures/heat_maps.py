"""Angular distance between the streams of two blocks, a heat map for each row (Mix-LN Figures 2, 3 and 5).

Claims read the raw values.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from paperlm.figures.base import Drawing, headline, labels_of
from paperlm.figures.depth import Also, depth_samples, statistics_of
from paperlm.figures.options import Columns, FigureOptions, options_of
from paperlm.plan.project import Project
from paperlm.record.record import Record
from paperlm.tables.results import collect, seed_of

MEANING = {"raw": "angle / pi", "scaled": "angle, scaled for each n"}


class Options(FigureOptions):
    """Which values."""

    values: list[Literal["raw", "scaled"]] = Field(min_length=1)
    """a line of panels for each; raw: angle over pi, the same colours in every panel; scaled: clipped and stretched for
    each n, so that panels share no scale"""
    also: Also = ""
    "further statistics of the raw values that claims read"

    def reads(self) -> Columns:
        return {"angular": ("block", "n", "raw", "scaled", "raw_last")}


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """A panel a row, the first seed of each; statistics are of raw distances to the next block (n = 1)."""
    import matplotlib.pyplot as plt
    import pandas as pd

    records = list(records)
    results = collect(project, name, records)
    found = {row: cell.usable for (row, _), cell in results.cells.items() if cell.usable}
    rows = [
        [row, seed_of(record.job), *values]
        for row, seeds in found.items()
        for record in seeds
        for values in record.series["angular"].rows
    ]
    frame = pd.DataFrame(rows, columns=["row", "seed", "block", "n", "raw", "scaled", "raw_last"])
    options = options_of(project, name)
    shown = options["values"]
    width, height = 2.0 * max(1, len(found)) + 0.9, 2.0 * len(shown) + 0.5
    figure, axes = plt.subplots(
        len(shown), max(1, len(found)), figsize=(width, height), squeeze=False, layout="constrained"
    )
    for place, (value, line) in enumerate(zip(shown, axes, strict=True)):
        top = max(float(frame["raw"].max()), 0.1) if value == "raw" and len(frame) else 1.0
        for axis, (row, seeds) in zip(line, found.items(), strict=False):
            array = grid(seeds[0], value)
            # Yellow is similar, as in the papers.
            image = axis.imshow(array, origin="lower", cmap="viridis_r", vmin=0, vmax=top, aspect="auto")
            depth = len(array)
            every = range(0, depth, max(1, depth // 6))
            axis.set_xticks(every)
            axis.set_yticks(every, [place + 1 for place in every])
            axis.set(title="" if place else row, ylabel="blocks further, n" if axis is line[0] else "")
            axis.set_xlabel("block (from 0, as in print)" if place == len(shown) - 1 else "")
            axis.grid(visible=False)
        if found:
            figure.colorbar(image, ax=line.tolist(), label=MEANING[value], fraction=0.05, pad=0.02)
    if not found:
        axes[0][0].text(0.5, 0.5, "no model has been measured yet", ha="center", va="center")
        for axis in axes.flat:
            axis.set_axis_off()
    headline(figure, project, name, results)
    statistics = {
        row: {seed_of(record.job): statistics_of(neighbours(record), options["also"]) for record in seeds}
        for row, seeds in found.items()
    }
    untested = "" if found else "no model has been measured"
    return Drawing(figure, frame, depth_samples(statistics), untested, labels=labels_of(project, name, records))


def neighbours(record: Record) -> list[float]:
    """Raw distance of the stream entering each block to that entering the next, first block first."""
    series = record.series["angular"]
    pairs = zip(series.column("block"), series.column("n"), series.column("raw"), strict=True)
    return [raw for _, n, raw in sorted(pairs) if n == 1]


def grid(record: Record, value: str) -> np.ndarray:
    """(n, block) of a value, NaN where the pair leaves the model."""
    series = record.series["angular"]
    blocks, steps, values = (series.column(key) for key in ("block", "n", value))
    depth = max(blocks)
    array = np.full((depth, depth), np.nan)
    for block, n, number in zip(blocks, steps, values, strict=True):
        array[n - 1, block - 1] = np.nan if number is None else number
    if value == "scaled":  # one number alone has no range that it could be stretched over
        array[np.isfinite(array).sum(1) < 2] = np.nan
    return array
