"""A quantity of a table of measurements over the size of its cases, a panel each quantity (NeuZip, Figure 4)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from paperlm.figures.base import Drawing
from paperlm.figures.options import FigureOptions, options_of
from paperlm.figures.style import DASHES, palette, title_and_scale
from paperlm.plan.measured import places
from paperlm.plan.project import Project
from paperlm.tables.build import table_contents
from paperlm.tables.contents import Contents
from paperlm.tables.measurements import Rows
from paperlm.tables.vocabulary import EARLIER_RULES


class Options(FigureOptions):
    """Which panels. The table's cases are tensors of so many weights."""

    drawn_from: ClassVar[str] = "measurements"
    panels: dict[str, str] = Field(min_length=1)
    "title -> column of the table"
    y: str
    "what the y axis says"

    def names_columns(self) -> Mapping[str, str]:
        return {f"panels.{title}": column for title, column in self.panels.items()}


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """A line for each row of the table over the bytes of the tensor, both axes by powers of ten, broken at sizes that
    this scale asks for and that were not measured. Claims read the table's columns as they are."""
    import matplotlib.pyplot as plt
    import pandas as pd

    paper, spec = project.figure(name)
    _, table = project.table(spec.table)
    options, records = options_of(project, name), list(records)
    panels = options["panels"]
    measured = [
        (title, *point)
        for title, column in panels.items()
        for point in points(project, name, records)
        if point[0].column == column
    ]
    found = pd.DataFrame(
        [
            [title, place.row.removeprefix(f"{paper.cases[place.case].model}: "), *rest]
            for title, place, *rest in measured
        ],
        columns=["panel", "row", "bytes", options["y"], "device", "run"],
    )
    case_of = pd.Series([place.case for _, place, *_ in measured], dtype=object)
    styles = dict(zip(table.rows, zip(itertools.cycle(palette()), itertools.cycle(DASHES), strict=False), strict=False))
    asked = [*dict.fromkeys(place.case for place in places(project, spec.table) if place.measured)]
    figure, axes = plt.subplots(1, len(panels), figsize=(3.7 * len(panels) + 0.4, 3.4), squeeze=False, sharey=True)
    for axis, title in zip(axes[0], panels, strict=True):
        here = found[found["panel"] == title]
        for row, points_of_row in here.groupby("row", sort=False):
            color, dash = styles[row]
            # a place for each case that is asked for, so that a line is broken where nothing was measured
            curve = points_of_row.set_index(case_of[points_of_row.index]).reindex(asked)
            axis.plot(
                curve["bytes"], curve[options["y"]], color=color, linestyle=dash, marker="o", markersize=3, label=row
            )
        if here.empty:
            axis.text(0.5, 0.5, "nothing has been measured yet", ha="center", va="center", transform=axis.transAxes)
        else:
            axis.set(xscale="log", yscale="log")
        axis.set(title=title, xlabel="bytes of the matrix", ylabel=options["y"] if axis is axes[0][0] else "")
    handles = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if handles:
        columns = min(4, len(handles))
        figure.legend(
            handles.values(), handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=columns, fontsize=8
        )
    devices = ", ".join(dict.fromkeys(found["device"]))
    title_and_scale(figure, f"{spec.number}: {spec.title}" + (f" ({devices})" if devices else ""), project.scale.scale)
    figure.tight_layout()
    contents = table_contents(project, spec.table, records)
    untested = contents.untested if not found.empty else "nothing has been measured"
    labels = several_runs(zip(found["run"], found["row"], strict=True)) + of_earlier_rules(contents, panels.values())
    return Drawing(figure, found, contents.samples, untested, one_sample=contents.one_sample, labels=labels)


def several_runs(points: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Of (run, row) of points: which rows are of which run, as one label; none if all are of one."""
    rows: dict[str, dict[str, None]] = {}
    for run, row in points:
        rows.setdefault(run, {})[row] = None
    if len(rows) < 2:
        return ()
    said = "; ".join(f"{run} ({', '.join(map(repr, names))})" for run, names in rows.items())
    return (f"of {len(rows)} runs, maybe on several machines, the column `run` says which point: {said}",)


def of_earlier_rules(contents: Contents, columns: Iterable[str]) -> tuple[str, ...]:
    """A label for each row of the table whose numbers in these columns are of earlier rules."""
    drawn = {*columns}
    found = [cell for key, cell in contents.cells.items() if key in contents.drifted_cells and cell.column in drawn]
    said = [f"{c.row}: {part}" for c in found for part in c.labels.split("; ") if part.startswith(EARLIER_RULES)]
    return tuple(dict.fromkeys(said))


def points(project: Project, name: str, records: Iterable[Path]) -> Iterable[tuple]:
    """(place, bytes of the tensor, mean over seeds, device, run) of each cell that was measured."""
    paper, spec = project.figure(name)
    _, table = project.table(spec.table)
    rows = Rows(records, paper, table, project.scale.benchmarks)
    for place in places(project, spec.table):
        measured = rows.of(place)
        if measured.values and "weights" in measured.shape:
            size = measured.shape["weights"] * paper.cases[place.case].element_bytes
            yield place, size, statistics.fmean(measured.values), measured.rows[-1]["device"], measured.run
