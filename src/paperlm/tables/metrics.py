"""Metrics of a record, and forms of them that only a paper's print has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paperlm.errors import RecordError, SpecError, unknown
from paperlm.frozen import digest
from paperlm.jobs import Job
from paperlm.plan.project import Project
from paperlm.record.record import Record
from paperlm.result import UNIGRAM
from paperlm.tables.claims.paired import ItemSet, Scores


def _ppl_paper(metrics: Mapping[str, Any], values: Mapping[str, Any]) -> float | None:
    """The normalization papers' perplexity: exp of the mean of batch means times n / (n + 1), because their batch
    counter starts at 1. n is the number of batches of the published run's evaluation (the size's published_batches).

    torchrun_main.py:104,110,120 of both repositories.
    """
    n, loss = values["published_batches"], metrics["loss_batches"]
    return None if loss is None else math.exp(min(loss * n / (n + 1), 700))


DERIVED: dict[str, tuple[Callable[[Mapping[str, Any], Mapping[str, Any]], float | None], tuple[str, ...], str]] = {
    "ppl_paper": (_ppl_paper, ("published_batches",), "loss_batches"),
}
"""Name -> how it follows from a record's metrics and the paper's `sizes.<size>.values`, which of these values it needs,
and which metric."""


def check_metric(job: Job, name: str, values: Mapping[str, Any]) -> None:
    """SpecError for a metric that the job's record will not have, and for a derived one without what it needs.

    A kind that does not name its metrics is not checked.
    """
    _, needs, metric = DERIVED.get(name, (None, (), name))
    for key in needs:
        if key not in values:
            there = f"there is {', '.join(values)}: rename it" if values else "there is none: add it"
            raise SpecError(f"metric {name} needs sizes.<size>.values.{key}, and {there}")
    known = job.metrics()
    if known is not None and metric not in known:
        raise SpecError(f"a job of kind {job.kind}: {unknown('metric', name, [*known, *DERIVED])}")


def check_metrics(project: Project, name: str) -> None:
    """SpecError for a metric of a table of jobs that the records of its cells will not have."""
    _, table = project.table(name)
    rule = ("ppl_true", UNIGRAM) if table.diverged else ()
    cells = list(project.cells_anywhere(name))
    columns = {cell.column: cell for cell in cells if cell.jobs}
    for cell in cells:
        jobs, wanted = cell.jobs, (cell.metric, table.printed_metric, *rule)
        if cell.sum_of_column:
            jobs, wanted = columns[cell.column].jobs if cell.column in columns else (), (cell.sum_of_column,)
        for metric in filter(None, () if cell.mean_of else wanted):
            for job in jobs:
                try:
                    check_metric(job, metric, cell.values)
                except SpecError as error:
                    raise SpecError(f"tables.{name} [{cell.row}, {cell.column}]: {error}") from None


def metric_of(record: Record, name: str, values: Mapping[str, Any]) -> float | None:
    """A metric of a record; None where it is no finite number. Raises SpecError for one that its kind does not have,
    RecordError for one that its kind has come to tell since."""
    if name in DERIVED:
        function, needs, _ = DERIVED[name]
        for key in needs:
            if key not in values:
                raise SpecError(f"metric {name} needs {key}: add it to the paper's sizes.<size>.values")
        return function(record.metrics, values)
    if name not in record.metrics:
        if name in record.value().metrics():
            raise RecordError(
                f"{record.job_id}: its record is older than the metric {name!r}; make it again "
                f"(python -m paperlm run {record.job_id} --again --with-parents)"
            )
        raise SpecError(f"{record.job_id}: {unknown('metric', name, [*record.metrics, *DERIVED])}")
    value = record.metrics[name]
    return None if value is None else float(value)


LOSSES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"perplexity": np.exp, "loss": np.asarray}
"Metric of a record with losses of pieces of a text -> how it follows from their mean."


def _chunks(record: Record) -> ItemSet:
    """Of chunks of a text, of which each counts with its tokens (text_perplexity)."""
    chunks = record.series["chunks"]
    tokens, losses = (tuple(map(float, chunks.column(name))) for name in ("tokens", "summed_loss"))
    items = digest([[used.data_id for used in record.data], tokens], 16)
    return ItemSet(items, losses, tokens, "chunks")


def _means(record: Record) -> ItemSet:
    """Of windows of a text (stored_perplexity), or batches of answers (stored_answers), whose means count alike."""
    (called,) = {"windows", "batches"} & set(record.series)
    pieces = record.series[called]
    losses = tuple(map(float, pieces.column("mean_loss")))
    model = record.value()
    while (tokenizer := getattr(model, "tokenizer", None)) is None and hasattr(model, "of"):
        model = model.of
    sizes = pieces.column("tokens") if called == "batches" else [record.metrics[name] for name in ("tokens", "words")]
    items = digest([[used.data_id for used in record.data], tokenizer or model.slug(), sizes], 16)
    return ItemSet(items, losses, called=called)


PIECES = {"chunks": _chunks, "windows": _means, "batches": _means}
"Series of a record -> what it says of each piece of a text."


def _form(record: Record, name: str) -> Callable[[np.ndarray], np.ndarray] | None:
    """How a metric follows from the mean loss over pieces of a text; None where it does not."""
    if name == "word_perplexity" and "windows" in record.series:
        per_word = len(record.series["windows"].rows) * record.value().window / record.metrics["words"]
        return lambda loss: np.exp(loss * per_word)
    return LOSSES.get(name)


def scores_of(record: Record, names: Sequence[str], factor: float) -> Scores | None:
    """What a record says of each item behind the mean of these metrics; None where it does not keep it."""
    if all(name in record.answers for name in names):
        kept = [record.answers[name] for name in names]
        return Scores(tuple(ItemSet(one.digest, tuple(map(float, one.flags()))) for one in kept), factor)
    series = next((name for name in PIECES if name in record.series), None)
    form = _form(record, names[0]) if series is not None and len(names) == 1 else None
    if form is None:
        return None
    return Scores((PIECES[series](record),), factor, form)
