"""A number for each block as bars, on a logarithmic axis as dots, a panel for each row: gradient norms, what a model
loses without a block."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from paperlm.figures.base import Drawing, headline, labels_of
from paperlm.figures.depth import Also, depth_samples, mean_over_seeds, statistics_of
from paperlm.figures.options import Columns, FigureOptions, options_of
from paperlm.figures.style import method_color, norm_of
from paperlm.plan.project import Project
from paperlm.record.record import Record
from paperlm.tables.results import collect, seed_of

ACROSS = 3
"Panels beside each other: more of them are too narrow to read on a page."


class Options(FigureOptions):
    """Which number, and how it is shown."""

    series: str
    "of the records"
    column: str
    "of the series"
    label: str
    "of the axis"
    error: str = ""
    "metric whose standard error one number has"
    percent: bool = False
    "shares are shown as points"
    log: bool = False
    "the axis is logarithmic"
    also: Also = ""
    "further statistics that claims read"

    def reads(self) -> Columns:
        return {self.series: ("block", self.column)}

    def reads_metrics(self) -> tuple[str, ...]:
        return (self.error,) if self.error else ()


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """Bars or large dots are means over seeds, a small dot is one seed's number; of a single seed they have the 95 %
    interval of the measurement, if it has one."""
    import matplotlib.pyplot as plt
    import pandas as pd
    from matplotlib.ticker import MaxNLocator

    options, records = options_of(project, name), list(records)
    results = collect(project, name, records)
    found = {row: cell.usable for (row, _), cell in results.cells.items() if cell.usable}
    curves = {row: [values(record, options) for record in seeds] for row, seeds in found.items()}
    rows = [
        [row, seed_of(record.job), block, value]
        for row, seeds in found.items()
        for record, curve in zip(seeds, curves[row], strict=True)
        for block, value in enumerate(curve, 1)
    ]
    frame = pd.DataFrame(rows, columns=["row", "seed", "block", options["column"]])
    count = max(1, len(found))
    lines, across = -(-count // ACROSS), min(count, ACROSS)
    figure, axes = plt.subplots(
        lines, across, figsize=(2.15 * across + 0.55, 2.1 * lines + 0.5), sharey=True, squeeze=False
    )
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    errors = _errors(found, options)
    methods = {row: norm_of(cell.cell.jobs[0]) for (row, _), cell in results.cells.items()}
    for place, (axis, (row, seeds)) in enumerate(zip(axes.flat, curves.items(), strict=False)):
        mean = mean_over_seeds(seeds)
        error = 1.96 * errors[row] if errors and len(seeds) == 1 else None  # several seeds show how far they spread
        color = method_color(methods[row])
        if options["log"]:  # a logarithmic axis has no zero for bars to stand on
            axis.errorbar(
                range(len(mean)), mean, error, fmt="o", color=color, markersize=4.5, elinewidth=0.7, ecolor="0.3"
            )
        else:
            errors_of_bars = {"elinewidth": 0.7, "ecolor": "0.3"}
            axis.bar(range(len(mean)), mean, color=color, width=0.75, yerr=error, error_kw=errors_of_bars)
        for seed in seeds if len(seeds) > 1 else ():
            axis.plot(range(len(seed)), seed, ".", color="0.2", markersize=3)
        if options["log"]:
            axis.set_yscale("log")
        else:
            axis.axhline(0, color="0.4", linewidth=0.8)
        axis.set(title=row, ylabel="" if place % across else options["label"])
        axis.set_xlabel("block (from 0, as in print)" if place + across >= count else "")
        axis.set_xlim(-0.6, len(mean) - 0.4)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(visible=False, axis="x")
    if not found:
        axes[0][0].text(0.5, 0.5, "no model has been measured yet", ha="center", va="center")
        axes[0][0].set_axis_off()
    headline(figure, project, name, results)
    figure.tight_layout()
    also = options["also"]
    statistics = {
        row: {seed_of(record.job): statistics_of(values(record, options), also) for record in seeds}
        for row, seeds in found.items()
    }
    samples = depth_samples(statistics, errors)
    untested = "" if found else "no model has been measured"
    return Drawing(figure, frame, samples, untested, labels=labels_of(project, name, records))


def values(record: Record, options: dict) -> list[float]:
    """The number of each block, first to last."""
    series = record.series[options["series"]]
    factor = 100.0 if options["percent"] else 1.0
    pairs = zip(series.column("block"), series.column(options["column"]), strict=True)
    return [factor * value for _, value in sorted(pairs)]


def _errors(found: dict[str, tuple[Record, ...]], options: dict) -> dict[str, float] | None:
    """Standard error of one number of a row, if the measurement has one."""
    if not (metric := options["error"]):
        return None
    factor = 100.0 if options["percent"] else 1.0
    return {row: factor * seeds[0].standard_errors[metric] for row, seeds in found.items()}
