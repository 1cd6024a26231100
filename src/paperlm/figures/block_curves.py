"""A number of each block over training, one line a block, a panel for each row (LayerNorm Scaling Figure 1).

The panels share their axis, for heights are compared across them; where it would flatten one they have their own and
say so. The columns of the figure are states along a run (`along`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from paperlm.figures.base import Drawing, headline, labels_of
from paperlm.figures.depth import CORRELATION, depth_samples, depth_statistics
from paperlm.figures.options import Columns, FigureOptions, options_of
from paperlm.plan.project import Project
from paperlm.record.record import Record
from paperlm.tables.results import collect, seed_of

FLAT = 20
"Times that one panel's largest number may be another's before an axis that they share leaves of the smaller a line."

Curve = dict[int, list[float]]
"Update -> the number of each block, first to last."


class Options(FigureOptions):
    """Which number."""

    series: str
    "of the records"
    column: str
    "of the series"
    label: str
    "of the axis"
    log: bool = False
    "the axis is logarithmic"

    def reads(self) -> Columns:
        return {self.series: ("block", self.column)}


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """Lines from dark (first block) to light (last); the first seed of each row."""
    import matplotlib.pyplot as plt
    import numpy as np
    import pandas as pd
    from matplotlib.colors import ListedColormap

    options, records = options_of(project, name), list(records)
    results = collect(project, name, records)
    curves: dict[str, dict[int, Curve]] = {}
    for (row, _), cell in results.cells.items():
        for record in cell.usable:
            series = record.series[options["series"]]
            pairs = sorted(zip(series.column("block"), series.column(options["column"]), strict=True))
            seeds = curves.setdefault(row, {})
            seeds.setdefault(seed_of(record.job), {})[update_of(record)] = [value for _, value in pairs]
    rows = [
        [row, seed, update, block, value]
        for row, seeds in curves.items()
        for seed, curve in seeds.items()
        for update, blocks in sorted(curve.items())
        for block, value in enumerate(blocks, 1)
    ]
    frame = pd.DataFrame(rows, columns=["row", "seed", "update", "block", options["column"]])
    count = max(1, len(curves))
    together = options["log"] or not flattened(curves)
    figure, axes = plt.subplots(
        1, count, figsize=(2.15 * count + 0.7, 2.7), sharey=together, squeeze=False, layout="constrained"
    )
    # without the lightest end, which is hard to see on white; lines and bar are of the same map
    shades = ListedColormap(plt.get_cmap("viridis")(np.linspace(0, 0.9, 256)))
    for axis, (row, seeds) in zip(axes[0], curves.items(), strict=False):
        curve = next(iter(seeds.values()))
        updates = sorted(curve)
        depth = len(curve[updates[0]])
        for block, color in enumerate(shades(np.linspace(0, 1, depth))):
            axis.plot(updates, [curve[update][block] for update in updates], color=color, linewidth=1.1)
        if options["log"]:
            axis.set_yscale("log")
        axis.set(
            title=row if together else f"{row}\n(own scale)",
            xlabel="update",
            ylabel=options["label"] if axis is axes[0][0] else "",
        )
    if curves:
        colours = plt.cm.ScalarMappable(plt.Normalize(1, depth), shades)
        figure.colorbar(colours, ax=axes[0].tolist(), label="block (from 1)", fraction=0.04, pad=0.02)
    else:
        axes[0][0].text(0.5, 0.5, "no model has been measured yet", ha="center", va="center")
        axes[0][0].set_axis_off()
    headline(figure, project, name, results)
    wanted = Counter(row for row, _ in results.cells)
    whole = {row: {s: c for s, c in seeds.items() if len(c) == wanted[row]} for row, seeds in curves.items()}
    statistics = {
        row: {seed: curve_statistics(curve) for seed, curve in found.items()} for row, found in whole.items() if found
    }
    untested = "" if curves else "no model has been measured"
    samples = depth_samples(statistics)
    return Drawing(figure, frame, samples, untested, labels=labels_of(project, name, records))


def flattened(curves: Mapping[str, Mapping[int, Curve]]) -> bool:
    """Whether a panel of the first seed of some row would be flat on the axis of another."""
    tops = [
        max(abs(value) for blocks in next(iter(seeds.values())).values() for value in blocks)
        for seeds in curves.values()
    ]
    return bool(tops) and max(tops) > FLAT * min(tops)


def update_of(record: Record) -> int:
    """After how many updates of its model's run a record was measured."""
    at = record.job.get("at", "end")
    return {"init": 0, "end": record.job["of"].get("steps", 0)}.get(at, at)


def curve_statistics(curve: Curve) -> dict[str, float]:
    """What claims read: first and last block at a fifth of the axis and at its end, the largest number of all, and the
    rank correlation with depth at the end."""
    last = max(curve)
    fifth = min(curve, key=lambda update: abs(update - last / 5))
    return {
        "First Block, Fifth": curve[fifth][0],
        "First Block, End": curve[last][0],
        "Last Block, Fifth": curve[fifth][-1],
        "Last Block, End": curve[last][-1],
        "Largest": max(map(max, curve.values())),
        f"{CORRELATION}, End": depth_statistics(curve[last])[CORRELATION],
    }
