"""Tables of kind `jobs`: a job per cell and seed; one row per cell: published, regenerated, spread, verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from pathlib import Path

from paperlm.errors import SpecError, unknown
from paperlm.plan.exhibit import DivergedRule, JobCells
from paperlm.plan.project import Cell, Project
from paperlm.plan.table import JobsTable
from paperlm.tables.claims import CellSamples, PrintedCell
from paperlm.tables.contents import (
    ITEMS_ONLY,
    Contents,
    DiffRow,
    Key,
    check_labels,
    format_count,
    format_value,
    one_seed,
    relative,
)
from paperlm.tables.published import PublishedTable, half_a_digit, number
from paperlm.tables.results import CellResult, Results, collect, is_hash
from paperlm.tables.vocabulary import EARLIER_RULES, NOT_COMPARABLE, NOT_PRINTED, NOT_RUN, OUT_OF_MEMORY


def contents(project: Project, name: str, published: PublishedTable, records: Iterable[Path]) -> Contents:
    """The table from its records. Raises RecordError, and SpecError where declared and printed labels differ."""
    _, table = project.table(name)
    if table.published:
        rows, columns = ({k: v.printed for k, v in part.items()} for part in (table.rows, table.columns))
        check_labels(name, rows, columns, published)
        _check_comparisons(name, table, published)
    results = collect(project, name, records)
    noise, samples = project.seed_noise(name), cell_samples(project, table, results)
    errors = any(result.standard_error(result.cell.metric) for result in results.cells.values())
    return Contents(
        diff=[_diff_row(project, table, results, result, published) for result in results.cells.values()],
        samples=samples,
        printed=published_cells(table, published),
        print_noise=table.print_noise.value if table.print_noise else 0.0,
        one_sample=ITEMS_ONLY if errors else one_seed(noise),
        drifted_cells=frozenset(key for key, result in results.cells.items() if result.drifted),
        proxies=_proxies_by_row(project, results),
        notes=(*incomparable(project, name), *proxies(project, name)),
    )


def _check_comparisons(name: str, table: JobsTable, published: PublishedTable) -> None:
    """SpecError for a column that is compared with another one than a printed one, or is printed itself."""
    for label, part in table.columns.items():
        if not (other := part.compared_with):
            continue
        if other not in published.columns:
            raise SpecError(
                f"tables.{name}.columns.{label}: compared_with: {unknown('column', other, published.columns)}"
            )
        if part.printed:
            raise SpecError(f"tables.{name}.columns.{label}: is printed itself; leave compared_with out")


PERPLEXITIES = ("perplexity", "ppl_true", "word_perplexity")
"Metrics that seeds of training change by the measured share, of a word by that of each of its tokens."
LOSSES = ("loss", "loss_true", "loss_word")
"Logarithms of these, which a share changes by so many nats."
TIMED = ("iterations_per_second",)
"Metrics that vary as a clock's readings do, about which seeds of training say nothing."
COUNTED = ("peak_bytes",)
"Metrics that follow from shapes."


def cell_samples(project: Project, table: JobCells, results: Results) -> dict[Key, CellSamples]:
    """Judge's view of the finished cells: a run varies by at least the measurement's own standard error, or else the
    measured seed noise; by both, if it is a perplexity or its logarithm and the paper has a seed noise of its own. A
    speed without an error of its own varies in a way that is not known. Seeds are pooled over the cells of a metric.
    A hash has neither error nor mean."""
    samples, noise = {}, project.seed_noise(results.exhibit).value
    own = project.changes(project.exhibit(results.exhibit)[0]).seed_noise
    for key, result in results.cells.items():
        if result.cell.sum_of_column or not result.usable or result.out_of_memory:
            continue
        metric = result.cell.metric
        values, diverged, seeds = tuple(result.values(metric)), tuple(result.diverged), result.seeds
        scores = result.scores(metric)
        if is_hash(metric):
            samples[key] = CellSamples(values, diverged, seeds, pool=metric, hashes=True)
            continue
        if (error := result.standard_error(metric)) is not None:
            # In the number's own unit: a reward or a gain may be near 0.
            if own and metric in (*PERPLEXITIES, *LOSSES):
                error = math.hypot(error, _between_seeds(result, metric, own.value))
            samples[key] = CellSamples(values, diverged, seeds, error, pool=metric, scores=scores)
            continue
        deviation = 0.0 if metric in COUNTED else _between_seeds(result, metric, noise)
        measured = metric not in TIMED
        samples[key] = CellSamples(values, diverged, seeds, deviation, pool=metric, measured=measured, scores=scores)
    return samples


def _between_seeds(result: CellResult, metric: str, noise: float) -> float:
    """Standard deviation of one run's number, where that of a token's perplexity is so large a share of it."""
    if not math.isfinite(mean := result.mean(metric)):
        return 0.0
    tokens = 1.0  # of a word, where the number is one of words
    if metric == "word_perplexity":
        tokens = statistics.fmean(math.log(r.metrics[metric]) / r.metrics["loss"] for r in result.usable)
    if metric == "loss_word":
        tokens = statistics.fmean(r.metrics[metric] / r.metrics["loss_true"] for r in result.usable)
    return noise * tokens * abs(result.factor if metric in LOSSES else mean)


def published_cells(table: JobsTable, published: PublishedTable) -> dict[Key, PrintedCell]:
    """The printed numbers as an expression sees them."""
    return {
        key: PrintedCell(value, printed_diverged(table.diverged, value), published.cell(*key))
        for key, value in published.values.items()
    }


def printed_diverged(rule: DivergedRule | None, value: float | None) -> bool:
    """Whether a printed number is one of a run that diverged; only `above` can tell."""
    return rule is not None and rule.above is not None and value is not None and value > rule.above


def _diff_row(
    project: Project, table: JobsTable, results: Results, result: CellResult, published: PublishedTable
) -> DiffRow:
    cell = result.cell
    other = table.columns[cell.column].compared_with if project.scale.comparable else ""
    printed = published.cell(cell.row, other or cell.column)
    if cell.sum_of_column:
        return _count_row(project, results, result, printed)
    common = {
        "table": cell.exhibit, "row": cell.row, "column": cell.column, "scale": project.scale.scale,
        "published": printed, "jobs": " ".join(job.job_id for job in cell.jobs), "seeds": len(result.usable),
    }  # fmt: skip
    if not result.finished:
        reason = why_not_run(project)
        return DiffRow(**common, regenerated=NOT_RUN, verdict=NOT_RUN, reason=reason)
    said = [*_proxies_behind(project, results, [result]), *labels(result), *results.trained_apart(result)]
    common["labels"] = "; ".join(said)
    if result.out_of_memory:
        verdict, reason = _out_of_memory(printed, number(printed))
        return DiffRow(**common, regenerated="out of memory", verdict=verdict, reason=reason)
    if not result.usable:
        return DiffRow(**common, regenerated="blocked", verdict="blocked", reason=result.blocked)
    judged = cell.metric
    # A form that only the print has is shown where it is compared with the print.
    metric = table.printed_metric if table.printed_metric and project.scale.comparable else judged
    value, reference = result.mean(metric), number(printed)
    spread = result.spread(metric)
    error = result.standard_error(metric)
    shown = {
        "regenerated": format_value(value, printed or "0.00") + mixed_outcomes(result),
        "metric": f"mean of {len(cell.mean_of)} columns" if cell.mean_of else metric,
        "judged_on": format_value(result.mean(judged), printed or "0.00"),
        "spread": f"{spread:.3g}" if spread is not None else f"standard error {error:.2g}" if error else "",
    }
    if verdict := _outcomes(table, project.diverged_rule(cell.exhibit), result, reference, cell.row, cell.column):
        return DiffRow(**common, **shown, verdict=verdict[0], reason=verdict[1])
    if printed == OUT_OF_MEMORY and (limit := table.out_of_memory_above) is not None:
        more = value > limit
        verdict = "out of memory as published" if more else "differs"
        reason = f"counted: {'more' if more else 'not more'} than the {limit:g} GiB of the paper's card"
        return DiffRow(**common, **shown, verdict=verdict, reason=reason)
    parts = (table.rows[cell.row], table.columns[cell.column])
    whole = table.incomparable if project.scale.scale in (table.incomparable_at or [project.scale.scale]) else ""
    incomparable = whole or next((part.incomparable for part in parts if part.incomparable), "")
    if printed == OUT_OF_MEMORY:
        if incomparable or not project.scale.comparable:
            return DiffRow(**common, **shown, verdict=NOT_COMPARABLE, reason=incomparable)
        reason = "a number here, out of memory in the paper: outcomes compared, not numbers"
        return DiffRow(**common, **shown, verdict="differs", reason=reason)
    if reference is None:
        return DiffRow(**common, **shown, verdict=NOT_PRINTED, reason=_source(table, cell.row, cell.column))
    difference = value - reference
    if not project.scale.comparable and (rule := table.prediction(cell.row, cell.column)):
        close = "match" if abs(difference) <= half_a_digit(printed) else f"within {rule.within:g}"
        verdict = close if abs(difference) <= max(rule.within, half_a_digit(printed)) else "differs"
        return DiffRow(**common, **shown, difference=f"{difference:+.3g}", verdict=verdict, reason=rule.why)
    if incomparable or not project.scale.comparable:
        return DiffRow(**common, **shown, verdict=NOT_COMPARABLE, reason=incomparable)
    shown["difference"], shown["relative_difference"] = f"{difference:+.3g}", relative(difference, reference)
    seed_noise = project.seed_noise(cell.exhibit)
    least = 0.0 if metric in COUNTED or not value else _between_seeds(result, metric, seed_noise.value) / abs(value)
    noise = result.noise(metric, least) * abs(value)
    verdict = "match" if abs(difference) <= half_a_digit(printed) else "differs"
    if verdict == "differs" and abs(difference) <= 2 * noise:
        verdict = "within seeds"
    return DiffRow(**common, **shown, verdict=verdict)


def _source(table: JobsTable, row: str, column: str) -> str:
    """Where a cell that is not printed comes from: from its column, if that is what the paper does not have."""
    own = "" if table.columns[column].in_print else table.columns[column].source
    return own or table.rows[row].source


def _out_of_memory(printed: str, reference: float | None) -> tuple[str, str]:
    """Verdict and reason where a job did not fit here."""
    if printed == OUT_OF_MEMORY:
        return "out of memory as published", "outcomes compared, not numbers"
    if reference is None:
        return NOT_PRINTED, "out of memory here"
    return "differs", "out of memory here, a number in the paper: outcomes compared, not numbers"


def _outcomes(
    table: JobsTable, rule: DivergedRule | None, result: CellResult, reference: float | None,
    row: str, column: str,
) -> tuple[str, str] | None:  # fmt: skip
    """Verdict and reason where a run diverged here or in the paper; None where two numbers can be compared."""
    published = printed_diverged(table.diverged, reference)
    diverged = all(result.diverged)
    if diverged and published:
        return "diverged as published", "outcomes compared, not numbers"
    if reference is None and any(result.diverged):
        return NOT_PRINTED, f"diverged; {_source(table, row, column)}"
    if any(result.diverged) or published:
        here = "diverged" if diverged else "diverged for some seeds" if any(result.diverged) else "trained"
        print_ = "diverged" if published else "trained"
        return "differs", f"{here} here, {print_} in the paper: outcomes compared, not numbers"
    return None


def labels(result: CellResult) -> list[str]:
    """What has to stand beside a cell's number: its records' labels, a model whose training collapsed, seeds
    without a record, earlier rules.

    Of the labels `task: ...` of a record with several tasks, those of the cell's own ones.
    """
    own = {name.partition("/")[0] for name in result.metrics or (result.cell.metric,) if name}
    found = {result.collapsed} - {""}
    for record in result.records:
        others = {name.partition("/")[0] for name in record.metrics if "/" in name} - own if own else set()
        found |= {label for label in record.labels if label.partition(":")[0] not in others}
    if result.missing:
        found.add(f"{len(result.records)} of {len(result.cell.jobs)} seeds have a record")
    blocked = sum(r.outcome == "blocked" for r in result.records)
    if blocked and result.usable:
        found.add(f"{blocked} of {len(result.cell.jobs)} seeds have no honest number")
    if result.drifted:
        found.add(f"{EARLIER_RULES}: {', '.join(result.drifted)}")
    return sorted(found)


PROXY = "a proxy of "
"What a label of one begins with."


def proxy_of(project: Project, paper_id: str, job: str, size: str, stands_for: str = "", asked_size: str = "") -> str:
    """What a model of a size, or in the place of a published checkpoint, is; empty for one that is the published one.

    stands_for, asked_size: as of a Cell.
    """
    changes = project.resolver(paper_id).changes(job, size)
    sizes = [f"{key} {changes[key].value}" for key in ("hidden_size", "n_layers", "vocab_size") if key in changes]
    trained = project.resolver(paper_id).trained_size(size)
    if stands_for:
        shape = sizes or ([f"the shape of {trained}"] if trained else [])
        return f"{PROXY}{stands_for.rpartition('/')[2]}: {', '.join(['trained here', *shape])}"
    sizes = [f"the shape of {trained}", *sizes] if trained != (asked_size or size) else sizes
    return f"{PROXY}{asked_size or size}: {', '.join(sizes)}" if sizes else ""


def proxies(project: Project, name: str) -> list[str]:
    """The proxies that an exhibit's jobs are made of, one line a size."""
    _, exhibit = project.exhibit(name)
    if getattr(exhibit, "table", "") and not project.cells(name):
        return proxies(project, exhibit.table)
    return proxies_of(project, name, project.cells(name))


