"""One row per cell: published, regenerated, spread, verdict."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass

from paperlm.spec.project import Project
from paperlm.tables.published import PublishedTable, half_a_digit, number
from paperlm.tables.results import CellResult, TableResults

NOT_COMPARABLE = "not comparable at this scale"


@dataclass(frozen=True)
class DiffRow:
    """One line of <table>.diff.csv."""

    table: str
    row: str
    column: str
    scale: str
    published: str
    regenerated: str
    metric: str = ""
    "what the regenerated number is: ppl_paper where it is compared with the printed one, else ppl_true"
    judged_on: str = ""
    "the metric that claims use, e.g. ppl_true"
    spread: str = ""
    seeds: int = 0
    difference: str = ""
    relative_difference: str = ""
    verdict: str = ""
    reason: str = ""
    run_ids: str = ""
    labels: str = ""

    def as_dict(self) -> dict[str, object]:
        """Column name -> value, in file order."""
        return asdict(self)


def diff_rows(project: Project, results: TableResults, published: PublishedTable) -> list[DiffRow]:
    """The diff of a table of runs."""
    return [
        _label_row(project, results, cell, published.cell(row, column))
        if cell.cell.label
        else _run_row(project, results.table, cell, published.cell(row, column))
        for (row, column), cell in results.cells.items()
    ]


def _run_row(project: Project, table_name: str, result: CellResult, printed: str) -> DiffRow:
    paper, table = project.table(table_name)
    cell = result.cell
    common = {
        "table": table_name, "row": cell.row, "column": cell.column, "scale": project.scale.scale, "published": printed,
        "run_ids": " ".join(run.run_id for run in cell.runs), "seeds": len(result.records),
    }  # fmt: skip
    if not result.finished:
        reason = why_not_run(project, result)
        return DiffRow(**common, regenerated="not run", verdict="not run", reason=reason)
    labels = {label for r in result.records for label in r.labels}
    if resized := proxy_of(project, table.columns[cell.column].size):
        labels.add(resized)
    if result.missing:
        labels.add(f"{len(result.records)} of {len(cell.runs)} seeds have a record")
    labels = "; ".join(sorted(labels))
    if result.out_of_memory:
        reason = "out of memory here, a number in the paper: outcomes compared, not numbers"
        return DiffRow(**common, regenerated="out of memory", verdict="differs", reason=reason, labels=labels)
    # The authors' biased form is printed only where it is compared with theirs.
    metric = table.metric if project.scale.comparable else table.claims_metric
    value, reference = result.mean(metric), number(printed)
    threshold = paper.settings["diverged"].value.get("above", math.inf)
    published_diverged = reference is not None and reference > threshold
    diverged = all(result.diverged)
    shown = {
        "regenerated": format_value(value, printed or "0.00") + mixed_outcomes(result),
        "metric": metric,
        "judged_on": format_value(result.mean(table.claims_metric), printed or "0.00"),
        "spread": "" if (spread := result.spread(metric)) is None else f"{spread:.3g}",
        "labels": labels,
    }
    if diverged and published_diverged:
        return DiffRow(**common, **shown, verdict="diverged as published", reason="outcomes compared, not numbers")
    if reference is None and any(result.diverged):
        return DiffRow(**common, **shown, verdict="not printed", reason=f"diverged; {table.rows[cell.row].source}")
    if any(result.diverged) or published_diverged:
        what = (
            f"{'diverged' if diverged else 'diverged for some seeds' if any(result.diverged) else 'trained'} here, "
            f"{'diverged' if published_diverged else 'trained'} in the paper"
        )
        return DiffRow(**common, **shown, verdict="differs", reason=f"{what}: outcomes compared, not numbers")
    if reference is None:
        return DiffRow(**common, **shown, verdict="not printed", reason=table.rows[cell.row].source)
    if not project.scale.comparable:
        return DiffRow(**common, **shown, verdict=NOT_COMPARABLE, reason=project.scale.summary)
    difference = value - reference
    shown["difference"], shown["relative_difference"] = f"{difference:+.3g}", f"{difference / reference:+.2%}"
    noise = result.noise(metric, project.scale.seed_noise.value) * value
    verdict = "match" if abs(difference) <= half_a_digit(printed) else "differs"
    if verdict == "differs" and abs(difference) <= 2 * noise:
        verdict = "within seeds"
    return DiffRow(**common, **shown, verdict=verdict)


def proxy_of(project: Project, size: str) -> str:
    """Label of a model that is not of the published size, in which its column is named; empty for one that is."""
    changes = {**project.scale.settings, **project.scale.sizes.get(size, {})}
    sizes = [f"{key} {changes[key].value}" for key in ("hidden_size", "n_layers", "vocab_size") if key in changes]
    return f"a proxy of {size}: {', '.join(sizes)}" if sizes else ""


def _label_row(project: Project, results: TableResults, result: CellResult, printed: str) -> DiffRow:
    """The row of training tokens: real tokens of the column's runs."""
    tokens = {r.metrics["tokens_nonpad"] for c in results.column(result.cell.column) for r in c.records}
    common = {
        "table": results.table, "row": result.cell.row, "column": result.cell.column, "scale": project.scale.scale,
        "published": printed,
    }  # fmt: skip
    if not tokens:
        return DiffRow(**common, regenerated="not run", verdict="not run", reason="no run of this column has a record")
    value = statistics.fmean(tokens)
    if not project.scale.comparable:
        verdict = NOT_COMPARABLE
    else:
        verdict = "match" if abs(value - (number(printed) or 0)) <= half_a_digit(printed) else "differs"
    reason = "real tokens seen; the printed numbers are labels"
    return DiffRow(**common, regenerated=format_count(value), verdict=verdict, reason=reason)


def mixed_outcomes(result: CellResult) -> str:
    """` (1 of 3 diverged)` where seeds disagree: the number is then the mean of those that trained."""
    n = sum(result.diverged)
    return f" ({n} of {len(result.diverged)} diverged)" if 0 < n < len(result.diverged) else ""


def why_not_run(project: Project, result: CellResult) -> str:
    """Why a cell has no number."""
    if project.scale.device == "gpu" and project.config.run_missing != "yes":
        return "no committed record; needs a GPU, or --config run_missing=yes to train on this machine"
    return "no record"


def format_value(value: float, printed: str) -> str:
    """A number with as many decimals as the printed cell, two if that is no decimal number."""
    if not math.isfinite(value):
        return "inf"
    _, _, decimals = printed.partition(".")
    return f"{value:.{len(decimals) if decimals.isdigit() else 2}f}"


def format_count(value: float) -> str:
    """1.1B, 0.46M, 20K."""
    for suffix, unit in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= unit / 2:
            text = f"{value / unit:.2f}" if value < 10 * unit else f"{value / unit:.0f}"
            return text + suffix
    return f"{value:.0f}"
