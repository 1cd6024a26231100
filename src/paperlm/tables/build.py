"""`paperlm table`: records -> <table>.csv, <table>.diff.csv, <table>.claims.csv, and an HTML page for the report."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paperlm.errors import SpecError
from paperlm.files import write_atomic
from paperlm.spec.paper import ClaimSpec, TableSpec
from paperlm.spec.project import Project
from paperlm.tables.claims import Cells, CellSamples, CellValue, Expression, Verdict, judge
from paperlm.tables.compare import DiffRow, diff_rows
from paperlm.tables.published import PublishedTable, number, read_published
from paperlm.tables.results import TableResults, collect
from paperlm.tables.settings import check_columns, settings_table

CLAIM_COLUMNS = [
    "claim", "says", "scale", "verdict", "support", "seeds", "per_seed", "reason", "holds_in_print",
    "print_within_evaluation_noise", "expression",
]  # fmt: skip
EVALUATION_NOISE = 0.015
"Relative perplexity difference that launch geometry alone can make between two printed cells."


def write_table(project: Project, name: str, records: Iterable[Path], out: Path, html: Path | None = None) -> None:
    """Build a table from records and write its three CSV files. Raises RecordError and SpecError."""
    _, table = project.table(name)
    published = read_published(project.root / table.published)
    if table.kind == "settings":
        check_columns(published, table.published)
        rows, diff = settings_table(project, name, published)
        claims: list[dict[str, Any]] = []
    else:
        check_labels(name, table, published)
        results = collect(project, name, records)
        diff = diff_rows(project, results, published)
        rows = _printed_layout(project, diff, published)
        claims = claim_rows(project, name, results, published)
    _write_csv(out, ["scale", published.corner, *published.columns], rows)
    _write_csv(sibling(out, "diff"), list(diff[0].as_dict()), [list(d.as_dict().values()) for d in diff])
    _write_csv(sibling(out, "claims"), CLAIM_COLUMNS, [[row[c] for c in CLAIM_COLUMNS] for row in claims])
    if html is not None:
        from paperlm.tables.html import write_page

        write_page(html / f"{name}.html", project, name, published, rows, diff, claims)


def sibling(table_csv: Path, kind: str) -> Path:
    """paper_tables/x.csv -> paper_tables/x.diff.csv"""
    return table_csv.with_name(f"{table_csv.stem}.{kind}.csv")


def check_labels(name: str, table: TableSpec, published: PublishedTable) -> None:
    """Every printed row and column is declared, and the other way round."""
    rows = {label for label, row in table.rows.items() if not row.scales}
    for kind, declared, printed in (("row", rows, published.rows), ("column", table.columns, published.columns)):
        for label in set(declared) ^ set(printed):
            side = "printed but not declared" if label in set(printed) else "declared but not printed"
            raise SpecError(f"tables.{name}: {kind} {label!r} is {side}")


def _printed_layout(project: Project, diff: list[DiffRow], published: PublishedTable) -> list[list[str]]:
    """Printed rows in printed order, then the extra ones."""
    cells = {(d.row, d.column): d.regenerated for d in diff}
    rows = list(dict.fromkeys([*published.rows, *(d.row for d in diff)]))
    return [[project.scale.scale, row, *(cells[row, c] for c in published.columns)] for row in rows]


def _write_csv(path: Path, header: list[str], rows: Iterable[Iterable[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_atomic(path, lambda file: file.write(text.getvalue().encode()))


# -- claims -----------------------------------------------------------------------------------------------------------


def claim_rows(project: Project, name: str, results: TableResults, published: PublishedTable) -> list[dict[str, Any]]:
    """A line of <table>.claims.csv for each claim."""
    paper, table = project.table(name)
    cells = cell_samples(project, table, results)
    printed = published_cells(published, paper.settings["diverged"].value.get("above", math.inf))
    rows = []
    for claim in table.claims:
        verdict = _judged(project, claim, table.claims_name, cells)
        in_print = bool(Expression(claim.expression).evaluate({table.claims_name: Cells(printed)}))
        rows.append(
            {
                "claim": claim.id,
                "says": claim.says,
                "scale": project.scale.scale,
                "verdict": verdict.verdict,
                "support": "" if verdict.support is None else f"{verdict.support:.3f}",
                "seeds": len(verdict.per_seed),
                "per_seed": " ".join(str(v).lower() for v in verdict.per_seed),
                "reason": verdict.reason,
                "holds_in_print": str(in_print).lower(),
                "print_within_evaluation_noise": str(fragile_in_print(claim, table.claims_name, printed)).lower(),
                "expression": claim.expression,
            }
        )
    return rows


def _judged(project: Project, claim: ClaimSpec, table_name: str, cells: Mapping[Any, CellSamples]) -> Verdict:
    rule = project.scale.claims
    if rule.judge == "none":
        return Verdict("not tested", reason=f"scale {project.scale.scale}: {rule.why}")
    if claim.id in rule.except_:
        return Verdict("not tested", reason=f"scale {project.scale.scale}: {rule.except_[claim.id]}")
    verdict = judge(claim.expression, table_name, cells)
    if (
        verdict.verdict in ("holds", "fails", "undecided")
        and len(verdict.per_seed) == 1
        and "div" not in verdict.reason
    ):
        noise = project.scale.seed_noise
        one = f"one seed; seed noise {noise.value:.1%} ({noise.source})"
        return Verdict(
            verdict.verdict, verdict.support, verdict.per_seed, f"{verdict.reason}; {one}".removeprefix("; ")
        )
    return verdict


def cell_samples(project: Project, table: TableSpec, results: TableResults) -> dict[Any, CellSamples]:
    """Judge's view of the finished cells. Their noise: CellResult.noise."""
    samples = {}
    for key, result in results.cells.items():
        if result.cell.label or not result.finished or result.out_of_memory:
            continue
        values = result.values(table.claims_metric)
        noise = result.noise(table.claims_metric, project.scale.seed_noise.value)
        samples[key] = CellSamples(tuple(values), tuple(result.diverged), noise)
    return samples


def published_cells(published: PublishedTable, diverged_above: float) -> dict[Any, CellValue]:
    """The printed numbers as an expression sees them."""
    found = {}
    for row in published.rows:
        for column in published.columns:
            value = number(published.cell(row, column))
            if value is not None:
                found[row, column] = CellValue(value, value > diverged_above)
    return found


def fragile_in_print(claim: ClaimSpec, table_name: str, printed: Mapping[Any, CellValue]) -> bool:
    """True if moving printed cells by what evaluation geometry can do changes the claim's truth in the print.

    Each cell the claim reads is moved alone, up and down, so that a gap changes by the whole EVALUATION_NOISE.
    """
    expression = Expression(claim.expression)
    truth = bool(expression.evaluate({table_name: Cells(printed)}))
    for _, key in expression.cells({table_name: printed}):
        for factor in (1 - EVALUATION_NOISE, 1 + EVALUATION_NOISE):
            moved = {**printed, key: CellValue(printed[key] * factor, printed[key].diverged)}
            if bool(expression.evaluate({table_name: Cells(moved)})) != truth:
                return True
    return False
