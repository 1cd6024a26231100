"""A project as every entry opens it: what the layers above the declarations know is checked before any job starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paperlm.bench.names import check_measured
from paperlm.errors import SpecError, unknown
from paperlm.figures import figure_kinds
from paperlm.figures.options import check_options
from paperlm.plan.measured import places
from paperlm.plan.names import check_names
from paperlm.plan.paper import PaperSpec
from paperlm.plan.project import ROOT, Project, ProjectConfig
from paperlm.plan.table import MeasurementsTable
from paperlm.tables.build import printed_table, table_contents
from paperlm.tables.claims import parts_of, read
from paperlm.tables.consistency import check_consistency
from paperlm.tables.metrics import check_metrics
from paperlm.tables.published import check_numbers, read_cells

PUBLISHED = "paper_tables/published"


def open_project(config: dict[str, Any] | ProjectConfig | None = None, root: Path = ROOT) -> Project:
    """The project, checked. Raises SpecError.

    Every cell has its jobs, whose records will have the metrics that are asked for; printed tables can be read and have
    the declared rows and columns; the benchmark has what tables of measurements name; kinds of figures exist; claims
    can be read and name cells that exist.
    """
    project = Project(config, root)
    check_names(project)
    if (folder := project.config.local_data) and not Path(folder).is_dir():
        raise SpecError(f"local_data: {folder}: no such folder; name the one that has the files of `local:` datasets")
    for name in project.exhibits:
        with _in_file_of(project, project.exhibit(name)[0]):
            project.jobs_of(name)
    for name, (paper, figure) in project.figures.items():
        with _in_file_of(project, paper):
            if figure.draw not in figure_kinds():
                raise SpecError(f"figures.{name}.draw: {unknown('figure', figure.draw, figure_kinds())}")
            check_options(project, name)
    for path in sorted((root / PUBLISHED).glob("*.csv")):
        read_cells(path)
    for name, (paper, table) in project.tables.items():
        with _in_file_of(project, paper):
            if table.kind == "jobs":
                check_metrics(project, name)
            if table.kind == "measurements":
                check_measured(paper, name)
            if table.published and table.kind != "settings":  # a hyper-parameter may be a word
                check_numbers(root / table.published, printed_table(project, name))
            table_contents(project, name, [])
    cells = {name: dict.fromkeys(cells_of(project, name), "0") for name in project.exhibits}
    for name in project.exhibits:
        with _in_file_of(project, project.exhibit(name)[0]):
            check_claims(project, name, cells)
    for paper in project.papers.values():
        with _in_file_of(project, paper):
            check_consistency(project, paper)
    return project


@contextlib.contextmanager
def _in_file_of(project: Project, paper: PaperSpec) -> Iterator[None]:
    """Put the paper's file in front of an error that names none."""
    try:
        yield
    except SpecError as error:
        path = project.root / f"workflow/papers/{paper.paper.id}.yaml"
        named = str(error).startswith(str(project.root))
        raise SpecError(str(error) if named else f"{path}: {error}") from None


def check_claims(project: Project, name: str, cells: Mapping[str, Mapping[tuple[str, str], str]]) -> None:
    """Claims can be read, part by part, and name rows and columns that exist. `cells`: exhibit -> its cells, whatever
    is printed there. Raises SpecError."""
    _, exhibit = project.exhibit(name)
    known = {short: cells[other] for short, other in project.called(name).items()}
    for claim in exhibit.claims:
        where = f"{name}: claim {claim.id}"
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
