"""Whether the benchmark has what a table of measurements names: its operation, cases, methods, metrics."""

from __future__ import annotations

from collections.abc import Iterator

from paperlm_kernels.bench.operation import Operation

from paperlm.bench import with_ours
from paperlm.errors import SpecError, unknown
from paperlm.plan.paper import PaperSpec
from paperlm.plan.table import MeasuredColumn, MeasurementsTable


def check_measured(paper: PaperSpec, name: str) -> None:
    """SpecError with the nearest name for what a table of measurements asks of its operation in vain."""
    table = paper.tables[name]
    known = with_ours().operations()
    if table.op not in known:
        raise SpecError(f"tables.{name}.op: {unknown('operation', table.op, known)}")
    for place, kind, one, names in _named(paper, table, known[table.op]):
        if one not in names:
            raise SpecError(f"tables.{name}.{place}: {unknown(kind, one, names)}")


def _named(
    paper: PaperSpec, table: MeasurementsTable, operation: Operation
) -> Iterator[tuple[str, str, str, list[str]]]:
    """(place, what it names, name, names that there are)."""
    methods = [*operation.methods, *filter(None, [operation.first])]
    cases = [*table.cases, *(column.case for column in table.columns.values() if column.case)]
    for case in cases:
        yield "cases", f"case of {operation.name}", case, [*operation.cases]
        if on_cpu := paper.cases[case].on_cpu:
            yield "cases", f"case of {operation.name}", on_cpu, [*operation.cases]
    for label, row in table.rows.items():
        yield f"rows.{label}.method", "method", row.method, methods
        said = (*row.remarks, *row.misprints)
        yield from ((f"rows.{label}", "column", column, [*table.columns]) for column in said)
    for label, column in table.columns.items():
        if column.only:
            yield f"columns.{label}.only", "method", column.only, [row.method for row in table.rows.values()]
        yield from _of_column(f"columns.{label}", column, operation)


def _of_column(place: str, column: MeasuredColumn, operation: Operation) -> Iterator[tuple[str, str, str, list[str]]]:
    if not operation.metrics:
        return
    yield f"{place}.metric", "metric", column.metric, [*operation.metrics]
    yield f"{place}.field", "field", column.field, [*operation.numbers]
    for key, value in column.where.items():
        yield f"{place}.where", f"field of {column.metric}", key, [*operation.metrics[column.metric]]
        yield f"{place}.where.{key}", key, value, [*operation.metrics[column.metric][key]]