def proxies_of(project: Project, name: str, cells: Iterable[Cell]) -> list[str]:
    """The proxies that some cells of an exhibit are made of, one line each."""
    paper, _ = project.exhibit(name)
    cells = list(cells)
    pairs = {
        (chain, cell.size, cell.stands_for, cell.asked_size)
        for cell in cells
        for chain, settings in cell.sources.items()
        # A job whose shape is its parent's says null.
        if (cell.size or cell.stands_for) and "hidden_size" in settings and settings["hidden_size"].value is not None
    }
    lines = [proxy_of(project, paper.paper.id, *pair) for pair in sorted(pairs)]
    lines += [f"{PROXY}{said}" for cell in cells for job in cell.jobs if (said := job.proxy())]
    return list(dict.fromkeys(filter(None, lines)))


def _proxies_behind(project: Project, results: Results, shown: Iterable[CellResult]) -> list[str]:
    """The proxies that numbers come from: a count's are those of its column, a cell without a record has none."""
    counted = [c for one in shown for c in (results.column(one.cell.column) if one.cell.sum_of_column else [one])]
    return proxies_of(project, results.exhibit, [one.cell for one in counted if one.finished])


def _proxies_by_row(project: Project, results: Results) -> dict[str, str]:
    """Row -> every proxy that a number of it comes from: where sizes are columns, these are several."""
    rows: dict[str, list[CellResult]] = {}
    for (row, _), result in results.cells.items():
        rows.setdefault(row, []).append(result)
    found = {row: "; ".join(_proxies_behind(project, results, shown)) for row, shown in rows.items()}
    return {row: said for row, said in found.items() if said}


