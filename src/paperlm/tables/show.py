"""`paperlm show`: from a printed number to what is behind it: jobs, measurements or arithmetic, and every source."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paperlm.errors import SpecError, unknown
from paperlm.figures import figure_kinds
from paperlm.frozen import Frozen
from paperlm.jobs import Job, module_of
from paperlm.norms import build_method
from paperlm.plan.project import Cell, Project
from paperlm.plan.state import State
from paperlm.plan.workflow import Workflow
from paperlm.record.record import read_record
from paperlm.tables.arithmetic import formula_of
from paperlm.tables.build import KINDS, printed_table, table_contents
from paperlm.tables.contents import Contents
from paperlm.tables.jobs import proxies_of
from paperlm.tables.vocabulary import painted

RULES = "workflow/rules/exhibits.smk"


def show(project: Project, name: str, cell_name: str | None, as_json: bool = False) -> None:
    """Print what is behind a table, a figure, or one of its cells. SpecError for unknown names."""
    console = Console(width=None if Console().is_terminal else 160, soft_wrap=True, highlight=False)
    project.exhibit(name)
    if name in project.figures and cell_name is None:
        _show_figure(console, project, name)
    elif project.cells(name):
        _show_jobs(console, project, name, cell_name, as_json)
    elif name in project.figures:
        raise SpecError(f"{name} has no cells of its own; look at {project.figure(name)[1].table or 'its options'}")
    else:
        _show_computed(console, project, name, cell_name, as_json)


def _head(project: Project, name: str) -> str:
    paper, exhibit = project.exhibit(name)
    return f"{name} at scale {project.scale.scale}: {paper.paper.title}, {exhibit.number}"


def _departures(console: Console, project: Project, name: str) -> None:
    for deviation in project.deviations(name):
        console.print(f"departure   {escape(deviation.what)}: {escape(deviation.why)}")


# -- exhibits of jobs ----


def _show_jobs(console: Console, project: Project, name: str, cell_name: str | None, as_json: bool) -> None:
    """An exhibit's jobs, or everything about one of its cells."""
    paper, exhibit = project.exhibit(name)
    published = printed_table(project, name) if name in project.tables else None
    printed = lambda cell: published.cell(cell.row, cell.column) if published else ""  # noqa: E731
    cells = {(c.row, c.column): c for c in project.cells(name)}
    if as_json and cell_name is None:
        raise SpecError("--json prints the jobs of one cell: name it with --cell")
    if cell_name is None:
        grid = Table(title=_head(project, name))
        for column in ("row", "column", "published", "job"):
            grid.add_column(column, no_wrap=True)
        for (row, column), cell in cells.items():
            what = " ".join(job.job_id for job in cell.jobs) or f"{cell.sum_of_column} of the column's jobs"
            grid.add_row(row, column, printed(cell), what)
        console.print(grid)
        return
    cell = cells[_find(cells, cell_name)]
    if as_json:
        console.print_json(json.dumps([job.canonical() for job in cell.jobs]))
        return
    console.print(f"published   {printed(cell) or 'nothing'}   {paper.paper.title}, {exhibit.number}")
    if published:
        console.print(f"            {exhibit.published or 'no file: the paper prints no such table'}")
    if cell.sum_of_column:
        console.print(f"computed    mean of {cell.sum_of_column} over the column's jobs (paperlm.tables.jobs)")
        return
    state = State(project)
    for job in cell.jobs:
        others = [other for other in project.exhibits_of(job.job_id) if other != name]
        console.print(f"job         {job.job_id}" + (f"   (also in {', '.join(others)})" if others else ""))
        console.print(f"record      {_record(project, state, job, cell)}")
    for job in dict.fromkeys([cell.jobs[0], *cell.jobs[0].ancestors()]):
        module = module_of(job).__name__
        console.print(f"rule        {job.kind} (workflow/rules/jobs.smk) -> {module}.run ({_path(module)})")
    _show_metric(console, project, name, cell)
    _show_method(console, cell)
    for line in proxies_of(project, name, [cell]):
        console.print(f"proxy       {line}")
    _show_settings(console, cell)
    _departures(console, project, name)


