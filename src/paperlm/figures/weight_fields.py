"""Histograms of sign, exponent and mantissa of a model's weights, a line of panels a row (NeuZip, Figures 1 and 5)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from paperlm.figures.base import Drawing, headline, labels_of
from paperlm.figures.options import Columns, FigureOptions
from paperlm.figures.style import palette
from paperlm.jobs.weight_entropy import FIELDS
from paperlm.plan.project import Project
from paperlm.tables.claims import CellSamples
from paperlm.tables.results import collect, seed_of

CALLED = {
    "sign": "Sign", "exponent": "Exponent", "mantissa": "Mantissa", "joint": "Joint", "ratio_sum": "Ratio of the Sum",
    "ratio_joint": "Joint Ratio",
}  # fmt: skip
"Metric of the job -> how claims call it."


class Options(FigureOptions):
    """None: a panel for each field."""

    def reads(self) -> Columns:
        return {"histogram": ("field", "value", "share")}

    def reads_metrics(self) -> tuple[str, ...]:
        return tuple(CALLED)

    def statistics(self) -> tuple[str, ...]:
        return tuple(CALLED.values())


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """Shares of the first seed; statistics are of every seed and exact."""
    import matplotlib.pyplot as plt
    import pandas as pd

    records = list(records)
    results = collect(project, name, records)
    found = {row: cell.usable for (row, _), cell in results.cells.items() if cell.usable}
    lines = max(1, len(found))
    figure, axes = plt.subplots(
        lines, 3, figsize=(7, 2.1 * lines + 0.5), sharex="col", squeeze=False, layout="constrained"
    )
    rows = []
    for line, (row, seeds) in zip(axes, found.items(), strict=False):
        series = seeds[0].series["histogram"]
        for axis, color, field in zip(line, palette(), FIELDS, strict=False):
            points = [(value, share) for of, value, share in series.rows if of == field]
            axis.bar(*zip(*points, strict=True), width=1.0, color=color, linewidth=0)
            bits = seeds[0].metrics[field]
            axis.set(title=f"{field}, {bits:.3f} bits", xlabel="value" if row == list(found)[-1] else "")
            axis.set_ylabel(f"{textwrap.fill(row, 24)}\nshare" if axis is line[0] else "")
            axis.grid(visible=False, axis="x")
        rows += [[row, seed_of(record.job), *values] for record in seeds for values in record.series["histogram"].rows]
    if not found:
        axes[0][1].text(0.5, 0.5, "no model has been measured yet", ha="center", va="center")
        for axis in axes.flat:
            axis.set_axis_off()
    headline(figure, project, name, results)
    samples = {
        (row, label): CellSamples(
            tuple(float(r.metrics[metric]) for r in seeds), seeds=tuple(seed_of(r.job) for r in seeds)
        )
        for row, seeds in found.items()
        for metric, label in CALLED.items()
    }
    numbers = pd.DataFrame(rows, columns=["row", "seed", "field", "value", "share"])
    blocked = "; ".join(dict.fromkeys(f"blocked: {cell.blocked}" for cell in results.cells.values() if cell.blocked))
    untested = "" if found else blocked or "no model has been measured"
    return Drawing(figure, numbers, samples, untested, labels=labels_of(project, name, records))
