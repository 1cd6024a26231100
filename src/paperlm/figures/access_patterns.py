"""Figure 2 of Cut Cross-Entropy: which blocks of E, C and the outputs a program of each kernel touches.

One panel a kernel, the published scheme above, ours below. The plane of logits (tokens down, vocabulary across) is
never stored; coloured blocks are what one program reads, writes, or updates in turn with others. The numbers, from
paperlm.cost.access, are how often each element is read and written, and the bytes of these requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from paperlm.cost.access import OURS, PUBLISHED, READ, UPDATE, WRITE, accesses
from paperlm.cost.memory import MIB
from paperlm.figures.base import Drawing
from paperlm.figures.options import FigureOptions, options_of
from paperlm.plan.project import Project

if TYPE_CHECKING:
    from matplotlib.axes import Axes

N, V, D = 8, 12, 4
"Blocks in the drawing: of tokens, of the vocabulary, of the width."
ROW, COLUMN = 3, 7
"The tile of the drawn program."
REGISTERS = "in registers"
MODES = {
    READ: "read",
    WRITE: "written once",
    UPDATE: "updated in turn with other programs",
    REGISTERS: "in registers only",
}


class Options(FigureOptions):
    """The shape that the numbers are for."""

    drawn_from: ClassVar[str] = ""
    tokens: int = Field(gt=0)
    vocab: int = Field(gt=0)
    width: int = Field(gt=0)
    alive: float = Field(ge=0, le=1)
    "share of the tiles that the filter keeps"


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """Six panels and the accesses behind them."""
    import matplotlib.pyplot as plt
    import pandas as pd

    _, spec = project.figure(name)
    rows = accesses(**options_of(project, name))
    frame = pd.DataFrame(
        {
            "scheme": a.scheme, "kernel": a.kernel, "tensor": a.tensor, "access": a.mode, "block": a.block,
            "times_each_element": a.factor, "mib": a.bytes / MIB,
        }
        for a in rows
    )  # fmt: skip
    figure, axes = plt.subplots(2, 3, figsize=(11.5, 7.2))
    for axis, panel in zip(axes.flat, PANELS, strict=True):
        _panel(axis, panel)
    for axis, scheme in zip(axes[:, 0], (PUBLISHED, OURS), strict=True):
        axis.text(-0.12, 0.5, scheme, transform=axis.transAxes, rotation=90, va="center", fontsize=12, weight="bold")
    handles = [plt.Rectangle((0, 0), 1, 1, **_style(mode), label=label) for mode, label in MODES.items()]
    handles.append(plt.Rectangle((0, 0), 1, 1, facecolor="0.86", edgecolor="none", label="tile that the filter keeps"))
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.05), "ncols": len(handles), "frameon": False}
    figure.legend(handles=handles, fontsize=8.5, **place)
    figure.suptitle(f"{spec.number}: {spec.title}", y=0.99)
    figure.tight_layout(rect=(0.02, 0.05, 1, 1), h_pad=1.5)
    return Drawing(figure, frame)


@dataclass(frozen=True)
class Block:
    """A rectangle of blocks in one tensor of a panel."""

    tensor: str
    mode: str
    rows: tuple[float, float]
    columns: tuple[float, float]


@dataclass(frozen=True)
class Panel:
    """One kernel: the tensors that are shown, what a program touches in them, and a line below."""

    title: str
    caption: str
    tensors: tuple[str, ...]
    blocks: tuple[Block, ...]
    plane: str = "logits: never stored"
    filtered: bool = False


# Corner (x, y) and size of each tensor in the drawing; y points down.
PLACES: dict[str, tuple[float, float, float, float]] = {
    "E": (-D - 0.7, 0, D, N),
    "C^T": (0, -D - 0.7, V, D),
    "logits": (0, 0, V, N),
    "LSE": (V + 0.7, 0, 0.7, N),
    "target logit": (V + 2.4, 0, 0.7, N),
    "dE": (V + 2.1, 0, D, N),
    "dC^T": (0, N + 0.7, V, D),
    "mean logit": (0, N + 0.7, V, 0.7),
    "maxima": (0, N + 0.7, V, N * 0.28),
}
LABELS = {"C^T": "$C^T$", "dC^T": "$dC^T$", "maxima": "maxima, a byte each"}
VECTORS = ("LSE", "target logit")


def _alive(row: int, column: int) -> bool:
    """The drawing's filter: frequent ids everywhere, and each row block's targets. About a quarter of the tiles."""
    return column < 2 or column == (5 * row + 4) % V


def _row(mode: str, tensor: str = "E") -> Block:
    return Block(tensor, mode, (ROW, ROW + 1), (0, D))


def _across(mode: str, tensor: str = "C^T", width: float = 1) -> Block:
    return Block(tensor, mode, (0, D), (COLUMN, COLUMN + width))


def _vector(tensor: str, mode: str, rows: float = 1) -> Block:
    return Block(tensor, mode, (ROW, ROW + rows), (0, 0.7))


TILE = Block("logits", REGISTERS, (ROW, ROW + 1), (COLUMN, COLUMN + 1))
GATHERED = tuple(Block("C^T", READ, (1, 2), (c, c + 0.22)) for c in (0.3, 1.5, 4.2, COLUMN + 0.4, 10.6))
PANELS = (
    Panel(
        "(a) target logit",
        "gathers C at the targets; a piece of D a program,\nadded up by atomics",
        ("E", "C^T", "logits", "target logit"),
        (Block("E", READ, (ROW, ROW + 1), (1, 2)), *GATHERED, _vector("target logit", UPDATE)),
    ),
    Panel(
        "(b) log-sum-exp",
        "a tile of 256 x 128 a program; LSE under a lock,\nmean logits by atomics",
        ("E", "C^T", "logits", "LSE", "mean logit"),
        (
            Block("E", READ, (ROW - 1, ROW + 1), (0, D)),
            _across(READ),
            Block("logits", REGISTERS, (ROW - 1, ROW + 1), (COLUMN, COLUMN + 1)),
            Block("LSE", UPDATE, (ROW - 1, ROW + 1), (0, 0.7)),
            Block("mean logit", UPDATE, (0, 0.6), (COLUMN, COLUMN + 1)),
        ),
    ),
    Panel(
        "(c) backward",
        "recomputes every tile, then tests it; alive ones are\nadded to dE and dC under locks, rounded each time",
        ("E", "dE", "C^T", "dC^T", "logits", "LSE"),
        (_row(READ), _across(READ), TILE, _vector("LSE", READ), _row(UPDATE, "dE"), _across(UPDATE, "dC^T")),
        filtered=True,
    ),
    Panel(
        "(a + b) forward",
        "a program has a strip of the vocabulary: running LSE in registers,\ntarget logit and byte maxima by the way",
        ("E", "C^T", "logits", "LSE", "target logit", "maxima"),
        (
            _row(READ),
            Block("C^T", READ, (0, D), (0, V / 2)),
            Block("logits", REGISTERS, (ROW, ROW + 1), (0, V / 2)),
            _vector("LSE", WRITE),
            _vector("target logit", WRITE),
            Block("maxima", WRITE, (ROW * 0.28, ROW * 0.28 + 0.28), (0, V / 2)),
        ),
    ),
    Panel(
        "(c) gradient of alive tiles",
        "alive tiles are known from the bytes and listed; only they are\nrecomputed, and their q is stored once",
        ("E", "C^T", "logits", "LSE", "maxima"),
        (
            _row(READ),
            *(Block("C^T", READ, (0, D), (c, c + 1)) for c in range(V) if _alive(ROW, c)),
            *(Block("logits", WRITE, (ROW, ROW + 1), (c, c + 1)) for c in range(V) if _alive(ROW, c)),
            _vector("LSE", READ),
        ),
        plane="q: alive tiles, in scratch",
        filtered=True,
    ),
    Panel(
        "(d) products",
        "each piece of dE and dC has one owner, which adds its alive\ntiles in float32 registers and rounds once",
        ("E", "dE", "C^T", "dC^T", "logits"),
        (
            *(Block("logits", READ, (ROW, ROW + 1), (c, c + 1)) for c in range(V) if _alive(ROW, c)),
            *(Block("C^T", READ, (1, 2), (c, c + 1)) for c in range(V) if _alive(ROW, c)),
            Block("dE", WRITE, (ROW, ROW + 1), (1, 2)),
            *(Block("logits", READ, (r, r + 1), (0, 1)) for r in range(N) if r != ROW),
            Block("E", READ, (0, N), (2, 3)),
            Block("dC^T", WRITE, (2, 3), (0, 1)),
        ),
        plane="q: alive tiles, in scratch",
        filtered=True,
    ),
)


def _style(mode: str) -> dict[str, object]:
    """Colour and, so that it reads without colour, hatching of a mode."""
    import seaborn as sns

    palette = sns.color_palette("colorblind")
    styles: dict[str, tuple[object, str]] = {
        READ: (palette[0], ""),
        WRITE: (palette[2], "////"),
        UPDATE: (palette[3], "xxxx"),
        REGISTERS: (palette[1], "..."),
    }
    color, hatch = styles[mode]
    return {"facecolor": (*color, 0.55), "edgecolor": color, "hatch": hatch, "linewidth": 0.8}


def _panel(axis: Axes, panel: Panel) -> None:
    rectangle = _rectangles(axis)
    for tensor in panel.tensors:
        x, y, width, height = PLACES[tensor]
        if tensor == "logits":
            for row, column in itertools.product(range(N), range(V)):
                if panel.filtered and _alive(row, column):
                    rectangle(x + column, y + row, 1, 1, facecolor="0.86", edgecolor="none")
            rectangle(x, y, width, height, facecolor="none", linewidth=0.9, linestyle="--", edgecolor="0.55")
            axis.text(
                x + width - 0.15, y + height - 0.12, panel.plane, ha="right", va="bottom", fontsize=7.5, color="0.3"
            )
            continue
        rectangle(x, y, width, height, facecolor="none", linewidth=0.9, edgecolor="0.25")
        if tensor in VECTORS:
            axis.text(x + width / 2, y - 0.2, tensor, ha="center", va="bottom", fontsize=7.5, rotation=90)
        elif height < 1:
            axis.text(x + width, y + height, tensor, ha="right", va="top", fontsize=7.5, color="0.3")
        else:
            label = LABELS.get(tensor, tensor)
            axis.text(x + width - 0.15, y + height - 0.12, label, ha="right", va="bottom", fontsize=8, color="0.3")
    for block in panel.blocks:
        x, y, _, _ = PLACES[block.tensor]
        (top, bottom), (left, right) = block.rows, block.columns
        rectangle(x + left, y + top, right - left, bottom - top, **_style(block.mode))
    axis.set_xlim(-D - 1, V + D + 2.5)
    axis.set_ylim(N + D + 1, -D - 1)
    axis.set_aspect("equal")
    axis.set_axis_off()
    axis.set_title(panel.title, fontsize=10)
    axis.text(0.5, -0.02, panel.caption, transform=axis.transAxes, ha="center", va="top", fontsize=8)


def _rectangles(axis: Axes) -> Callable[..., None]:
    import matplotlib.pyplot as plt

    def rectangle(x: float, y: float, width: float, height: float, **style: object) -> None:
        axis.add_patch(plt.Rectangle((x, y), width, height, **style))

    return rectangle
