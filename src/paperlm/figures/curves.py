"""Training curves behind a table of runs: one panel per column, one line per row."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from pathlib import Path

from paperlm.errors import SpecError
from paperlm.figures.base import labels_of, write_picture
from paperlm.figures.style import legend_below, row_styles
from paperlm.files import write_atomic
from paperlm.plan.project import Project
from paperlm.result import UNIGRAM
from paperlm.tables.jobs import incomparable
from paperlm.tables.results import Results, collect, seed_of
from paperlm.tables.vocabulary import NOT_RUN

PANEL_WIDTH = 44
"Letters that a line below a panel has room for."


def draw_curves(project: Project, table_name: str, records: Iterable[Path], out: Path) -> None:
    """Write the figure as SVG and PNG, its numbers as CSV and what has to be known about it as .notes.txt, all of one
    stem. Cells without a record are left out and named, below their panel or, of whole columns, in the title."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import pandas as pd
    import seaborn as sns

    _, table = project.table(table_name)
    records = list(records)
    if not any(job.has_curve for job in project.jobs_of(table_name)):
        raise SpecError(f"{table_name}: none of its jobs has a training curve")
    results = collect(project, table_name, records)
    rows, counted, seen = [], "tokens", set()
    for (row, column), cell in results.cells.items():
        for record in cell.records:
            # another kind of job has no curve; columns of the same runs, such as loss and memory, one between them
            if "train" not in record.series or (row, record.job_id) in seen:
                continue
            seen.add((row, record.job_id))
            counted = record.series["train"].columns[1]
            for kind in ("train", "eval"):
                for update, count, value, *_ in record.series[kind].rows:
                    rows.append([row, column, project.scale.scale, seed_of(record.job), kind, update, count, value])
    columns = ["row", "column", "scale", "seed", "kind", "update", counted, "value"]
    frame = pd.DataFrame(rows, columns=columns)
    text = frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    write_atomic(out.with_suffix(".csv"), lambda file: file.write(text.encode()))

    shown = [c for c in table.columns if (frame["column"] == c).any()]
    styles = row_styles(project, table_name)
    methods = list(styles)
    sns.set_theme(style="whitegrid", context="paper")
    plt.rcParams["svg.hashsalt"] = table_name  # the same numbers give the same file
    figure, axes = plt.subplots(1, max(1, len(shown)), figsize=(max(5.2, 3.4 * len(shown)), 3.4), squeeze=False)
    for axis, column in zip(axes[0], shown, strict=False):
        panel = frame[(frame["column"] == column) & (frame["kind"] == "train")]
        for row in methods:
            # A line a seed: one that diverged and one that trained have no common mean.
            for _, seed in panel[panel["row"] == row].groupby("seed"):
                axis.plot(seed[counted], seed["value"], linewidth=1.0, **styles[row])
        plateaus = {r.metrics.get(UNIGRAM) for cell in results.column(column) for r in cell.records} - {None}
        for plateau in plateaus:
            axis.axhline(math.log(plateau), color="0.4", linestyle=":", linewidth=1)
        below = [f"training {counted}", *textwrap.wrap(without_record(results, column), PANEL_WIDTH)]
        axis.set(title=column, xlabel="\n".join(below), ylabel="training loss (nats)" if axis is axes[0][0] else "")
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    if not shown:
        axes[0][0].text(0.5, 0.5, "no run has a record yet", ha="center", va="center")
        axes[0][0].set_axis_off()
    else:
        lines = [plt.Line2D([], [], label=m, **styles[m]) for m in methods if (frame["row"] == m).any()]
        if plateaus:
            lines.append(plt.Line2D([], [], color="0.4", linestyle=":", label="unigram plateau"))
    missing = [c for c in table.columns if not any(cell.records for cell in results.column(c))]
    note = f" ({NOT_RUN}: {', '.join(missing)})" if missing and shown else ""
    figure.suptitle(f"{table_name}, scale {project.scale.scale}{note}")
    if shown:
        legend_below(figure, lines, [line.get_label() for line in lines])
    write_picture(figure, [*incomparable(project, table_name), *labels_of(project, table_name, records)], out)
    plt.close(figure)


def without_record(results: Results, column: str) -> str:
    """`not run: ...` of the rows of a panel that have no record; empty where all have one."""
    cells = [(row, cell) for (row, c), cell in results.cells.items() if c == column and cell.cell.jobs]
    names = ", ".join(row for row, cell in cells if not cell.records)
    return f"{NOT_RUN}: {names}" if names else ""
