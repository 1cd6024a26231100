"""How figures look: one colour per method in every figure, dashes that tell coinciding lines apart, a legend inside."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from paperlm.plan.project import Project

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = (
    "post_ln", "deep_norm", "pre_ln", "mix_ln", "layernorm_scaling", "sandwich_ln", "admin", "group_ln", "layer_scale",
    "scaled_init", "scaled_embed",
)  # fmt: skip
"Norm methods in the order of the palette; one that is not here takes a colour by its name."
SHADE = 0.8
"What is left of a colour's strength in each further row of the same norm: the fifth is still seen on white."
MARKERS = ("o", "^", "s", "x", "D", "v", "+", "*")
"Marks of the second, third, ... row of the same norm, for neighbouring shades look alike and dashes come again."
COLUMN = (3.5, 2.7)
"Inches of a page with one panel, without its legend: about a column of a paper, so that its text is not made smaller."
SPACING = 0.12
"Between two marks of a line, as a share of the panel's diagonal."
DASHES = ("-", (0, (4, 2)), (0, (1, 2)), (0, (6, 2, 1, 2)))


def palette() -> list[tuple[float, float, float]]:
    """Ten colours that stay apart whatever kind of colour vision, and near-black."""
    import seaborn as sns

    return [*sns.color_palette("colorblind", 10), (0.15, 0.15, 0.15)]


def method_color(norm: str) -> tuple[float, float, float]:
    """The colour of a norm method; grey without one."""
    if not norm:
        return (0.55, 0.55, 0.55)
    colors = palette()
    return colors[(METHODS.index(norm) if norm in METHODS else sum(map(ord, norm))) % len(colors)]


def row_styles(project: Project, name: str, of: Literal["row", "column"] = "row") -> dict[str, dict[str, Any]]:
    """Colour and dashes of each row of an exhibit of jobs, or of each of its columns.

    Where rows differ in their norm they have its colour, the same in every figure; further rows of one norm have
    lighter shades of it and marks of their own. Where all have the same norm they have a colour by their place. Dashes
    alternate by place, so that lines which coincide stay visible, without colour too.
    """
    colors = palette()
    found: dict[str, set[str]] = {}
    for cell in project.cells(name):
        if cell.jobs:
            found.setdefault(getattr(cell, of), set()).add(norm_of(cell.jobs[0]))
    norms = {row: ", ".join(sorted(names)) for row, names in found.items()}
    one_each = all(len(names) == 1 for names in found.values())
    by_norm = one_each and (len(set(norms.values())) > 1 or len(norms) == 1)
    styles, before = {}, Counter()
    for index, ((row, norm), dash) in enumerate(zip(norms.items(), itertools.cycle(DASHES), strict=False)):
        full = method_color(norm or row) if by_norm else colors[index % len(colors)]
        white = 1 - SHADE ** before[norm] if by_norm else 0.0
        color = tuple(part + (1 - part) * white for part in full)
        styles[row] = {"color": color, "linestyle": dash}
        if by_norm and before[norm]:
            styles[row] |= marks(before[norm])
        before[norm] += 1
    return styles


def marks(place: int) -> dict[str, Any]:
    """Marks of a further row of the same norm, counted from 1: they start where those of the others do not, so that of
    lines which coincide each shows its own."""
    marker = MARKERS[(place - 1) % len(MARKERS)]
    start = SPACING * (place * 0.618 % 1)  # the golden section keeps any number of them apart
    return {"marker": marker, "markersize": 4, "markevery": (start, SPACING)}


def norm_of(job: Any) -> str:
    """Name of the norm method that a job, or the job it works on, was trained with; empty where none is known."""
    own = getattr(job, "norm", None)
    if own is not None:
        return own["name"]
    return next((norm_of(parent) for parent in job.parents().values()), "")


def title_and_scale(figure: Figure, text: str, scale: str = "") -> None:
    """What a figure shows, and in its corner the scale that its numbers are of."""
    figure.suptitle(text, fontsize=10)
    if scale:
        figure.text(0.995, 0.995, f"scale {scale}", ha="right", va="bottom", fontsize=7.5, color="0.35")


def legend_below(figure: Figure, handles: Iterable[Any], labels: Iterable[str], grow: bool = False) -> None:
    """A legend under the panels that fits the page: as many columns as its width has room for. With `grow` the page is
    made higher for it and for further lines of the title, so that neither takes from the panel."""
    handles, labels = list(handles), list(labels)
    widest = max((len(label) for label in labels), default=1)
    columns = max(1, min(len(labels), int(figure.get_figwidth() * 13 / (widest + 6))))
    rows = -(-len(labels) // columns)
    inches = 0.19 * rows + 0.09
    if grow:
        figure.set_figheight(figure.get_figheight() + inches + 0.17 * figure.get_suptitle().count("\n"))
    figure.tight_layout(pad=0.6 if grow else 1.08, rect=(0, inches / figure.get_figheight(), 1, 1))
    look = {"ncols": columns, "frameon": False, "fontsize": 8, "borderaxespad": 0.1}
    # A place in the figure's own coordinates: without one the legend moves to the edge of the enlarged page of notes.
    figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, 0.0), **look)
