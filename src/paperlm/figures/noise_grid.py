"""Perplexity under noise on the weights, over its absolute and relative size, a heat map a row (NeuZip, Figure 7)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from paperlm.figures.base import Drawing, headline, labels_of
from paperlm.figures.options import Columns, FigureOptions
from paperlm.plan.project import Project
from paperlm.record.record import Record
from paperlm.tables.claims import CellSamples
from paperlm.tables.results import collect, seed_of

COLUMNS = ("absolute", "relative", "loss", "perplexity")


class Options(FigureOptions):
    """None: the grid is the job's."""

    def reads(self) -> Columns:
        return {"grid": COLUMNS}

    def reads_metrics(self) -> tuple[str, ...]:
        return ("perplexity",)


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """The first seed of each row. Statistics `Absolute 2^a` and `Relative 2^r` are of noise of one kind alone, `Without
    Noise` of none; how they vary between models was not measured."""
    import matplotlib.pyplot as plt
    import pandas as pd

    records = list(records)
    results = collect(project, name, records)
    found = {row: cell.usable for (row, _), cell in results.cells.items() if cell.usable}
    rows = [
        [row, seed_of(record.job), *values]
        for row, seeds in found.items()
        for record in seeds
        for values in record.series["grid"].rows
    ]
    width = 3.6 * max(1, len(found)) + 0.6
    figure, axes = plt.subplots(1, max(1, len(found)), figsize=(width, 3.4), squeeze=False, layout="constrained")
    for axis, (row, seeds) in zip(axes[0], found.items(), strict=False):
        absolute, relative, values = grid(seeds[0])
        image = axis.imshow(np.log2(values), origin="lower", cmap="viridis_r", aspect="auto")
        axis.set_xticks(range(len(relative)), list(map(called, relative)), fontsize=6.5)
        axis.set_yticks(range(len(absolute)), list(map(called, absolute)), fontsize=6.5)
        axis.set(title=row, xlabel="relative noise", ylabel="absolute noise")
        axis.grid(visible=False)
        figure.colorbar(image, ax=axis, label="log2 of the perplexity of a byte")
    if not found:
        axes[0][0].text(0.5, 0.5, "no model has been measured yet", ha="center", va="center")
        axes[0][0].set_axis_off()
    headline(figure, project, name, results)
    samples = {
        (row, statistic): CellSamples(values, seeds=tuple(seed_of(r.job) for r in seeds), measured=len(values) > 1)
        for row, seeds in found.items()
        for statistic, values in _statistics(seeds).items()
    }
    untested = "" if found else "no model has been measured"
    numbers = pd.DataFrame(rows, columns=["row", "seed", *COLUMNS])
    return Drawing(figure, numbers, samples, untested, labels=labels_of(project, name, records))


def grid(record: Record) -> tuple[list[int | None], list[int | None], np.ndarray]:
    """Absolute and relative sizes, none first, and the perplexities, (absolute, relative); NaN where there is none."""
    series = record.series["grid"]
    absolute, relative = (sorted(set(series.column(key)), key=_order) for key in ("absolute", "relative"))
    values = np.full((len(absolute), len(relative)), np.nan)
    for a, r, _, value in series.rows:
        values[absolute.index(a), relative.index(r)] = math.nan if value is None else value
    return absolute, relative, values


def called(exponent: int | None) -> str:
    """A size of noise as the axis says it."""
    return "none" if exponent is None else f"$2^{{{exponent}}}$"


def _order(exponent: int | None) -> float:
    return -math.inf if exponent is None else exponent


def _statistics(seeds: tuple[Record, ...]) -> dict[str, tuple[float, ...]]:
    """Statistic -> its value of each seed; no finite perplexity is an infinite one."""
    found: dict[str, list[float]] = {}
    for record in seeds:
        for a, r, _, value in record.series["grid"].rows:
            if (a is None) == (r is None):
                continue
            statistic = f"Relative 2^{r}" if a is None else f"Absolute 2^{a}"
            found.setdefault(statistic, []).append(math.inf if value is None else value)
        found.setdefault("Without Noise", []).append(float(record.metrics["perplexity"] or math.inf))
    return {statistic: tuple(values) for statistic, values in found.items()}
