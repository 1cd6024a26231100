"""Histograms of what enters projections, a panel each, a line of panels for each row (BitNet a4.8, Figures 2 and 3)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from paperlm.figures.base import Drawing, headline, labels_of
from paperlm.figures.options import Columns, FigureOptions, options_of
from paperlm.figures.style import palette
from paperlm.jobs.activation_distribution import OF_INPUTS, OF_QUANTIZED
from paperlm.plan.project import Project
from paperlm.quantizers.scheme import INPUTS
from paperlm.record.record import Record
from paperlm.tables.claims import CellSamples
from paperlm.tables.results import collect, seed_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CALLED = {
    "rms": "Root Mean Square", "kurtosis": "Excess Kurtosis", "near_zero": "Near Zero", "zeros": "Zeros",
    "relative_error": "Relative Error", "square_kept": "Square Kept",
}  # fmt: skip
"Metric of the job -> how claims call it, followed by the panel's title."


class Options(FigureOptions):
    """Which panels."""

    panels: dict[str, str] = Field(min_length=1)
    "title -> tensor of the records: an input (qkv, o, gate_up, down) or the title of a quantizer that was tried"
    label: str
    "of the axis"
    log_inset: bool = False
    "a small panel with a logarithmic axis"

    def reads(self) -> Columns:
        return {"histogram": ("tensor", "block", "left", "right", "density")}

    def reads_metrics(self) -> tuple[str, ...]:
        return tuple(f"{tensor}/{metric}" for tensor in self.panels.values() for metric in of_tensor(tensor))

    def statistics(self) -> tuple[str, ...]:
        return tuple(
            f"{CALLED[metric]}, {title}" for title, tensor in self.panels.items() for metric in of_tensor(tensor)
        )


def of_tensor(tensor: str) -> tuple[str, ...]:
    """Metrics that the job has of an input, or of a quantizer."""
    return OF_INPUTS if tensor in INPUTS else OF_QUANTIZED


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """Densities of the first seed, all blocks together, the middle one as a line where it was measured; statistics are
    of every seed, with the measurement's own standard error."""
    import matplotlib.pyplot as plt
    import pandas as pd

    options, records = options_of(project, name), list(records)
    panels = options["panels"]
    results = collect(project, name, records)
    found = {row: cell.usable for (row, _), cell in results.cells.items() if cell.usable}
    columns = ["tensor", "block", "left", "right", "count", "density"]
    rows = [
        [row, seed_of(record.job), *values]
        for row, seeds in found.items()
        for record in seeds
        for values in record.series["histogram"].rows
        if values[0] in panels.values()
    ]
    frame = pd.DataFrame(rows, columns=["row", "seed", *columns])
    figure, axes = plt.subplots(
        max(1, len(found)), len(panels), figsize=(2.4 * len(panels) + 0.5, 2.3 * max(1, len(found)) + 0.5),
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for line, (row, seeds) in zip(axes, found.items(), strict=False):
        for axis, color, (title, tensor) in zip(line, palette(), panels.items(), strict=False):
            for block, (edges, density) in histograms_of(seeds[0], tensor).items():
                _histogram(axis, edges, density, color, middle=bool(block))
                if options["log_inset"] and not block:
                    _inset(axis, edges, density, color)
            if options["log_inset"]:
                axis.set_ylim(top=1.75 * axis.get_ylim()[1])  # room for the small panel
            axis.set(title=title if len(found) == 1 else f"{row}: {title}", xlabel=options["label"])
            axis.set_ylabel("density" if axis is line[0] else "")
            axis.grid(visible=False, axis="x")
    middle = sorted(
        {block for seeds in found.values() for t in panels.values() for block in histograms_of(seeds[0], t)}
    )
    if len(middle) > 1:
        import matplotlib.lines
        import matplotlib.patches

        handles = [matplotlib.patches.Patch(color="0.7"), matplotlib.lines.Line2D([], [], **MIDDLE)]
        alone = f"block {' or '.join(map(str, middle[1:]))} alone"
        figure.legend(handles, ["all blocks", alone], loc="outside upper left", ncols=2, frameon=False, fontsize=8)
    if not found:
        axes[0][0].text(0.5, 0.5, "no model has been measured yet", ha="left", va="center")
        for axis in axes.flat:
            axis.set_axis_off()
    headline(figure, project, name, results)
    samples = {
        (row, f"{CALLED[metric]}, {title}"): _sample(seeds, f"{tensor}/{metric}")
        for row, seeds in found.items()
        for title, tensor in panels.items()
        for metric in of_tensor(tensor)
    }
    untested = "" if found else "no model has been measured"
    return Drawing(figure, frame, samples, untested, labels=labels_of(project, name, records))


MIDDLE = {"color": "0.25", "linewidth": 0.8}
"Look of the middle block's line."

Bins = tuple[list[float], list[float]]
"Edges, one more than there are densities."


def histograms_of(record: Record, tensor: str) -> dict[int, Bins]:
    """Block (0: all of them) -> bins of a tensor."""
    series = record.series["histogram"]
    found: dict[int, Bins] = {}
    parts = [series.column(name) for name in ("tensor", "block", "left", "right", "density")]
    for of, block, left, right, density in zip(*parts, strict=True):
        if of == tensor:
            edges, densities = found.setdefault(block, ([left], []))
            edges.append(right)
            densities.append(density)
    return found


def _histogram(axis: Axes, edges: list[float], density: list[float], color: Any, middle: bool) -> None:
    if middle:
        axis.stairs(density, edges, **MIDDLE)
    else:
        axis.stairs(density, edges, fill=True, color=color, alpha=0.7)


def _inset(axis: Axes, edges: list[float], density: list[float], color: Any) -> None:
    """The same with a logarithmic axis, in the upper right corner."""
    small = axis.inset_axes((0.66, 0.6, 0.32, 0.36))
    small.stairs(density, edges, fill=True, color=color, alpha=0.7)
    positive = [value for value in density if value > 0]
    small.set_yscale("log")
    if positive:
        small.set_ylim(min(positive) / 2, 2 * max(positive))
    small.tick_params(labelsize=5, length=1.5, pad=1)
    small.minorticks_off()
    small.grid(visible=False)


def _sample(seeds: tuple[Record, ...], metric: str) -> CellSamples:
    """A metric of each seed; a run varies by at least the measurement's own standard error."""
    values = tuple(math.inf if (v := record.metrics[metric]) is None else float(v) for record in seeds)
    errors = [record.standard_errors[metric] for record in seeds if metric in record.standard_errors]
    known = len(errors) == len(seeds)
    deviation = statistics.fmean(errors) if known else 0.0
    numbers = tuple(seed_of(record.job) for record in seeds)
    return CellSamples(values, seeds=numbers, deviation=deviation, measured=known or len(values) > 1)
