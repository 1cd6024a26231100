"""Boxes, arrows and sums that diagrams of blocks are drawn of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNIT = 0.42
"Inches of a unit of the drawing; widths and heights are in units."
WIDTH = 2.1
"Of a box."


def box(axis: Axes, x: float, y: float, text: str, face: Any, edge: Any, width: float = WIDTH) -> None:
    """A rounded box of height 0.5 with its lower edge at y, centred at x."""
    from matplotlib.patches import FancyBboxPatch

    shape = {"boxstyle": "round,pad=0,rounding_size=0.08", "facecolor": face, "edgecolor": edge, "linewidth": 1.1}
    axis.add_patch(FancyBboxPatch((x - width / 2, y), width, 0.5, **shape))
    axis.text(x, y + 0.24, text, ha="center", va="center", fontsize=8)


def plus(axis: Axes, x: float, y: float) -> None:
    """A sum, centred at x, y."""
    from matplotlib.patches import Circle

    axis.add_patch(Circle((x, y), 0.2, facecolor="white", edgecolor="0.2", linewidth=1.0, zorder=3))
    axis.text(x, y - 0.01, "+", ha="center", va="center", fontsize=9)


def arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """A line with a head at its end."""
    style = {"arrowstyle": "-|>,head_length=0.25,head_width=0.12", "color": "0.2", "linewidth": 0.9}
    axis.annotate("", xy=end, xytext=start, arrowprops=style | {"shrinkA": 0, "shrinkB": 0})


def sub_layer(
    axis: Axes,
    x: float,
    start: float,
    boxes: Iterable[tuple[str, Any, Any]],
    step: float,
    side: float,
    width: float = WIDTH,
) -> float:
    """A branch of a residual stream from the height `start`: its boxes (text, face, edge) `step` apart, the stream that
    goes around them `side` to the left, and the sum of both. Returns the height above the sum."""
    y = start
    for text, face, edge in boxes:
        arrow(axis, (x, y - 0.05 if y > start else y), (x, y + 0.25))
        box(axis, x, y + 0.25, text, face, edge, width)
        y += step
    arrow(axis, (x, y - 0.05), (x, y + 0.2))
    y += 0.4
    plus(axis, x, y)
    axis.plot([x, x - side, x - side], [start, start, y], color="0.2", linewidth=0.9)
    arrow(axis, (x - side, y), (x - 0.2, y))
    return y + 0.2