def incomparable(project: Project, name: str) -> list[str]:
    """The line that says so where an exhibit shows jobs of a scale whose numbers repeat no printed ones."""
    scale = project.scale
    return [f"{NOT_COMPARABLE}: {scale.summary}"] if project.jobs_of(name) and not scale.comparable else []


def _count_row(project: Project, results: Results, result: CellResult, printed: str) -> DiffRow:
    """A row that counts something of the column's jobs, e.g. training tokens: the mean over them."""
    cell = result.cell
    counts = {r.metrics[cell.sum_of_column] for c in results.column(cell.column) for r in c.usable}
    common = {
        "table": cell.exhibit, "row": cell.row, "column": cell.column, "scale": project.scale.scale,
        "published": printed, "metric": cell.sum_of_column,
    }  # fmt: skip
    if not counts:
        return DiffRow(**common, regenerated=NOT_RUN, verdict=NOT_RUN, reason="no job of this column has a record")
    common["labels"] = "; ".join(_proxies_behind(project, results, [result]))
    value = statistics.fmean(counts)
    if number(printed) is None:
        verdict = NOT_PRINTED
    elif not project.scale.comparable:
        verdict = NOT_COMPARABLE
    else:
        verdict = "match" if abs(value - number(printed)) <= half_a_digit(printed) else "differs"
    return DiffRow(**common, regenerated=format_count(value), verdict=verdict, reason="the printed numbers are labels")


def mixed_outcomes(result: CellResult) -> str:
    """` (1 of 3 diverged)` where seeds disagree: the number is then the mean of those that trained."""
    n = sum(result.diverged)
    return f" ({n} of {len(result.diverged)} diverged)" if 0 < n < len(result.diverged) else ""


def why_not_run(project: Project) -> str:
    """Why a cell has no number."""
    if project.scale.device == "gpu" and project.config.run_missing != "yes":
        return "no committed record; needs a GPU, or --config run_missing=yes to make it on this machine"
    return "no record"
