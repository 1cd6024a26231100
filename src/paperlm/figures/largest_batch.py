"""Figure 1 of Cut Cross-Entropy: memory of each model at the largest batch that fits the cluster.

Stacked bars of weights with gradients and optimizer, activation checkpoints and log-probabilities, in GiB over all
cards, annotated with the batch in millions of tokens. Two panels: the paper's bytes for an element of the checkpoint,
and 16, with a float32 copy of the weights and float32 moments. Numbers: paperlm.cost.memory, the table's constants.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from paperlm.cost.memory import GIB, activations_per_token, logits_per_token, quantities
from paperlm.figures.base import Drawing
from paperlm.figures.options import FigureOptions, options_of
from paperlm.figures.style import legend_below
from paperlm.plan.project import Project
from paperlm.tables.arithmetic import table_setup

PARTS = {
    "state": "weights, gradients, optimizer",
    "activations": "activation checkpoints",
    "logits": "log-probabilities",
}
MASTER_COPY = 16
"Bytes of weight and gradient in 16 bit, and of weight and two moments in 32 bit."


class Options(FigureOptions):
    """Which of the table's two batches."""

    drawn_from: ClassVar[str] = "arithmetic"
    logits: bool
    "whether the log-probabilities are stored"


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """Bars of every model whose size is known."""
    import matplotlib.pyplot as plt
    import pandas as pd
    import seaborn as sns

    _, spec = project.figure(name)
    logits = options_of(project, name)["logits"]
    frame = pd.DataFrame(numbers(project, spec.table, logits))
    panels = list(frame["state_bytes"].unique())
    models = list(frame["model"].unique())
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 0.27 * len(models) + 1.5), sharey=True)
    colors = dict(zip(PARTS, sns.color_palette("colorblind", len(PARTS)), strict=True))
    for axis, state_bytes in zip(axes, panels, strict=True):
        panel = frame[frame["state_bytes"] == state_bytes]
        left = 0.0
        for part, label in PARTS.items():
            axis.barh(panel["model"], panel[f"{part}_gib"], left=left, color=colors[part], label=label, height=0.72)
            left = left + panel[f"{part}_gib"].to_numpy()
        for y, (total, tokens) in enumerate(zip(left, panel["tokens"], strict=True)):
            axis.text(total + 12, y, f"{tokens / 1e6:.2f}M" if tokens else "does not fit", va="center", fontsize=7)
        axis.set(title=f"{state_bytes} bytes an element", xlabel="GiB on all cards", xlim=(0, 1.14 * max(left)))
        axis.margins(y=0.01)
        axis.grid(visible=False, axis="y")
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    shown = len(PARTS) if logits else len(PARTS) - 1
    figure.suptitle(f"{spec.number}: {spec.title} (tokens beside the bars)")
    legend_below(figure, handles[:shown], labels[:shown])
    return Drawing(figure, frame)


def numbers(project: Project, table_name: str, logits: bool) -> list[dict[str, object]]:
    """A row per model and panel: the largest batch in tokens and the GiB of each part at it."""
    paper, table = project.table(table_name)
    rows = []
    for state_bytes in (table_setup(paper, table_name).state_bytes, MASTER_COPY):
        setup = table_setup(paper, table_name, state_bytes=state_bytes)
        for model_name in table.models:
            model = paper.models[model_name]
            found = quantities(model, setup)
            tokens = found["before" if logits else "after"]
            if tokens is None:
                continue
            rows.append(
                {
                    "model": model_name,
                    "state_bytes": state_bytes,
                    "tokens": round(tokens),
                    "state_gib": found["state"] / GIB,
                    "activations_gib": tokens * activations_per_token(model, setup) / GIB,
                    "logits_gib": tokens * logits_per_token(model, setup) / GIB if logits else 0.0,
                }
            )
    return rows
