"""`paperlm figure`: a figure of a paper file as .svg and .png, its numbers as .csv; if it has claims, the statistics
that they read as .diff.csv and the verdicts as .claims.csv."""

from __future__ import annotations

import importlib
import io
import itertools
import statistics
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paperlm.errors import SpecError, unknown
from paperlm.figures import KINDS
from paperlm.files import write_atomic
from paperlm.spec.project import Project
from paperlm.tables.build import sibling, write_claims, write_diff
from paperlm.tables.claims import CellSamples
from paperlm.tables.compare import DiffRow, proxy_of
from paperlm.tables.contents import NOT_PRINTED, Contents, Key
from paperlm.tables.verdicts import claim_rows

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

DPI = 160


@dataclass(frozen=True)
class Drawing:
    """A drawn figure, its numbers, and what its claims read."""

    figure: Figure
    numbers: pd.DataFrame
    samples: Mapping[Key, CellSamples] = field(default_factory=dict)
    untested: str = ""
    "why no claim can be judged; empty: they are judged"


def row_styles(rows: list[str]) -> dict[str, dict[str, Any]]:
    """Colour and dashes of each row's curve: those that coincide stay visible, without colour too."""
    import seaborn as sns

    dashes = itertools.cycle(["-", (0, (4, 2)), (0, (1, 2)), (0, (6, 2, 1, 2))])
    colors = sns.color_palette("colorblind", len(rows))
    return {row: {"color": c, "linestyle": d} for row, c, d in zip(rows, colors, dashes, strict=False)}


def write_figure(project: Project, name: str, records: Iterable[Path], out: Path) -> None:
    """Draw a figure and write its files beside `out` (SVG). Raises SpecError and RecordError."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns

    _, spec = project.figure(name)
    module, _, function = KINDS[spec.kind].partition(":")
    draw = getattr(importlib.import_module(module), function)
    sns.set_theme(style="whitegrid", context="paper")
    plt.rcParams["svg.hashsalt"] = name  # the same numbers give the same file
    drawing: Drawing = draw(project, name, records)
    _write_notes(drawing.figure, notes(project, name))
    for suffix, metadata in ((".svg", {"Date": None}), (".png", {"Software": None})):
        image = io.BytesIO()
        drawing.figure.savefig(image, format=suffix[1:], metadata=metadata, dpi=DPI, bbox_inches="tight")
        _write(out.with_suffix(suffix), image.getvalue())
    plt.close(drawing.figure)
    text = drawing.numbers.to_csv(index=False, float_format="%.8g", lineterminator="\n")
    _write(out.with_suffix(".csv"), text.encode())
    if spec.claims:
        contents = Contents(
            diff=statistics_rows(project, name, drawing), samples=drawing.samples, untested=drawing.untested
        )
        write_diff(sibling(out.with_suffix(".csv"), "diff"), contents.diff)
        write_claims(sibling(out.with_suffix(".csv"), "claims"), claim_rows(project, name, contents))


def statistics_rows(project: Project, name: str, drawing: Drawing) -> list[DiffRow]:
    """A row for each statistic that claims read: its mean over seeds, beside what the paper's text says of it.

    Raises SpecError for words about another statistic.
    """
    _, spec = project.figure(name)
    columns = {column for _, column in drawing.samples}
    for column in spec.in_words:
        if columns and column not in columns:
            raise SpecError(f"figures.{name}.in_words: {unknown('statistic', column, columns)}")
    table = project.table(spec.table)[1] if spec.table else None
    sizes = {column.size for column in table.columns.values()} if table and table.kind == "runs" else set()
    labels = "; ".join(sorted(filter(None, (proxy_of(project, size) for size in sizes))))
    rows = []
    for (row, column), sample in drawing.samples.items():
        mean, several = statistics.fmean(sample.values), len(set(sample.values)) > 1
        said = spec.in_words.get(column)
        reason = f"in the text: {said}" if said else "the paper prints no number of this"
        rows.append(DiffRow(
            table=name, row=row, column=column, scale=project.scale.scale, published="", regenerated=f"{mean:.4g}",
            metric=column, judged_on=f"{mean:.8g}", spread=f"{statistics.stdev(sample.values):.4g}" if several else "",
            seeds=len(sample.values), verdict="see claims" if said else NOT_PRINTED, reason=reason,
            labels=labels,
        ))  # fmt: skip
    return rows


def notes(project: Project, name: str) -> list[str]:
    """What is printed under a figure: its notes, and what is done differently from the paper."""
    _, spec = project.figure(name)
    return [*spec.notes, *(f"{d.what}: {d.why}" for d in project.deviations(name))]


def _write_notes(figure: Figure, lines: list[str]) -> None:
    """Below everything else that is drawn."""
    text = "\n".join(textwrap.fill(line, int(figure.get_figwidth() * 17)) for line in lines)
    figure.draw_without_rendering()  # places the legend
    bottom = figure.get_tightbbox().y0 / figure.get_figheight()
    figure.text(0.01, bottom - 0.015, text, ha="left", va="top", fontsize=7.5, color="0.35")


def _write(path: Path, content: bytes) -> None:
    write_atomic(path, lambda file: file.write(content))
