"""A project as every entry opens it: what the layers above the declarations know is checked before any job starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paperlm.errors import SpecError, unknown
from paperlm.figures import figure_kinds
from paperlm.plan.exhibit import MeasurementsTable
from paperlm.plan.measured import places
from paperlm.plan.project import ROOT, Project
from paperlm.tables.build import printed_table
from paperlm.tables.claims import parts_of, read
from paperlm.tables.contents import check_labels


def open_project(config: dict[str, Any] | None = None, root: Path = ROOT) -> Project:
    """The project, checked: kinds of figures exist, printed tables can be read and match their declaration, claims can
    be parsed. Raises SpecError."""
    project = Project(config, root)
    for name, (paper, figure) in project.figures.items():
        if figure.draw not in figure_kinds():
            raise SpecError(f"{paper.paper.id}: figures.{name}.draw: {unknown('figure', figure.draw, figure_kinds())}")
    for name, (_, table) in project.tables.items():
        if table.published and table.kind in ("jobs", "measurements"):
            rows, columns = ({k: v.printed for k, v in part.items()} for part in (table.rows, table.columns))
            check_labels(name, rows, columns, printed_table(project, name))
    for name in project.exhibits:
        check_claims(project, name)
    return project


def check_claims(project: Project, name: str) -> None:
    """Claims can be read, part by part, and name rows and columns that exist. Raises SpecError."""
    paper, exhibit = project.exhibit(name)
    called = project.called(name)
    known = {short: dict.fromkeys(cells_of(project, other), "0") for short, other in called.items()}
    for claim in exhibit.claims:
        where = f"{paper.paper.id}: {name}: claim {claim.id}"
        expressions = [(claim.expression, names) for names in parts_of(claim.for_each)]
        expressions += [
            (text, {}) for text in (claim.given and claim.given.expression, claim.expression_in_print) if text
        ]
        for text, names in expressions:
            try:
                formula = read(text, known, names)
            except SpecError as error:
                raise SpecError(f"{where}: {error}") from None
            for short, key in sorted(formula.cells, key=str):
                if known[short] and key not in known[short]:
                    labels = [" | ".join(cell) for cell in known[short]]
                    raise SpecError(f"{where}: {short}: " + unknown("cell", " | ".join(_labels(key)), labels))


def _labels(key: tuple[str, ...] | str) -> tuple[str, ...]:
    return key if isinstance(key, tuple) else (key,)


def cells_of(project: Project, name: str) -> list[tuple[str, str]]:
    """Row and column of every cell that claims can read, at whatever scale; none where only a drawing tells."""
    _, exhibit = project.exhibit(name)
    if name in project.figures:
        return []
    rows = getattr(exhibit, "rows", None) or getattr(exhibit, "models", None) or getattr(exhibit, "sizes", [])
    if isinstance(exhibit, MeasurementsTable) and len(exhibit.cases) > 1:
        rows = dict.fromkeys(place.row for place in places(project, name))
    return [(row, column) for row in rows for column in exhibit.columns]
