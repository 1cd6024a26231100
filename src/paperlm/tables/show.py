"""`paperlm show`: from a printed number to what is behind it: runs, measurements or arithmetic, and every source."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from paperlm.errors import SpecError, unknown
from paperlm.figures import KINDS as FIGURES
from paperlm.norms import build_method
from paperlm.record.record import read_record
from paperlm.spec.project import Cell, Project
from paperlm.spec.run import RunConfig
from paperlm.spec.workflow import Jobs
from paperlm.tables.build import KINDS, printed_table, table_contents
from paperlm.tables.contents import Contents


def show(project: Project, name: str, cell_name: str | None, as_json: bool = False) -> None:
    """Print what is behind a table, one of its cells, or a figure. SpecError for unknown names."""
    console = Console(width=None if Console().is_terminal else 160, soft_wrap=True, highlight=False)
    if name in project.figures:
        _show_figure(console, project, name)
        return
    if name not in project.tables:
        raise SpecError(unknown("table or figure", name, [*project.tables, *project.figures]))
    _, table = project.table(name)
    if table.kind == "runs":
        _show_runs(console, project, name, cell_name, as_json)
        return
    jobs = Jobs(project)
    files = [path for path in jobs.records(name) if (project.root / path).is_file()]
    contents = table_contents(project, name, [project.root / path for path in files])
    if cell_name is None:
        _show_cells(console, project, name, contents)
        return
    key = _find(contents.cells, cell_name)
    if as_json:
        console.print_json(json.dumps(contents.cells[key].as_dict()))
        return
    _show_cell(console, project, name, contents, key, files)


def _head(project: Project, name: str) -> str:
    paper, table = project.table(name)
    return f"{name} at scale {project.scale.scale}: {paper.paper.title}, {table.number}"


def _function(dotted: str) -> str:
    return dotted.replace(":", ".")


def _show_cells(console: Console, project: Project, name: str, contents: Contents) -> None:
    """Every cell of a table that has no runs."""
    grid = Table(title=_head(project, name))
    for column in ("row", "column", "published", "regenerated", "verdict", "from"):
        grid.add_column(column, no_wrap=True)
    for (row, column), cell in contents.cells.items():
        grid.add_row(row, column, cell.published, cell.regenerated, cell.verdict, cell.run_ids or cell.metric)
    console.print(grid)


def _show_cell(
    console: Console, project: Project, name: str, contents: Contents, key: tuple[str, str], files: list[str]
) -> None:
    """One cell of a table that has no runs."""
    paper, table = project.table(name)
    cell = contents.cells[key]
    edition = project.edition(name)
    console.print(f"published   {cell.published or 'nothing found'}   {paper.paper.title}, {table.number} {edition}")
    console.print(f"            {table.published or 'no file: the paper prints it, but its cells were not found'}")
    console.print(
        f"regenerated {cell.regenerated or 'nothing'}   {cell.verdict}{': ' + cell.reason if cell.reason else ''}"
    )
    if cell.judged_on:
        console.print(f"number      {cell.judged_on}" + (f"   repetitions {cell.spread}" if cell.spread else ""))
    for label, value in (("metric", cell.metric), ("measured", cell.run_ids), ("where", cell.labels)):
        if value:
            console.print(f"{label:<11} {value}")
    for path in files:
        console.print(f"rows        {path}")
    if table.kind == "measurements":
        row = table.rows[key[0].split(": ", 1)[-1]]
        console.print(f"method      {row.method}".ljust(12) + f"   {row.source}".replace("[", r"\["))
        console.print("rule        measure (workflow/rules/measure.smk) -> python -m paperlm_kernels.bench " + table.op)
    function = KINDS[table.kind]
    console.print(f"table       rule table (workflow/rules/tables.smk) -> {function.__module__}.{function.__name__}")
    if table.kind == "arithmetic":
        model = paper.models[key[0]]
        console.print("formula     paperlm.cost.memory.quantities")
        grid = Table(title="constants", title_justify="left", box=None)
        for column in ("constant", "value", "source"):
            grid.add_column(column)
        for label, setting in table.constants.items():
            grid.add_row(label, str(setting.value), setting.source.replace("[", r"\["))
        for label in ("vocab", "width", "layers", "elements"):
            grid.add_row(label, str(getattr(model, label)), model.source.replace("[", r"\["))
        console.print(grid)
    for deviation in project.deviations(name):
        console.print(f"deviation   {deviation.what}: {deviation.why}")


def _show_figure(console: Console, project: Project, name: str) -> None:
    paper, figure = project.figure(name)
    console.print(f"{name}: {paper.paper.title}, {figure.number}: {figure.title}")
    console.print(f"numbers     paper_tables/{name}.csv" + (f", from {figure.table}" if figure.table else ""))
    console.print(f"figure      rule figure (workflow/rules/tables.smk) -> {_function(FIGURES[figure.kind])}")
    for line in (*figure.notes, *(f"{d.what}: {d.why}" for d in project.deviations(name))):
        console.print(f"note        {line}")


def _show_runs(console: Console, project: Project, table_name: str, cell_name: str | None, as_json: bool) -> None:
    """A table's runs, or everything about one of its cells."""
    paper, table = project.table(table_name)
    published = printed_table(project, table_name)
    cells = {(c.row, c.column): c for c in project.cells(table_name)}
    if cell_name is None:
        grid = Table(title=_head(project, table_name))
        for column in ("row", "column", "published", "run"):
            grid.add_column(column, no_wrap=True)
        for (row, column), cell in cells.items():
            runs = " ".join(r.run_id for r in cell.runs) or f"label: {cell.label}"
            grid.add_row(row, column, published.cell(row, column), runs)
        console.print(grid)
        return
    cell = cells[_find(cells, cell_name)]
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
    _show_settings(console, cell)
    for deviation in project.deviations(table_name):
        console.print(f"deviation   {deviation.what}: {deviation.why}")


def _show_settings(console: Console, cell: Cell) -> None:
    grid = Table(title="settings", title_justify="left", box=None)
    for column in ("setting", "value", "source"):
        grid.add_column(column)
    values = cell.runs[0].canonical()
    for key in sorted(cell.sources):
        value = values.get(key, getattr(cell.runs[0], key))  # a default is not among the hashed values
        grid.add_row(key, json.dumps(value), cell.sources[key].replace("[", r"\["))
    console.print(grid)


def _record(project: Project, run: RunConfig) -> str:
    """Where the run's record is and what it says."""
    for folder in (f"paper_tables/records/{project.scale.scale}", f"results/{project.scale.scale}/runs"):
        path = project.root / folder / f"{run.run_id}.json"
        if path.is_file():
            record = read_record(path, run.run_id)
            numbers = ", ".join(f"{k} {record.metrics[k]:.4g}" for k in ("ppl_true", "ppl_paper") if record.metrics[k])
            by = "" if record.cost.loss in (None, run.loss) else f" (loss computed by {record.cost.loss})"
            return f"{folder}/{path.name}   {record.outcome}: {numbers}{by}"
    return f"none yet; it will be results/{project.scale.scale}/runs/{run.run_id}.json"


def _find(cells: dict[tuple[str, str], object], name: str) -> tuple[str, str]:
    row, _, column = (part.strip() for part in name.partition(","))
    if (row, column) not in cells:
        raise SpecError(unknown("cell", f"{row},{column}", [f"{r},{c}" for r, c in cells]))
    return row, column
