"""Tables of kind `runs`: a pre-training run per cell and seed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from paperlm.spec.paper import PaperSpec
from paperlm.spec.project import Project
from paperlm.spec.table import RunsTable
from paperlm.tables.claims import CellSamples, CellValue
from paperlm.tables.compare import diff_rows
from paperlm.tables.contents import Contents, Key, check_labels
from paperlm.tables.published import PublishedTable
from paperlm.tables.results import TableResults, collect

EVALUATION_NOISE = 0.015
"Relative perplexity difference that launch geometry alone can make between two printed cells."


def contents(project: Project, name: str, published: PublishedTable, records: Iterable[Path]) -> Contents:
    """The table from its run records. Raises RecordError, and SpecError where declared and printed labels differ."""
    paper, table = project.table(name)
    if table.published:
        rows, columns = ({k: v.printed for k, v in part.items()} for part in (table.rows, table.columns))
        check_labels(name, rows, columns, published)
    results = collect(project, name, records)
    noise = project.scale.seed_noise
    return Contents(
        diff=diff_rows(project, results, published),
        samples=cell_samples(project, table, results),
        printed=published_cells(paper, published),
        print_noise=EVALUATION_NOISE,
        one_sample=f"one seed; seed noise {noise.value:.1%} ({noise.source})",
    )


def cell_samples(project: Project, table: RunsTable, results: TableResults) -> dict[Key, CellSamples]:
    """Judge's view of the finished cells. Their noise: CellResult.noise."""
    samples = {}
    for key, result in results.cells.items():
        if result.cell.label or not result.finished or result.out_of_memory:
            continue
        values = result.values(table.claims_metric)
        noise = result.noise(table.claims_metric, project.scale.seed_noise.value)
        samples[key] = CellSamples(tuple(values), tuple(result.diverged), noise)
    return samples


def published_cells(paper: PaperSpec, published: PublishedTable) -> dict[Key, CellValue]:
    """The printed numbers as an expression sees them."""
    above = paper.settings["diverged"].value.get("above", math.inf)
    return {key: CellValue(value, value > above, published.cell(*key)) for key, value in published.values.items()}
