"""Training curves behind a table of runs: a panel for each column and a line for each row; of a table with a single row
one panel, with a line for each column."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from pathlib import Path

from paperlm.errors import SpecError
from paperlm.figures.base import labels_of, write_picture
from paperlm.figures.style import COLUMN, legend_below, row_styles, title_and_scale
from paperlm.files import write_atomic
from paperlm.plan.project import Project
from paperlm.result import UNIGRAM
from paperlm.tables.jobs import incomparable
from paperlm.tables.results import Results, collect, seed_of
from paperlm.tables.vocabulary import NOT_RUN

PANEL_WIDTH = 30
"Letters that a line below a panel has room for."

ACROSS = 3
"Panels beside each other: more of them are too narrow to read on a page."


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
    # a column of another scale has no cells
    missing = [c for c in table.columns if (cells := results.column(c)) and not any(cell.records for cell in cells)]
    line_of = "column" if len({cell.row for cell in project.cells(table_name) if cell.jobs}) == 1 else "row"
    styles = row_styles(project, table_name, line_of)
    methods = list(styles)
    panels = {column: frame[frame["column"] == column] for column in shown}
    if line_of == "column":
        panels = {row: frame[frame["row"] == row] for row in frame["row"].unique()}
    across, down = max(1, min(ACROSS, len(panels))), max(1, -(-len(panels) // ACROSS))
    sns.set_theme(style="whitegrid", context="paper")
    plt.rcParams["svg.hashsalt"] = table_name  # the same numbers give the same file
    size = COLUMN if len(panels) < 2 else (2.2 * across + 0.4, 2.4 * down + 1.4)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for place, (axis, (heading, panel)) in enumerate(zip(axes.flat, panels.items(), strict=False)):
        lines_of = panel[panel["kind"] == "train"]
        for name in methods:
            # A line a seed: one that diverged and one that trained have no common mean.
            for _, seed in lines_of[lines_of[line_of] == name].groupby("seed"):
                axis.plot(seed[counted], seed["value"], linewidth=1.0, **styles[name])
        behind = [cell for column in panel["column"].unique() for cell in results.column(column)]
        plateaus = {record.metrics.get(UNIGRAM) for cell in behind for record in cell.records} - {None}
        for plateau in plateaus:
            axis.axhline(math.log(plateau), color="0.4", linestyle=":", linewidth=1)
        absent = textwrap.wrap(without_record(results, heading), PANEL_WIDTH) if line_of == "row" else []
        axis.set(title=panel_heading(results, heading), ylabel="" if place % across else "training loss (nats)")
        axis.set_xlabel("\n".join([f"training {counted}", *absent] if place + across >= len(panels) else absent))
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    if not shown:
        axes[0][0].text(0.5, 0.5, "no run has a record yet", ha="center", va="center")
        axes[0][0].set_axis_off()
    else:
        lines = [plt.Line2D([], [], label=m, **styles[m]) for m in methods if (frame[line_of] == m).any()]
        if plateaus:
            lines.append(plt.Line2D([], [], color="0.4", linestyle=":", label="unigram plateau"))
    note = f"({NOT_RUN}: {', '.join(missing)})" if missing and shown else ""
    title = f"{table.number}, training curves: {table.title}"
    lines_of_title = [part for text in (title, note) for part in textwrap.wrap(text, int(figure.get_figwidth() * 13))]
    title_and_scale(figure, "\n".join(lines_of_title), project.scale.scale)
    if shown:
        legend_below(figure, lines, [line.get_label() for line in lines], grow=len(panels) < 2)
    departures = [f"{d.what}: {d.why}" for d in project.deviations(table_name)]
    known = [*incomparable(project, table_name), *labels_of(project, table_name, records), *departures]
    write_picture(figure, known, out)
    plt.close(figure)


def panel_heading(results: Results, name: str) -> str:
    """A panel's row or column; in a table of models of one size that size, where the name says another thing, such as
    the number that the table has in place of the loss that is drawn."""
    sizes = {cell.cell.size for cell in results.cells.values() if cell.cell.jobs}
    size = sizes.pop() if len(sizes) == 1 else ""
    return f"size {size}" if size and size not in name else name


def without_record(results: Results, column: str) -> str:
    """`not run: ...` of the rows of a panel that have no record; empty where all have one."""
    cells = [(row, cell) for (row, c), cell in results.cells.items() if c == column and cell.cell.jobs]
    names = ", ".join(row for row, cell in cells if not cell.records)
    return f"{NOT_RUN}: {names}" if names else ""
