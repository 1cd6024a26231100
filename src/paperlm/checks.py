"""A project as every entry opens it: what the layers above the declarations know is checked before any job starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paperlm.errors import SpecError, unknown
from paperlm.figures import figure_kinds
from paperlm.plan.project import ROOT, Project
from paperlm.tables.build import printed_table
from paperlm.tables.claims import Expression
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
        for claim in project.exhibit(name)[1].claims:
            Expression(claim.expression)
    return project
