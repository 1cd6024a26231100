"""`paperlm show`: from a printed number to the run, rule and function behind it, and every setting with its source."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from paperlm.errors import SpecError, unknown
from paperlm.norms import build_method
from paperlm.record.record import read_record
from paperlm.spec.project import Cell, Project
from paperlm.spec.run import RunConfig
from paperlm.tables.published import read_published


def show(project: Project, table_name: str, cell_name: str | None, as_json: bool = False) -> None:
    """Print a table's runs, or everything about one cell. SpecError for unknown names."""
    console = Console(width=None if Console().is_terminal else 160, soft_wrap=True, highlight=False)
    paper, table = project.table(table_name)
    published = read_published(project.root / table.published)
    if table.kind == "settings":
        console.print(f"{table_name}: {table.title}; computed by paperlm.tables.settings.settings_table, no runs")
        return
    cells = {(c.row, c.column): c for c in project.cells(table_name)}
    if cell_name is None:
        grid = Table(title=f"{table_name} at scale {project.scale.scale}: {paper.paper.title}, {table.number}")
        for column in ("row", "column", "published", "run"):
            grid.add_column(column, no_wrap=True)
        for (row, column), cell in cells.items():
            runs = " ".join(r.run_id for r in cell.runs) or f"label: {cell.label}"
            grid.add_row(row, column, published.cell(row, column), runs)
        console.print(grid)
        return
    cell = _find(cells, cell_name)
    if as_json:
        console.print_json(json.dumps([run.canonical() for run in cell.runs]))
        return
    console.print(f"published   {published.cell(cell.row, cell.column)}   {paper.paper.title}, {table.number}")
    console.print(f"            {table.published}")
    if cell.label:
        console.print("computed    paperlm.tables.compare._label_row: real tokens of the column's runs")
        return
    for run in cell.runs:
        others = [t for t in project.tables_of(run.run_id) if t != table_name]
        console.print(f"run         {run.run_id}" + (f"   (also in {', '.join(others)})" if others else ""))
        console.print(f"record      {_record(project, run)}")
    method = build_method(cell.runs[0].norm)
    console.print("rule        pretrain (workflow/rules/pretrain.smk) -> paperlm.train.loop.pretrain")
    console.print(f"method      {type(method).__module__}.{type(method).__name__}   [{method.source}]")
    console.print(f"metric      {table.metric} printed, {table.claims_metric} for claims (paperlm.evaluate.perplexity)")
    console.print("table       rule table (workflow/rules/tables.smk) -> paperlm.tables.build.write_table")
    grid = Table(title="settings", title_justify="left", box=None)
    for column in ("setting", "value", "source"):
        grid.add_column(column)
    values = cell.runs[0].canonical()
    for key in sorted(cell.sources):
        grid.add_row(key, json.dumps(values[key]), cell.sources[key].replace("[", r"\["))
    console.print(grid)
    for deviation in project.deviations(table_name):
        console.print(f"deviation   {deviation.what}: {deviation.why}")


def _record(project: Project, run: RunConfig) -> str:
    """Where the run's record is and what it says."""
    for folder in (f"paper_tables/records/{project.scale.scale}", f"results/{project.scale.scale}/runs"):
        path = project.root / folder / f"{run.run_id}.json"
        if path.is_file():
            record = read_record(path, run.run_id)
            numbers = ", ".join(f"{k} {record.metrics[k]:.4g}" for k in ("ppl_true", "ppl_paper") if record.metrics[k])
            return f"{folder}/{path.name}   {record.outcome}: {numbers}"
    return f"none yet; it will be results/{project.scale.scale}/runs/{run.run_id}.json"


def _find(cells: dict[tuple[str, str], Cell], name: str) -> Cell:
    row, _, column = (part.strip() for part in name.partition(","))
    if (row, column) not in cells:
        known = [f"{r},{c}" for r, c in cells]
        raise SpecError(unknown("cell", f"{row},{column}", known))
    return cells[row, column]
