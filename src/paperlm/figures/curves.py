"""Training curves behind a table of runs: one panel per column, one line per row."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

from paperlm.files import write_atomic
from paperlm.plan.project import Project
from paperlm.tables.results import collect


def draw_curves(project: Project, table_name: str, records: Iterable[Path], out: Path) -> None:
    """Write the figure (SVG) and its numbers (CSV, same stem). Cells without a record are left out and named."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import pandas as pd
    import seaborn as sns

    _, table = project.table(table_name)
    results = collect(project, table_name, records)
    columns = ["row", "column", "scale", "seed", "kind", "update", "tokens", "value"]
    rows = []
    for (row, column), cell in results.cells.items():
        for record in cell.records:
            for kind, points in record.curve.items():
                for update, tokens, value, *_ in points:
                    rows.append([row, column, project.scale.scale, record.run.seed, kind, update, tokens, value])
    frame = pd.DataFrame(rows, columns=columns)
    text = frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    write_atomic(out.with_suffix(".csv"), lambda file: file.write(text.encode()))

    shown = [c for c in table.columns if (frame["column"] == c).any()]
    methods = list(dict.fromkeys(row for (row, _), cell in results.cells.items() if not cell.cell.label))
    sns.set_theme(style="whitegrid", context="paper")
    plt.rcParams["svg.hashsalt"] = table_name  # the same numbers give the same file
    figure, axes = plt.subplots(1, max(1, len(shown)), figsize=(3.4 * max(1, len(shown)), 3.1), squeeze=False)
    palette = dict(zip(methods, sns.color_palette("colorblind", len(methods)), strict=True))
    for axis, column in zip(axes[0], shown, strict=False):
        panel = frame[(frame["column"] == column) & (frame["kind"] == "train")]
        sns.lineplot(
            panel, x="tokens", y="value", hue="row", hue_order=methods, palette=palette, ax=axis, legend=False,
            errorbar=None, linewidth=1.1,
        )  # fmt: skip
        plateaus = {r.metrics["unigram_perplexity"] for c in results.column(column) for r in c.records}
        for plateau in plateaus:
            axis.axhline(_log(plateau), color="0.4", linestyle=":", linewidth=1)
        axis.set(title=column, xlabel="training tokens", ylabel="training loss (nats)" if axis is axes[0][0] else "")
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    if not shown:
        axes[0][0].text(0.5, 0.5, "no run has a record yet", ha="center", va="center")
        axes[0][0].set_axis_off()
    else:
        lines = [plt.Line2D([], [], color=palette[m], label=m) for m in methods]
        lines.append(plt.Line2D([], [], color="0.4", linestyle=":", label="unigram plateau"))
        figure.legend(handles=lines, loc="lower center", ncols=len(lines), frameon=False)
    missing = [c for c in table.columns if c not in shown]
    note = f" (not run: {', '.join(missing)})" if missing and shown else ""
    figure.suptitle(f"{table_name}, scale {project.scale.scale}{note}")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    image = io.BytesIO()
    figure.savefig(image, format="svg", metadata={"Date": None})
    plt.close(figure)
    write_atomic(out, lambda file: file.write(image.getvalue()))


def _log(value: float) -> float:
    import math

    return math.log(value)