def _show_metric(console: Console, project: Project, name: str, cell: Cell) -> None:
    """What is printed at this scale, what claims are judged on, and from where a number counts as diverged."""
    _, exhibit = project.exhibit(name)
    judged = cell.metric or exhibit.metric
    printed = getattr(exhibit, "printed_metric", "")
    shown = printed if printed and project.scale.comparable else judged
    other = (
        f"; {printed} where it is compared with the print (paperlm.tables.metrics)"
        if printed and shown != printed
        else ""
    )
    what = f"mean of {', '.join(cell.mean_of)}" if cell.mean_of else shown
    console.print(f"metric      {what} printed at scale {project.scale.scale}{other}; claims are judged on {judged}")
    if rule := project.diverged_rule(name):
        above = (
            f"perplexity above {rule.above:g}"
            if rule.above
            else f"perplexity within {rule.unigram_within:.0%} of the unigram's, or above it"
        )
        console.print(f"diverged    here: {above} {escape(f'[{rule.source}]')}")
        if above := exhibit.diverged.above:  # the paper prints no unigram perplexity, so that only this can tell
            console.print(f"            in print: perplexity above {above:g}")
    kind = "table" if name in project.tables else "figure"
    function = KINDS[exhibit.kind] if kind == "table" else figure_kinds()[exhibit.draw]
    console.print(
        f"{kind:<11} rule {kind} ({RULES}) -> {function.__module__}.{function.__name__} ({_path(function.__module__)})"
    )


def _show_method(console: Console, cell: Cell) -> None:
    """The normalization method of the model, and who applies its wiring."""
    for job in (cell.jobs[0], *cell.jobs[0].ancestors()):
        if "norm" in type(job).model_fields:  # a model from elsewhere has its own blocks
            method = build_method(job.norm)
            module = type(method).__module__
            console.print(
                f"method      {module}.{type(method).__name__} ({_path(module)})   {escape(f'[{method.source}]')}"
            )
            console.print("            its wiring is applied by src/paperlm/models/layers.py, Residual")
            return


def _path(module: str) -> str:
    return f"src/{module.replace('.', '/')}.py"


def _show_settings(console: Console, cell: Cell) -> None:
    for name, sources in cell.sources.items():
        job = _job_with(cell.jobs[0], set(sources))
        grid = Table(title=f"settings of {name}", title_justify="left", box=None)
        for column in ("setting", "value", "source"):
            grid.add_column(column)
        for key, setting in sorted(sources.items()):
            value = getattr(job, key, setting.value) if job else setting.value
            grid.add_row(key, json.dumps(value, default=_plain), escape(setting.source))
        for key, (value, why) in job.derived().items() if job else ():
            grid.add_row(f"({key})", value, why)
        console.print(grid)


def _plain(value: Frozen) -> dict[str, Any]:
    """A setting that has settings of its own."""
    return value.model_dump(mode="json")


def _job_with(job: Job, keys: set[str]) -> Job | None:
    """The job of a chain that has these fields."""
    for one in (job, *job.ancestors()):
        if keys <= set(type(one).model_fields):
            return one
    return None


def _record(project: Project, state: State, job: Job, cell: Cell) -> str:
    """Where the job's record is and what it says."""
    stored = state.stored(job)
    if stored is None:
        return f"none yet; it will be {project.places.made(job)}"
    record = read_record(project.root / stored.path, job.job_id)
    keys = [cell.metric] if cell.metric in record.metrics else list(record.metrics)[:2]
    numbers = ", ".join(f"{key} {record.metrics[key]:.4g}" for key in keys if record.metrics[key] is not None)
    drifted = f"   earlier rules: {', '.join(stored.drifted)}" if stored.drifted else ""
    return f"{stored.path}   {record.outcome}: {numbers}{record.reason}{drifted}"


# -- other tables, figures ----


