"""A block of each model with the quantizers that stand in front of its projections (BitNet a4.8, Figure 1).

Drawn from the presets that models are built with (paperlm.quantizers.presets).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from paperlm.errors import unknown
from paperlm.figures.base import Drawing
from paperlm.figures.boxes import UNIT, arrow, sub_layer
from paperlm.figures.options import FigureOptions, options_of
from paperlm.figures.style import palette
from paperlm.plan.project import Project
from paperlm.quantizers.presets import PRESETS
from paperlm.tables.claims import CellSamples

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMN, GAP, STEP, SIDE = 4.6, 0.5, 0.75, 1.95
"Width of a column, between columns, from box to box, and how far left of the sub-layers the residual runs."
BOX = 3.1
READS = {"qkv": "Q, K, V", "o": "output", "gate_up": "gate, up", "down": "down"}
"Place of a quantizer -> projections that read it."
ACT = {"silu": "up * Swish(gate)", "relu2": "up * ReLU(gate)²"}


def _preset(name: str) -> str:
    if name not in PRESETS:
        raise ValueError(unknown("preset", name, PRESETS))
    return name


class Options(FigureOptions):
    """Whose blocks are drawn."""

    drawn_from: ClassVar[str] = ""
    models: dict[str, Annotated[str, AfterValidator(_preset)]] = Field(min_length=1)
    "title of a panel -> preset"


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """A panel a model; the numbers are each projection's weights, quantizer, bits and share of entries that stay, of
    which claims read the last two."""
    import matplotlib.pyplot as plt
    import pandas as pd

    _, spec = project.figure(name)
    models = options_of(project, name)["models"]
    rows = [[title, *row] for title, preset in models.items() for row in projections(preset)]
    columns = ["panel", "projections", "weights", "quantizer", "bits", "keep"]
    figure, axis = plt.subplots()
    top = 0.0
    for index, (title, preset) in enumerate(models.items()):
        x = (COLUMN + GAP) * index + COLUMN * 0.58
        top = max(top, _block(axis, x, PRESETS[preset]))
        axis.text(x, -1.1, title, ha="center", va="top", fontsize=10, weight="bold")
    width = (COLUMN + GAP) * len(models) - GAP
    axis.set(xlim=(0, width), ylim=(-1.8, top + 0.2), aspect="equal")
    figure.set_size_inches(UNIT * width + 0.2, UNIT * (top + 2.0) + 0.6)
    axis.set_axis_off()
    figure.suptitle(f"{spec.number}: {spec.title}", fontsize=10)
    figure.tight_layout()
    samples = {}
    for title, reads, _, _, bits, keep in rows:
        samples[title, f"Bits of {reads}"] = CellSamples((float(bits),))
        samples[title, f"Share Kept of {reads}"] = CellSamples((float(keep),))
    return Drawing(figure, pd.DataFrame(rows, columns=columns), samples)


def projections(preset: str) -> list[list[Any]]:
    """Of each place: its projections, their weights, quantizer of the input, its bits, share of entries that stay."""
    quantization = PRESETS[preset]["quantization"] or {}
    weights = (quantization.get("weight") or {"name": "16 bits"})["name"]
    rows = []
    for place, reads in READS.items():
        described = quantization.get(place)
        name, bits = (described["name"], bits_of(described["name"])) if described else ("none", 16)
        rows.append([reads, weights, name, bits, (described or {}).get("keep", 1.0)])
    return rows


def bits_of(quantizer: str) -> int:
    """Bits of a number by its quantizer's name: int8_absmax has 8, fp4_e2m1 has 4."""
    return int("".join(c for c in quantizer.partition("_")[0] if c.isdigit()))


def written(described: dict[str, Any] | None) -> list[str]:
    """A quantizer of an input as the boxes say it: INT4 absmean; TopK 50 % and INT8 absmax."""
    if described is None:
        return []
    kind, _, way = described["name"].partition("_")
    way = way.upper() if kind.startswith("fp") else way
    twice = " x 2" if described.get("multiple", 1) == 2 else ""
    share = [f"TopK {100 * described['keep']:g} %"] if "keep" in described else []
    return [*share, f"{kind.upper()} {way}{twice}"]


def _block(axis: Axes, x: float, preset: dict[str, Any]) -> float:
    """Both sub-layers from the bottom; returns where the stream leaves."""
    quantization = preset["quantization"] or {}
    sub_norm = [("norm", "norm")] if preset["sub_norm"] else []
    y = 0.0
    axis.plot([x, x], [-0.6, y], color="0.2", linewidth=0.9)
    for entering, inner, leaving in (("qkv", "attention", "o"), ("gate_up", ACT[preset["hidden_act"]], "down")):
        boxes = [("norm", "norm"), *_projection(quantization, entering), (inner, "plain"), *sub_norm]
        boxes += _projection(quantization, leaving)
        y = sub_layer(axis, x, y, [(text, *_colours(look)) for text, look in boxes], STEP, SIDE, BOX)
        axis.plot([x, x], [y, y + 0.25], color="0.2", linewidth=0.9)
        y += 0.25
    arrow(axis, (x, y), (x, y + 0.35))
    return y + 0.35


def _projection(quantization: dict[str, Any], place: str) -> list[tuple[str, str]]:
    """Boxes of a quantizer, if there is one, and of the projections behind it."""
    described = quantization.get(place)
    weights = "ternary" if quantization.get("weight") else "16 bits"
    look = str(bits_of(described["name"])) if described else ""
    found = [(text, look) for text in written(described)]
    return [*found, (f"{READS[place]}: {weights}", "ternary" if quantization.get("weight") else "plain")]


def _colours(look: str) -> tuple[Any, Any]:
    """Face and edge: a norm, a plain module, ternary weights, or a quantizer of so many bits."""
    colors = palette()
    if look == "plain":
        return "0.9", "0.3"
    index = {"norm": 0, "ternary": 2, "8": 1, "4": 3}[look]
    return (*colors[index], 0.25 if look == "ternary" else 0.5), colors[index]
