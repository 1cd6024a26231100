"""Blocks of normalization methods, drawn from the wiring that models are built with (Mix-LN Figure 1, LNS Figure 3).

Blocks of one structure share a column; what changes from block to block is written as its formula or its range.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from paperlm.errors import SpecError
from paperlm.figures.base import Drawing
from paperlm.figures.boxes import UNIT, arrow, box, sub_layer
from paperlm.figures.options import FigureOptions, options_of
from paperlm.figures.style import method_color
from paperlm.norms import ModelShape, NormMethod, Wiring, build_method
from paperlm.norms.base import Learned
from paperlm.plan.project import Project

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Group = list[tuple[int, Wiring]]
"Blocks of one structure that follow each other: number and wiring."
COLUMN, GAP = 3.8, 0.6
"Width of a column, and what is left free between panels."
STEP = 0.8
"Height from one box to the next."
SIDE = 1.45
"How far left of the sub-layers the residual runs."


def _can_be_built(norm: dict[str, Any]) -> dict[str, Any]:
    try:
        build_method(norm)
    except SpecError as error:
        raise ValueError(str(error)) from None
    return norm


class Options(FigureOptions):
    """Whose blocks are drawn."""

    drawn_from: ClassVar[str] = ""
    layers: int = Field(gt=0)
    "blocks of the model"
    methods: dict[str, Annotated[dict[str, Any], AfterValidator(_can_be_built)]] = Field(min_length=1)
    "title of a panel -> norm method"


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """A panel a method; the numbers are every block's norms and factors c, r and s (paperlm.norms.base)."""
    import matplotlib.pyplot as plt
    import pandas as pd

    _, spec = project.figure(name)
    options = options_of(project, name)
    layers = options["layers"]
    panels = {title: build_method(norm) for title, norm in options["methods"].items()}
    groups = {title: structures(method, layers) for title, method in panels.items()}
    rows = [
        [title, number, w.pre, w.post, w.out, *map(written, (w.pre_scale, w.residual_scale, w.branch_scale))]
        for title, found in groups.items()
        for group in found
        for number, w in group
    ]
    frame = pd.DataFrame(rows, columns=["panel", "block", "norm_before", "norm_behind", "norm_of_sum", "c", "r", "s"])
    figure, axis = plt.subplots()
    x, top = 0.0, 0.0
    for title, found in groups.items():
        centers = [x + COLUMN * (index + 0.5) + 0.2 for index in range(len(found))]
        color = method_color(panels[title].name)
        heights = [_column(axis, center, group, layers, color) for center, group in zip(centers, found, strict=True)]
        for left, right, height in zip(centers, centers[1:], heights, strict=False):
            _carry_over(axis, left, height, right)
        top = max(top, *heights)
        axis.text(sum(centers) / len(centers), -1.75, title, ha="center", va="top", fontsize=10, weight="bold")
        x += COLUMN * len(found) + GAP
    width, height = x - GAP, top + 2.6
    axis.set(xlim=(0, width), ylim=(-2.4, top + 0.2), aspect="equal")
    figure.set_size_inches(UNIT * width + 0.2, UNIT * height + 0.6)
    axis.set_axis_off()
    figure.suptitle(f"{spec.number}: {spec.title}", fontsize=10)
    figure.tight_layout()
    return Drawing(figure, frame)


def structures(method: NormMethod, layers: int) -> list[Group]:
    """Blocks of a model of so many, those that have the same norms together. SpecError for a depth it refuses."""
    shape = ModelShape(hidden_size=64 * layers, intermediate_size=176 * layers, n_layers=layers)
    method.check(shape)
    if not method.in_equation:
        raise SpecError(f"{method.name} has residual sums of its own, which no diagram here shows: leave it out")
    blocks = [(number, method.wiring(number, shape)) for number in range(1, layers + 1)]
    return [list(group) for _, group in itertools.groupby(blocks, lambda b: (b[1].pre, b[1].post, b[1].out))]


def written(factor: float | Learned) -> str:
    """A factor of one block: its number, or that it is trained and from where."""
    return f"trained from {factor.init:g}" if isinstance(factor, Learned) else f"{factor:.6g}"


def formula(numbers: Sequence[int], factors: Sequence[float | Learned]) -> str:
    """A factor of several blocks as the drawing says it; empty where it is 1 in all of them."""
    if any(isinstance(factor, Learned) for factor in factors):
        return ", ".join(dict.fromkeys(map(written, factors)))
    if all(factor == 1 for factor in factors):
        return ""
    if all(abs(factor - number**-0.5) < 1e-9 for number, factor in zip(numbers, factors, strict=True)):
        return r"$1/\sqrt{\ell}$"
    low, high = min(factors), max(factors)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _column(axis: Axes, x: float, group: Group, layers: int, color: Any) -> float:
    """Both sub-layers of the group's blocks, from the bottom; returns where the stream leaves."""
    numbers = [number for number, _ in group]
    wiring = group[0][1]
    c, r, s = (formula(numbers, [getattr(w, key) for _, w in group]) for key in FACTORS)
    y = 0.0
    axis.plot([x, x], [-0.75, y], color="0.2", linewidth=0.9)
    for layer in ("attention", "feed-forward"):
        boxes = [("norm", True)] * wiring.pre + [(f"× {c}", False)] * bool(c) + [(layer, None)]
        boxes += [("norm", True)] * wiring.post + [(f"× {s}", False)] * bool(s)
        start = y
        y = sub_layer(axis, x, y, [(text, *_colours(is_norm, color)) for text, is_norm in boxes], STEP, SIDE)
        if r:
            place = {"ha": "center", "va": "bottom", "rotation": 90, "fontsize": 7.5}
            axis.text(x - SIDE - 0.12, (start + y - 0.2) / 2, f"× {r}", **place)
        if wiring.out:
            arrow(axis, (x, y), (x, y + 0.25))
            box(axis, x, y + 0.25, "norm", *_colours(True, color))
            y += 0.75
        axis.plot([x, x], [y, y + 0.25], color="0.2", linewidth=0.9)
        y += 0.25
    arrow(axis, (x, y), (x, y + 0.35))
    whole = len(numbers) == layers
    label = f"each of {layers} blocks" if whole else f"blocks {numbers[0]} to {numbers[-1]}"
    axis.text(x, -0.95, label, ha="center", va="top", fontsize=8.5)
    return y + 0.35


FACTORS = ("pre_scale", "residual_scale", "branch_scale")


def _colours(is_norm: bool | None, color: Any) -> tuple[Any, Any]:
    """Face and edge of a norm (in the method's colour), a factor (its outline), or a sub-layer (grey)."""
    face = "0.9" if is_norm is None else (*color, 0.55) if is_norm else "white"
    return face, "0.3" if is_norm is None else color


def _carry_over(axis: Axes, left: float, height: float, right: float) -> None:
    """From the top of one column of blocks to the bottom of the next."""
    middle = (left + right) / 2 - 0.15
    axis.plot(
        [left, middle, middle, right], [height, height, -0.75, -0.75], color="0.2", linewidth=0.9, linestyle=(0, (3, 2))
    )
