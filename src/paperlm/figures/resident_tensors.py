"""Which tensors of a linear layer lie in memory, and for how long, and what that comes to in a training (NeuZip,
Figure 2).

The upper panel is what the layers of paperlm_kernels.stored and its descent within the backward pass keep. The lower
one has bytes of a table's trainings: weights, and weights with gradients at their most, which are counted, and peaks of
the phases of an update, which a GPU measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from paperlm.figures.base import Drawing, exhibit_contents
from paperlm.figures.options import FigureOptions, options_of
from paperlm.figures.style import palette, title_and_scale
from paperlm.jobs.stored_speed import PHASES
from paperlm.plan.project import Project
from paperlm.tables.jobs import proxies_of
from paperlm.tables.results import Results, collect
from paperlm.tables.vocabulary import NOT_RUN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHODS = ("Vanilla", "AC", "AC + LOMO", "NeuZip")
RUN, UPDATE, LAYER, NONE = "the whole run", "until the update", "while its layer runs", "-"
BACKWARD, BLOCK = "until its backward", "recomputed"
"Recomputed: kept from the second forward pass of its block to the backward pass of its layer."
LIFETIMES = {
    "weight, 16 bits": (RUN, RUN, RUN, LAYER),
    "weight, compressed": (NONE, NONE, NONE, RUN),
    "gradient of the weight": (UPDATE, UPDATE, LAYER, LAYER),
    "input": (BACKWARD, BLOCK, BLOCK, BLOCK),
    "output": (LAYER, LAYER, LAYER, LAYER),
    "gradient of the output": (LAYER, LAYER, LAYER, LAYER),
    "gradient of the input": (LAYER, LAYER, LAYER, LAYER),
}
"Tensor -> how long it lives with each method."
MIB = 2**20
COUNTED = {"weights, counted": "weight_bytes", "with gradients at most, counted": "state_bytes"}
MEASURED = {f"{phase}, measured peak": f"{phase}/peak_bytes" for phase in PHASES}
"What the lower panel shows -> metric of a training, and of its timed updates."


class Options(FigureOptions):
    """Where in the table the bytes are."""

    drawn_from: ClassVar[str] = "jobs"
    counted: str
    "column of trainings"
    measured: str
    "column of their timed updates"
    rows: dict[str, str]
    "method -> its row"

    def names_rows(self) -> Mapping[str, str]:
        return {f"rows.{method}": row for method, row in self.rows.items()}

    def names_columns(self) -> Mapping[str, str]:
        return {"counted": self.counted, "measured": self.measured}


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """A table in colours, and bars. Claims read the cells of their table: one about lifetimes would hold whatever was
    run."""
    import matplotlib.pyplot as plt
    import pandas as pd

    _, spec = project.figure(name)
    options = options_of(project, name)
    records = list(records)
    results = collect(project, spec.table, records)
    found = bytes_of(results, options)
    # One above the other: beside each other they are wider than a page, which would make their text too small to read.
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(7.0, 5.3), height_ratios=[2.7, 2.4])
    _lifetimes(upper)
    _bars(lower, found, options["counted"], project.scale.device)
    title_and_scale(figure, f"{spec.number}: {spec.title}", project.scale.scale)
    figure.tight_layout()
    rows = [[tensor, *lifetimes] for tensor, lifetimes in LIFETIMES.items()]
    for what in (*COUNTED, *MEASURED):
        values = (found.get((method, what)) for method in METHODS)
        rows.append([f"{what} (MiB)", *(NOT_RUN if v is None else f"{v / MIB:.6g}" for v in values)])
    numbers = pd.DataFrame(rows, columns=["tensor", *METHODS])
    said = proxies_of(project, spec.table, [c.cell for c in results.column(options["counted"])]) if found else ()
    samples = exhibit_contents(project, spec.table, records).samples
    shown = {(row, options[column]) for row in options["rows"].values() for column in ("counted", "measured")}
    return Drawing(figure, numbers, {key: s for key, s in samples.items() if key in shown}, labels=tuple(said))


def bytes_of(results: Results, options: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Method and what the panel shows -> bytes, of the first seed; what no record has is left out."""
    found = {}
    for method, row in options["rows"].items():
        for column, wanted in ((options["counted"], COUNTED), (options["measured"], MEASURED)):
            for record in results.cells[row, column].usable[:1]:
                there = {what: record.metrics.get(metric) for what, metric in wanted.items()}
                found |= {(method, what): value for what, value in there.items() if value is not None}
    return found


def _lifetimes(axis: Axes) -> None:
    from matplotlib.patches import Rectangle

    colors = dict(zip((RUN, UPDATE, BACKWARD, BLOCK, LAYER), (palette()[i] for i in (3, 1, 8, 9, 0)), strict=True))
    for y, (tensor, lifetimes) in enumerate(LIFETIMES.items()):
        axis.text(-0.05, y + 0.5, tensor, ha="right", va="center", fontsize=8.5)
        for x, lifetime in enumerate(lifetimes):
            if lifetime in colors:
                face = (*colors[lifetime], 0.55)
                axis.add_patch(Rectangle((x + 0.04, y + 0.08), 0.92, 0.84, facecolor=face, edgecolor="0.3"))
            axis.text(x + 0.5, y + 0.5, lifetime, ha="center", va="center", fontsize=7.5)
    for x, method in enumerate(METHODS):
        axis.text(x + 0.5, -0.25, f"({'abcd'[x]}) {method}", ha="center", va="bottom", fontsize=9, weight="bold")
    axis.set(xlim=(-1.2, len(METHODS)), ylim=(len(LIFETIMES), -0.9))
    axis.set_axis_off()


def _bars(axis: Axes, found: Mapping[tuple[str, str], float], title: str, device: str) -> None:
    """A group a method, a bar for each of what is known; `device`: what the scale's jobs run on."""
    shown = [what for what in (*COUNTED, *MEASURED) if any(what == one for _, one in found)]
    methods = [method for method in METHODS if any(method == one for one, _ in found)]
    for place, what in enumerate(shown):
        bars = [(x, found[method, what] / MIB) for x, method in enumerate(methods) if (method, what) in found]
        at = [x + (place - (len(shown) - 1) / 2) * 0.8 / len(shown) for x, _ in bars]
        axis.bar(at, [value for _, value in bars], 0.8 / len(shown), label=what, color=palette()[place])
    if not shown:
        axis.text(0.5, 0.5, "no training has a record yet", ha="center", va="center", transform=axis.transAxes)
        axis.set_axis_off()
        return
    why = f"measured peaks: {NOT_RUN}" if device == "gpu" else "peaks are measured on a GPU"
    missing = "" if any(what in MEASURED for what in shown) else f"; {why}"
    axis.set_xticks(range(len(methods)), methods)
    axis.set(ylabel="MiB", ylim=(0, 1.6 * max(found.values()) / MIB))  # room for the legend
    axis.set_title(f"{title.rpartition(' ')[0]}{missing}", fontsize=9)
    axis.legend(fontsize=8, ncols=2)
