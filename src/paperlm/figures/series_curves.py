"""A series of the records over its first column, one line a row: rewards of policy optimization.

Options: `series`, `x` and `y` columns, `label`, `window`: so many points are averaged. Bands: 95 % interval over seeds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from paperlm.figures.base import Drawing, labels_of
from paperlm.figures.paired import band, smoothed
from paperlm.figures.style import legend_below, row_styles
from paperlm.plan.project import Project
from paperlm.tables.results import collect


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """Smoothed means over seeds; the numbers are those of each seed, not smoothed."""
    import matplotlib.pyplot as plt
    import pandas as pd

    _, spec = project.figure(name)
    options, records = spec.options, list(records)
    results = collect(project, name, records)
    found = {row: cell.usable for (row, _), cell in results.cells.items() if cell.usable}
    rows = [
        [row, record.job["seed"], x, y]
        for row, seeds in found.items()
        for record in seeds
        for x, y in zip(*(record.series[options["series"]].column(options[key]) for key in ("x", "y")), strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["row", "seed", options["x"], options["y"]])
    figure, axis = plt.subplots(figsize=(5.6, 3.6))
    for row, style in row_styles(project, name).items():
        here = frame[frame["row"] == row].pivot(index=options["x"], columns="seed", values=options["y"]).dropna()
        if here.empty:
            continue
        curves = np.array([smoothed(here[seed].to_list(), options["window"]) for seed in here])
        x = here.index.to_numpy()[-curves.shape[1] :]
        mean, half = band(curves)
        axis.plot(x, mean, linewidth=1.4, label=row, **style)
        if len(curves) > 1:
            axis.fill_between(x, mean - half, mean + half, color=style["color"], alpha=0.15, linewidth=0)
    axis.set(xlabel=options["x"], ylabel=options["label"])
    figure.suptitle(f"{spec.number}: {spec.title}, scale {project.scale.scale}", fontsize=10)
    if found:
        legend_below(figure, *axis.get_legend_handles_labels())
    else:
        axis.text(0.5, 0.5, "no job has a record yet", ha="center", va="center", transform=axis.transAxes)
    return Drawing(figure, frame, {}, "" if found else "no job has a record", labels=labels_of(project, name, records))