def _show_computed(console: Console, project: Project, name: str, cell_name: str | None, as_json: bool) -> None:
    files = [path for path in Workflow(project).inputs(name) if project.places.is_file(path)]
    contents = table_contents(project, name, [project.root / path for path in files])
    if as_json and cell_name is None:
        raise SpecError("--json prints one cell: name it with --cell")
    if cell_name is None:
        _show_cells(console, project, name, contents)
        return
    key = _find(contents.cells, cell_name)
    if as_json:
        console.print_json(json.dumps(contents.cells[key].as_dict()))
        return
    _show_cell(console, project, name, contents, key, files)


def _show_cells(console: Console, project: Project, name: str, contents: Contents) -> None:
    grid = Table(title=_head(project, name))
    for column in ("row", "column", "published", "regenerated", "verdict", "from"):
        grid.add_column(column, no_wrap=True)
    for (row, column), cell in contents.cells.items():
        grid.add_row(row, column, cell.published, cell.regenerated, painted(cell.verdict), cell.jobs or cell.metric)
    console.print(grid)


def _show_cell(
    console: Console, project: Project, name: str, contents: Contents, key: tuple[str, str], files: list[str]
) -> None:
    paper, table = project.table(name)
    cell = contents.cells[key]
    edition = project.edition(name)
    console.print(f"published   {cell.published or 'nothing found'}   {paper.paper.title}, {table.number} {edition}")
    console.print(f"            {table.published or 'no file: the paper prints it, but its cells were not found'}")
    reason = f": {escape(cell.reason)}" if cell.reason else ""
    console.print(f"regenerated {cell.regenerated or 'nothing'}   {painted(cell.verdict)}{reason}")
    if cell.judged_on:
        console.print(f"number      {cell.judged_on}" + (f"   repetitions {cell.spread}" if cell.spread else ""))
    for label, value in (("metric", cell.metric), ("measured", cell.jobs), ("where", cell.labels)):
        if value:
            console.print(f"{label:<11} {value}")
    for path in files:
        console.print(f"rows        {path}")
    if table.kind == "measurements":
        row = table.rows[key[0].split(": ", 1)[-1]]
        console.print(f"method      {row.method}   {escape(row.source)}")
        console.print(f"rule        measure (workflow/rules/measure.smk) -> python -m paperlm_kernels.bench {table.op}")
    function = KINDS[table.kind]
    console.print(f"table       rule table ({RULES}) -> {function.__module__}.{function.__name__}")
    if table.kind == "arithmetic":
        model = paper.models[key[0]]
        console.print(f"formula     {formula_of(paper, name).__name__}.quantities")
        grid = Table(title="constants", title_justify="left", box=None)
        for column in ("constant", "value", "source"):
            grid.add_column(column)
        for label, setting in table.constants.items():
            grid.add_row(label, str(setting.value), escape(setting.source))
        for label in ("vocab", "width", "layers", "elements"):
            grid.add_row(label, str(getattr(model, label)), escape(model.source))
        console.print(grid)
    _departures(console, project, name)


def _show_figure(console: Console, project: Project, name: str) -> None:
    paper, figure = project.figure(name)
    function = figure_kinds()[figure.draw]
    console.print(f"{name}: {paper.paper.title}, {figure.number}: {figure.title}")
    console.print(f"numbers     paper_tables/{name}.csv" + (f", from {figure.table}" if figure.table else ""))
    console.print(f"figure      rule figure ({RULES}) -> {function.__module__}.{function.__name__}")
    for job in project.jobs_of(name):
        console.print(f"job         {job.job_id}")
    for line in figure.notes:
        console.print(f"note        {escape(line)}")
    _departures(console, project, name)


def _find(cells: dict[tuple[str, str], object], name: str) -> tuple[str, str]:
    """Key of `row,column`; labels may hold commas themselves."""
    names = {f"{row},{column}".replace(", ", ",").strip(","): (row, column) for row, column in cells}
    wanted = ",".join(part.strip() for part in name.split(",")).strip(",")
    if wanted not in names:
        takes = "ROW,COLUMN" if any(column for _, column in cells) else "ROW, as a figure has no columns"
        raise SpecError(f"--cell takes {takes}: {unknown('cell', wanted, names)}")
    return names[wanted]
