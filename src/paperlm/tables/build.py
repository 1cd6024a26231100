"""`paperlm table`: one table -> <table>.csv, <table>.diff.csv, <table>.claims.csv, <table>.notes.txt, and an HTML page
for the report."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from paperlm.files import write_atomic
from paperlm.plan.project import Project
from paperlm.tables import arithmetic, jobs, measurements, settings
from paperlm.tables.contents import Contents, DiffRow
from paperlm.tables.published import NOTHING, PublishedTable, read_published
from paperlm.tables.verdicts import CLAIM_COLUMNS, claim_rows

KINDS: dict[str, Callable[[Project, str, PublishedTable, Iterable[Path]], Contents]] = {
    "jobs": jobs.contents,
    "settings": settings.contents,
    "arithmetic": arithmetic.contents,
    "measurements": measurements.contents,
}
"Kind of a table -> the function that computes its contents from its declaration and record files."


def table_contents(project: Project, name: str, records: Iterable[Path]) -> Contents:
    """A table's cells and verdicts on them, not written. Raises RecordError and SpecError."""
    return KINDS[project.table(name)[1].kind](project, name, printed_table(project, name), records)


def printed_table(project: Project, name: str) -> PublishedTable:
    """The paper's table in the edition that is compared; without rows and columns if the paper prints none."""
    _, table = project.table(name)
    if not table.published:
        return NOTHING
    path = project.root / table.published
    printed = read_published(path, project.edition(name), table.label_columns, table.header_lines)
    return printed.without(getattr(table, "left_out", ()))


def write_table(
    project: Project,
    name: str,
    records: Iterable[Path],
    out: Path,
    html: Path | None = None,
    contents_of: Callable[[Project, str, Iterable[Path]], Contents] = table_contents,
) -> None:
    """Build a table from records and write its CSV files and notes. Raises RecordError and SpecError.

    `contents_of` gives the contents of other exhibits that its claims read; figures are beyond `table_contents`.
    """
    records = list(records)
    contents = table_contents(project, name, records)
    claims = claim_rows(project, name, contents, lambda other: contents_of(project, other, records))
    _write_csv(out, *_layout(contents, printed_table(project, name)))
    write_diff(sibling(out, "diff"), contents.diff)
    write_claims(sibling(out, "claims"), claims)
    lines = "".join(f"{line}\n" for line in notes(project, name))
    write_atomic(notes_beside(out), lambda file: file.write(lines.encode()))
    if html is not None:
        from paperlm.tables.html import write_page

        write_page(html / f"{name}.html", project, name, contents, claims)


def _layout(contents: Contents, printed: PublishedTable) -> tuple[list[list[str]], list[list[str]]]:
    """Heads and rows in the printed layout, with the scale in front."""
    width = len(printed.corners)
    empty = ("",) * len(printed.heads)
    heads = dict(zip(printed.columns, zip(*printed.heads, strict=True), strict=True)) if printed.columns else {}
    columns = [heads.get(column, (*empty[1:], column)) for column in contents.columns]
    lines = [["scale", *printed.corners, *(head[0] for head in columns)]]
    lines += [["", *[""] * width, *(head[i] for head in columns)] for i in range(1, len(empty))]
    cells = contents.cells
    rows = []
    for row in contents.rows:
        labels = printed.labels.get(row) or _labels_of_ours(row, width)
        values = [cells[row, column].regenerated for column in contents.columns]
        rows.append([contents.scale_of(row), *labels, *values])
    return lines, rows


def _labels_of_ours(row: str, width: int) -> list[str]:
    """Label cells of a row that the paper does not print: named as the printed ones are, the last parts of its name
    stand in the last columns."""
    parts = row.rsplit(", ", width - 1) if width else []
    return [*parts, *[""] * (width - len(parts))]


def write_diff(path: Path, rows: list[DiffRow]) -> None:
    """<name>.diff.csv."""
    _write_csv(path, [[f.name for f in dataclasses.fields(DiffRow)]], [row.as_dict().values() for row in rows])


def write_claims(path: Path, claims: list[dict[str, Any]]) -> None:
    """<name>.claims.csv from `claim_rows`."""
    _write_csv(path, [CLAIM_COLUMNS], [[row[c] for c in CLAIM_COLUMNS] for row in claims])


def notes(project: Project, name: str) -> list[str]:
    """What has to be known about a table: notes, and departures from the paper."""
    return [*project.table(name)[1].notes, *(f"{d.what}: {d.why}" for d in project.deviations(name))]


def notes_beside(table_csv: Path) -> Path:
    """paper_tables/x.csv -> paper_tables/x.notes.txt"""
    return table_csv.with_name(f"{table_csv.stem}.notes.txt")


def sibling(table_csv: Path, kind: str) -> Path:
    """paper_tables/x.csv -> paper_tables/x.diff.csv"""
    return table_csv.with_name(f"{table_csv.stem}.{kind}.csv")


def _write_csv(path: Path, heads: list[list[str]], rows: Iterable[Iterable[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(heads)
    writer.writerows(rows)
    write_atomic(path, lambda file: file.write(text.getvalue().encode()))
