"""Bars of a table of measurements: time over that of one matrix product, and memory over its lower bound.

Two panels a case, a bar for each row of the table that was measured; the printed numbers, of another card, are not
drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from paperlm.figures.base import Drawing
from paperlm.figures.options import FigureOptions, options_of
from paperlm.figures.style import title_and_scale
from paperlm.plan.project import Project
from paperlm.tables.build import table_contents
from paperlm.tables.contents import Contents

QUANTITIES = {
    "time": "time / time of one matrix product",
    "memory": "peak memory / lower bound",
}


class Options(FigureOptions):
    """Columns of the table, and its row of lower bounds."""

    drawn_from: ClassVar[str] = "measurements"
    time: str
    memory: str
    bound: str

    def names_rows(self) -> dict[str, str]:
        return {"bound": self.bound}

    def names_columns(self) -> dict[str, str]:
        return {"time": self.time, "memory": self.memory}


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """A row of panels for each case that has a measurement; a line of text if none has."""
    import matplotlib.pyplot as plt
    import pandas as pd
    import seaborn as sns

    _, spec = project.figure(name)
    contents, cases_of = table_contents(project, spec.table, records), project.table(spec.table)[1].cases
    columns = ["case", "row", "quantity", "value", "labels"]
    frame = pd.DataFrame(bars(project, name, contents), columns=columns)
    cases = list(frame["case"].unique())
    heights = [0.42 * frame[frame["case"] == case]["row"].nunique() + 0.9 for case in cases] or [1.2]
    figure, axes = plt.subplots(
        max(1, len(cases)), 2, figsize=(10, sum(heights) + 0.8), squeeze=False, height_ratios=heights
    )
    colors = dict(zip(QUANTITIES, sns.color_palette("colorblind", len(QUANTITIES)), strict=True))
    if not cases:
        for axis in axes[0]:
            axis.set_axis_off()
        axes[0][0].text(0.0, 0.5, f"nothing of {spec.table} has been measured at scale {project.scale.scale}")
    for line, case in zip(axes, cases, strict=False):
        here = frame[frame["case"] == case]
        order = list(here["row"].unique())
        for axis, (quantity, label) in zip(line, QUANTITIES.items(), strict=True):
            panel = here[here["quantity"] == quantity].set_index("row")["value"].reindex(order)
            axis.barh(order, panel.fillna(0.0), color=colors[quantity], height=0.7)
            for y, value in enumerate(panel):
                if value == value:
                    axis.text(value, y, f" {value:.{2 if value < 10 else 1}f}", va="center", fontsize=7.5)
            axis.axvline(1, color="0.35", linewidth=1)
            axis.set(xlabel=label, title=case if axis is line[0] else "")
            axis.margins(x=0.14, y=0.02)
            axis.grid(visible=False, axis="y")
            axis.invert_yaxis()
        makers = [contents.made_by.get(row if len(cases_of) == 1 else f"{case}: {row}", "") for row in order]
        line[0].set_yticks(range(len(order)), [f"{row}\n{maker}" for row, maker in zip(order, makers, strict=True)])
        line[1].set_yticklabels([])
    cards = ", ".join(dict.fromkeys(label.split(", ")[0] for label in frame["labels"]))
    title_and_scale(figure, f"{spec.number}: {spec.title}" + (f" ({cards})" if cards else ""), project.scale.scale)
    figure.tight_layout()
    drawn = frame["row"] if len(cases_of) == 1 else frame["case"] + ": " + frame["row"]
    said = dict.fromkeys(contents.proxies[place] for place in drawn if place in contents.proxies)
    return Drawing(figure, frame, labels=(*contents.notes, *said) if said else ())


def bars(project: Project, name: str, contents: Contents) -> list[list[object]]:
    """[case, row, quantity, value, how it was measured] of every bar, in the order of the table."""
    paper, spec = project.figure(name)
    options = options_of(project, name)
    _, table = project.table(spec.table)
    found = []
    for case in table.cases:
        model = paper.cases[case].model
        prefix = f"{model}: " if len(table.cases) > 1 else ""
        bound = contents.samples.get((prefix + options["bound"], options["memory"]))
        for row in table.rows:
            place = prefix + row
            values = {key: contents.samples.get((place, options[key])) for key in QUANTITIES}
            if row == options["bound"]:
                continue
            for key, sample in values.items():
                if sample is not None:
                    over = bound.values[0] if key == "memory" else 1.0
                    labels = contents.cells[place, options[key]].labels
                    found.append([model, row, key, sum(sample.values) / len(sample.values) / over, labels])
    return found
