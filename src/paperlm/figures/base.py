"""`paperlm figure`: a figure of a paper file as .svg and .png, its numbers as .csv, what has to be known about it as
.notes.txt; if it has claims, the statistics that they read as .diff.csv and the verdicts as .claims.csv."""

from __future__ import annotations

import io
import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paperlm.errors import SpecError, unknown
from paperlm.figures import figure_kinds
from paperlm.figures.style import title_and_scale
from paperlm.files import write_atomic
from paperlm.plan.project import Project
from paperlm.tables.build import sibling, table_contents, write_claims, write_diff
from paperlm.tables.claims import CellSamples
from paperlm.tables.contents import ITEMS_ONLY, Contents, DiffRow, Key
from paperlm.tables.jobs import PROXY, incomparable, labels, proxies, proxies_of
from paperlm.tables.results import CellResult, Results, collect
from paperlm.tables.verdicts import claim_rows
from paperlm.tables.vocabulary import NOT_PRINTED, NOT_RUN, SEE_CLAIMS

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
    one_sample: str = ITEMS_ONLY
    "what a verdict says that rests on one seed"
    labels: tuple[str, ...] = ()
    "what has to stand beside its numbers: a proxy, earlier rules, seeds without a record"


def drawing_of(project: Project, name: str, records: list[Path]) -> Drawing:
    """A figure in the house's style, not written. Raises SpecError and RecordError."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns

    sns.set_theme(style="whitegrid", context="paper")
    plt.rcParams["svg.hashsalt"] = name  # the same numbers give the same file
    return figure_kinds()[project.figure(name)[1].draw](project, name, records)


def write_figure(project: Project, name: str, records: Iterable[Path], out: Path) -> None:
    """Draw a figure and write its files beside `out` (SVG). Raises SpecError and RecordError."""
    records = list(records)
    drawing = drawing_of(project, name, records)
    write_picture(drawing.figure, notes(project, name, drawing), out)
    _close(drawing)
    numbers = drawing.numbers
    if proxies_among(drawing.labels):
        rows = numbers["row"] if "row" in numbers else [""] * len(numbers)
        said = {row: proxies_among(_labels_of_row(project, name, drawing, row)) for row in dict.fromkeys(rows)}
        numbers = numbers.assign(proxies=[said[row] for row in rows])
    text = numbers.to_csv(index=False, float_format="%.8g", lineterminator="\n")
    _write(out.with_suffix(".csv"), text.encode())
    if project.figure(name)[1].claims:
        contents = _contents(project, name, drawing)
        claims = claim_rows(project, name, contents, lambda other: exhibit_contents(project, other, records))
        write_diff(sibling(out.with_suffix(".csv"), "diff"), contents.diff)
        write_claims(sibling(out.with_suffix(".csv"), "claims"), claims)


def exhibit_contents(project: Project, name: str, records: Iterable[Path]) -> Contents:
    """What claims read of a table or of a figure, which is drawn for it. Raises SpecError and RecordError."""
    if name in project.tables:
        return table_contents(project, name, records)
    drawing = drawing_of(project, name, list(records))
    _close(drawing)
    return _contents(project, name, drawing)


def _contents(project: Project, name: str, drawing: Drawing) -> Contents:
    diff = statistics_rows(project, name, drawing)
    return Contents(diff=diff, samples=drawing.samples, untested=drawing.untested, one_sample=drawing.one_sample)


def _close(drawing: Drawing) -> None:
    import matplotlib.pyplot as plt

    plt.close(drawing.figure)


def write_picture(figure: Figure, lines: list[str], out: Path) -> None:
    """SVG, PNG and .notes.txt of a drawn figure; `lines` are what has to be known about it."""
    _write_notes(figure, lines)
    _write(out.with_suffix(".notes.txt"), "".join(f"{line}\n" for line in lines).encode())
    for suffix, metadata in ((".svg", {"Date": None}), (".png", {"Software": None})):
        image = io.BytesIO()
        figure.savefig(image, format=suffix[1:], metadata=metadata, dpi=DPI, bbox_inches="tight")
        _write(out.with_suffix(suffix), image.getvalue())


def labels_of(project: Project, name: str, records: Iterable[Path]) -> tuple[str, ...]:
    """Models whose training collapsed, proxies, and labels of the records behind a figure of jobs: the picture has room
    for the first."""
    cells = [(row, cell) for (row, _), cell in collect(project, name, records).cells.items() if cell.records]
    if name in project.tables:  # columns are models there; in a figure they are states of one
        cells = [(", ".join(filter(None, (row, cell.cell.column))), cell) for row, cell in cells]
    collapsed = [f"{row}: {said}" for row, cell in cells if (said := cell.collapsed)]
    found = [f"{row}: {label}" for row, cell in cells for label in labels(cell)]
    return tuple(dict.fromkeys([*collapsed, *proxies(project, name), *found]))


def headline(figure: Figure, project: Project, name: str, results: Results, about: str = "") -> None:
    """The title of a figure of jobs; under it what was run (`about`), and which rows are not in the picture."""
    _, spec = project.figure(name)
    lines = [f"{spec.number}: {spec.title}", about, absent(results)]
    width = int(figure.get_figwidth() * 13)
    title_and_scale(
        figure, "\n".join(part for line in lines for part in textwrap.wrap(line, width)), project.scale.scale
    )


def absent(results: Results) -> str:
    """Rows without a number, by the reason: `not run: A, B; blocked: C`. Empty where no row has one, which the panel
    says."""
    rows: dict[str, list[CellResult]] = {}
    for (row, _), cell in results.cells.items():
        rows.setdefault(row, []).append(cell)
    left_out = {row: cells for row, cells in rows.items() if not any(cell.usable for cell in cells)}
    if len(left_out) == len(rows):
        return ""
    reasons: dict[str, list[str]] = {}
    for row, cells in left_out.items():
        outcomes = {record.outcome.replace("_", " ") for cell in cells for record in cell.records}
        reasons.setdefault(" or ".join(sorted(outcomes)) or NOT_RUN, []).append(row)
    return "; ".join(f"{reason}: {', '.join(names)}" for reason, names in reasons.items())


def statistics_rows(project: Project, name: str, drawing: Drawing) -> list[DiffRow]:
    """A row for each statistic that claims read: its mean over the seeds where it is finite, beside what the
    paper's text says of it.

    Raises SpecError for words about another statistic.
    """
    _, spec = project.figure(name)
    columns = {column for _, column in drawing.samples}
    for column in spec.in_words:
        if columns and column not in columns:
            raise SpecError(f"figures.{name}.in_words: {unknown('statistic', column, columns)}")
    rows, jobs = [], _jobs_by_row(project, name)
    for (row, column), sample in drawing.samples.items():
        finite = [value for value in sample.values if math.isfinite(value)]
        mean, several = statistics.fmean(finite or sample.values), len(set(finite)) > 1
        lost = len(sample.values) - len(finite)
        regenerated = f"{mean:.4g}" + (f" ({lost} of {len(sample.values)} not finite)" if finite and lost else "")
        said = spec.in_words.get(column)
        reason = f"in the text: {said}" if said else _printed_elsewhere(project, name, row, column)
        rows.append(DiffRow(
            table=name, row=row, column=column, scale=project.scale.scale, published="", regenerated=regenerated,
            metric=column, judged_on=f"{mean:.8g}", spread=f"{statistics.stdev(finite):.4g}" if several else "",
            seeds=len(sample.values), verdict=SEE_CLAIMS if said else NOT_PRINTED, reason=reason,
            labels="; ".join(_labels_of_row(project, name, drawing, row)),
            jobs=" ".join(jobs.get(row) or dict.fromkeys(job for of_row in jobs.values() for job in of_row)),
        ))  # fmt: skip
    return rows


def _printed_elsewhere(project: Project, name: str, row: str, column: str) -> str:
    """Why a number of a figure is compared with none: the paper prints it in a table, or not at all."""
    spec = project.figure(name)[1]
    if spec.table in project.tables:
        _, table = project.tables[spec.table]
        part = getattr(table, "columns", {}).get(column)
        if getattr(table, "published", False) and row in table.rows and part is not None and part.in_print:
            return f"the figure prints no number; {table.number} compares its own"
    return "the paper prints no number of this"


def _jobs_by_row(project: Project, name: str) -> dict[str, list[str]]:
    """Ids of the jobs of each row of a figure."""
    found: dict[str, list[str]] = {}
    for cell in project.cells(name):
        found.setdefault(cell.row, []).extend(job.job_id for job in cell.jobs)
    return found


def _labels_of_row(project: Project, name: str, drawing: Drawing, row: str) -> list[str]:
    """The figure's labels without those of other rows that stand there too, and without the proxies that other rows
    alone are made of; all of them where a row of the figure is no row of its jobs, such as a panel."""
    cells = project.cells(name)
    if row not in {cell.row for cell in cells}:
        return list(drawing.labels)
    others = {shown for shown, _ in drawing.samples}
    foreign = {*proxies(project, name)} - {*proxies_of(project, name, [cell for cell in cells if cell.row == row])}
    beginnings = tuple(f"{other}: " for other in others - {row})
    return [label for label in drawing.labels if label not in foreign and not label.startswith(beginnings)]


def notes(project: Project, name: str, drawing: Drawing) -> list[str]:
    """What has to be known about a figure: its scale, labels of its numbers, notes, departures."""
    _, spec = project.figure(name)
    departures = [f"{d.what}: {d.why}" for d in project.deviations(name)]
    return [*incomparable(project, name), *drawing.labels, *spec.notes, *departures]


def proxies_among(lines: Iterable[str]) -> str:
    """The proxies that are named among notes, in one line; empty where none is."""
    return "; ".join(line for line in lines if line.startswith(PROXY))


NOTES, LINES = 3, 3
"Notes in the picture, and lines that each may take; the rest stands in the report and beside the CSV."


def in_picture(lines: list[str], width: int) -> list[str]:
    """What of the notes a picture has room for, in lines of so many characters; and all proxies, as one note more: each
    panel may be of another."""
    every = proxies_among(lines)
    others = [line for line in lines if not line.startswith(PROXY)]
    room = NOTES - bool(every)
    shown = [textwrap.wrap(line, width, max_lines=LINES, placeholder=" ...") for line in others[:room]]
    shown.insert(1, textwrap.wrap(every, width))
    left = len(others) - room
    return [part for parts in shown for part in parts] + ([f"({left} more beside the CSV)"] if left > 0 else [])


def _write_notes(figure: Figure, lines: list[str]) -> None:
    """Below everything else that is drawn."""
    shown = in_picture(lines, int(figure.get_figwidth() * 17))
    figure.draw_without_rendering()  # places the legend
    bottom = figure.get_tightbbox().y0 / figure.get_figheight()
    figure.text(0.01, bottom - 0.015, "\n".join(shown), ha="left", va="top", fontsize=7.5, color="0.35")


def _write(path: Path, content: bytes) -> None:
    write_atomic(path, lambda file: file.write(content))
