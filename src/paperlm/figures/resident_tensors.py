"""Which tensors of a linear layer lie in memory, and for how long (NeuZip, Figure 2).

What the layers of paperlm_kernels.stored and its descent within the backward pass keep; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from paperlm.figures.base import Drawing
from paperlm.figures.options import FigureOptions
from paperlm.figures.style import palette
from paperlm.plan.project import Project

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


class Options(FigureOptions):
    """None."""

    drawn_from: ClassVar[str] = ""


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """A table in colours. It has no statistics: a claim about what is written here would hold whatever was run."""
    import matplotlib.pyplot as plt
    import pandas as pd

    _, spec = project.figure(name)
    colors = dict(zip((RUN, UPDATE, BACKWARD, BLOCK, LAYER), (palette()[i] for i in (3, 1, 8, 9, 0)), strict=True))
    figure, axis = plt.subplots(figsize=(7.2, 2.9))
    for y, (tensor, lifetimes) in enumerate(LIFETIMES.items()):
        axis.text(-0.05, y + 0.5, tensor, ha="right", va="center", fontsize=8)
        for x, lifetime in enumerate(lifetimes):
            if lifetime in colors:
                face = (*colors[lifetime], 0.55)
                axis.add_patch(plt.Rectangle((x + 0.04, y + 0.08), 0.92, 0.84, facecolor=face, edgecolor="0.3"))
            axis.text(x + 0.5, y + 0.5, lifetime, ha="center", va="center", fontsize=7)
    for x, method in enumerate(METHODS):
        axis.text(x + 0.5, -0.25, f"({'abcd'[x]}) {method}", ha="center", va="bottom", fontsize=9, weight="bold")
    axis.set(xlim=(-1.5, len(METHODS)), ylim=(len(LIFETIMES), -0.9))
    axis.set_axis_off()
    figure.suptitle(f"{spec.number}: {spec.title}", fontsize=10)
    figure.tight_layout()
    rows = [[tensor, *lifetimes] for tensor, lifetimes in LIFETIMES.items()]
    return Drawing(figure, pd.DataFrame(rows, columns=["tensor", *METHODS]))
