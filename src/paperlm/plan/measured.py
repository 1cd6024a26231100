"""Which cases and methods a table of measurements asks for, and the rows that were measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paperlm_kernels.bench import rows

from paperlm.errors import RecordError
from paperlm.plan.project import Project
from paperlm.plan.table import MeasuredColumn, MeasuredRow


def read_rows(path: Path) -> list[rows.Row]:
    """Rows of a file of measurements; RecordError naming file and line for what is none."""
    try:
        return rows.read(path)
    except ValueError as error:
        raise RecordError(str(error)) from None
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None


@dataclass(frozen=True)
class Place:
    """Where a cell stands: labels, the declarations of its row and column, the case it is measured on."""

    row: str
    column: str
    method: MeasuredRow
    quantity: MeasuredColumn
    case: str
    "as declared"
    measured: str
    "the case that is measured at this scale; empty: none without a GPU"


def places(project: Project, name: str) -> Iterator[Place]:
    """Every cell of a table of measurements, row by row."""
    paper, table = project.table(name)
    for case in table.cases:
        for label, row in table.rows.items():
            if row.scales and project.scale.scale not in row.scales:
                continue
            where = label if len(table.cases) == 1 else f"{paper.cases[case].model}: {label}"
            for column_label, column in table.columns.items():
                of = column.case or case
                measured = of
                if project.scale.device == "cpu":
                    measured = paper.cases[of].on_cpu if paper.cases[case].on_cpu else ""
                yield Place(where, column_label, row, column, of, measured)


def measured_methods(project: Project, name: str) -> dict[str, list[str]]:
    """Case -> methods that a table of measurements needs at the configured scale."""
    found: dict[str, list[str]] = {}
    for place in places(project, name):
        if place.measured and place.method.method not in found.setdefault(place.measured, []):
            found[place.measured].append(place.method.method)
    return found
