"""Two columns of a table against each other, a panel each pair, the Pareto-optimal rows on a line (NeuZip, Figures 3
and 9). The lower left is better, or the upper left."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from pydantic import Field

from paperlm.figures.base import Drawing, exhibit_contents
from paperlm.figures.options import FigureOptions, options_of
from paperlm.figures.style import palette, title_and_scale
from paperlm.frozen import Frozen
from paperlm.plan.project import Project

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Box = tuple[float, float, float, float]
"Left, lower, right and upper edge."


class Pair(Frozen):
    """Columns of the table on the two axes."""

    x: str
    y: str


class Options(FigureOptions):
    """Which panels."""

    drawn_from: ClassVar[str] = "jobs"
    panels: dict[str, Pair] = Field(min_length=1)
    "title -> its columns"
    x: str
    y: str
    "what the axes say"
    better: Literal["lower", "higher"] = "lower"
    "which numbers on the y axis are; on the x axis lower ones are"
    groups: dict[str, str] = {}
    "how a row's label begins -> name of its colour in the legend"

    def names_columns(self) -> Mapping[str, str]:
        return {f"panels.{title}.{axis}": getattr(p, axis) for title, p in self.panels.items() for axis in ("x", "y")}


class Point(NamedTuple):
    """A row of the table in a panel."""

    row: str
    x: float
    y: float


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """Means of the table's cells. Claims read its columns as they are."""
    import matplotlib.pyplot as plt
    import pandas as pd

    _, spec = project.figure(name)
    options = options_of(project, name)
    contents = exhibit_contents(project, spec.table, list(records))
    panels, groups = options["panels"], options["groups"]
    colors = dict(zip(groups.values(), palette(), strict=False))
    figure, axes = plt.subplots(1, len(panels), figsize=(3.0 * len(panels) + 0.4, 3.0), squeeze=False)
    rows = []
    for axis, (title, pair) in zip(axes[0], panels.items(), strict=True):
        points = points_of(contents.samples, pair["x"], pair["y"])
        best = frontier(points, options["better"])
        axis.plot([p.x for p in best], [p.y for p in best], color="0.6", linewidth=0.9, zorder=1)
        for p in points:
            group = next((called for begin, called in groups.items() if p.row.startswith(begin)), "")
            marker = "o" if p in best else "x"
            axis.scatter(p.x, p.y, color=colors.get(group, (0.3,) * 3), marker=marker, s=26)
            rows.append([title, p.row, p.x, p.y, p in best])
        if not points:
            axis.text(0.5, 0.5, "no row has been measured yet", ha="center", va="center", transform=axis.transAxes)
            axis.set(xticks=[], yticks=[])
        axis.set(title=title, xlabel=options["x"], ylabel=options["y"] if axis is axes[0][0] else "")
    title_and_scale(figure, f"{spec.number}: {spec.title}", project.scale.scale)
    figure.tight_layout()
    for axis, pair in zip(axes[0], panels.values(), strict=True):
        _name(axis, points_of(contents.samples, pair["x"], pair["y"]))
    numbers = pd.DataFrame(rows, columns=["panel", "row", options["x"], options["y"], "pareto_optimal"])
    untested = "" if rows else "no row of its table has been measured"
    return Drawing(figure, numbers, contents.samples, untested, labels=tuple(dict.fromkeys(_labels(contents))))


LETTER, LINE = 2.9, 6.5
"Width and height of a letter of a name in the picture, in points of 1/72 inch."


def _name(axis: Axes, points: list[Point]) -> None:
    """Write each point's name beside it, in the panel, at the first of some places that lies on no other name."""
    to_points = 72 / axis.figure.dpi
    panel = [to_points * edge for edge in axis.get_window_extent().extents]
    at = {p: to_points * axis.transData.transform((p.x, p.y)) for p in points}
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in at.values()]
    for p in sorted(points, key=lambda p: (p.y, p.x)):
        x, y = at[p]
        width = LETTER * len(p.row)
        places = [
            (dx, dy)
            for dy in (3, -LINE - 3, 11, -LINE - 11, 19, -LINE - 19, 27, -LINE - 27)
            for dx in (4, -width - 4, -width / 2)
        ]
        boxes = [(x + dx, y + dy, x + dx + width, y + dy + LINE) for dx, dy in places]
        inside = [b for b in boxes if panel[0] <= b[0] and b[2] <= panel[2] and panel[1] <= b[1] and b[3] <= panel[3]]
        box = min(inside or boxes, key=lambda b: sum(_cross(b, other) for other in taken))
        taken.append(box)
        moved = (box[0] - x, box[1] - y)
        line = {"arrowstyle": "-", "color": "0.7", "linewidth": 0.4} if abs(moved[1]) > LINE + 4 else None
        axis.annotate(p.row, (p.x, p.y), xytext=moved, textcoords="offset points", fontsize=5.5, arrowprops=line)


def _cross(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def points_of(samples: Mapping, x: str, y: str) -> list[Point]:
    """Rows that have finite numbers in both columns. Means are the table's: of the seeds that trained, or of all if
    none did."""
    rows = dict.fromkeys(row for row, _ in samples)
    alike = {key: sample.ended(False) or sample.ended(True) for key, sample in samples.items()}
    means = {key: statistics.fmean(values.values()) for key, values in alike.items()}
    found = [Point(row, means.get((row, x), math.nan), means.get((row, y), math.nan)) for row in rows]
    return [point for point in found if math.isfinite(point.x) and math.isfinite(point.y)]


def frontier(points: Iterable[Point], better: Literal["lower", "higher"] = "lower") -> list[Point]:
    """Those that no other one beats on one axis without being worse on the other; by x. `better`: which y are."""
    sign = 1 if better == "lower" else -1
    at = {point: (point.x, sign * point.y) for point in sorted(points, key=lambda p: (p.x, p.y))}
    # of two equal ones both stay
    return [
        point for point, (x, y) in at.items() if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in at.values())
    ]


def _labels(contents) -> Iterable[str]:
    return (label for row in contents.diff for label in row.labels.split("; ") if label)
