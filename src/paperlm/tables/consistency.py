"""`paperlm consistency`: printed numbers against each other -> paper_tables/published_consistency.csv.

Averages, the same cell in two tables or two papers, arithmetic that a table implies: `consistency` of each paper file
says what should hold, in the language of claims.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paperlm.errors import SpecError, unknown
from paperlm.files import write_atomic
from paperlm.plan.paper import PaperSpec, PrintedCheck
from paperlm.plan.project import Project
from paperlm.tables.build import printed_table
from paperlm.tables.claims import Key, Point, parts_of, read
from paperlm.tables.claims.judge import label_of, name_of
from paperlm.tables.published import number

COLUMNS = ["paper", "check", "part", "says", "holds", "cells", "known", "expression"]


def consistency_rows(project: Project) -> list[dict[str, str]]:
    """A row for each check and part of one. Raises SpecError for an expression that cannot be read, a cell that is not
    printed, and for a `known` reading of what does not fail."""
    return [row for paper in project.papers.values() for row in _of_paper(project, paper)]


def check_consistency(project: Project, paper: PaperSpec) -> None:
    """Raise SpecError as `consistency_rows` does, for one paper."""
    for _ in _of_paper(project, paper):
        pass


def write_consistency(project: Project, out: Path) -> None:
    """published_consistency.csv."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(consistency_rows(project))
    write_atomic(out, lambda file: file.write(text.getvalue().encode()))


def _of_paper(project: Project, paper: PaperSpec) -> Iterator[dict[str, str]]:
    printed = _printed(project, paper)
    for check in paper.consistency:
        rows = [_row(paper, check, names, printed) for names in parts_of(check.for_each)]
        if check.known and all(row["holds"] == "true" for row in rows):
            raise SpecError(f"consistency: {check.id} holds in every part: leave `known` out")
        yield from rows


def _printed(project: Project, paper: PaperSpec) -> dict[str, dict[Any, str]]:
    """Name in claims -> cell -> what is printed; names of this paper before those of others."""
    found: dict[str, dict[Any, str]] = {}
    for name, (_, table) in sorted(project.tables.items(), key=lambda item: item[1][0] is paper):
        if table.claims_name and table.published:
            of = printed_table(project, name)
            found[table.claims_name] = {(row, column): of.cell(row, column) for row in of.rows for column in of.columns}
    return found


def _row(
    paper: PaperSpec, check: PrintedCheck, names: Mapping[str, Any], printed: Mapping[str, Mapping[Any, str]]
) -> dict[str, str]:
    try:
        formula = read(check.expression, printed, names)
        numbers = {key: _number(key, printed) for key in sorted(formula.cells, key=str)}
    except SpecError as error:
        raise SpecError(f"consistency: {check.id}: {error}") from None
    holds = formula.at(Point(numbers, dict.fromkeys(numbers, False)))
    return {
        "paper": paper.paper.id,
        "check": check.id,
        "part": label_of(names),
        "says": check.says,
        "holds": str(holds).lower(),
        "cells": "; ".join(f"{name_of(key)} {printed[key[0]][key[1]]}" for key in numbers),
        "known": "" if holds else check.known,
        "expression": check.expression,
    }


def _number(key: Key, printed: Mapping[str, Mapping[Any, str]]) -> float:
    cells = printed[key[0]]
    if key[1] not in cells:
        labels = [" | ".join(cell) for cell in cells]
        raise SpecError(f"{key[0]}: {unknown('printed cell', ' | '.join(key[1]), labels)}")
    if (value := number(cells[key[1]])) is None:
        raise SpecError(f"{name_of(key)}: {cells[key[1]]!r} is no number; leave the cell out of the expression")
    return value
