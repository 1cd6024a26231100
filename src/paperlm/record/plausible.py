"""What no job can have measured: a record that says it is none, whatever its checksum says.

A number that a table asks for and a record lacks is refused where it is read (`paperlm.tables.metrics`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from datetime import date
from typing import TYPE_CHECKING, Any

from paperlm.errors import unknown
from paperlm.jobs.base import Job
from paperlm.result import NO_MODEL

if TYPE_CHECKING:
    from paperlm.record.record import Record

RANGES: dict[str, tuple[float, float]] = {
    r"perplexity|ppl|ppl_\w+|\w+_ppl|\w+_perplexity": (1.0, math.inf),
    r"accuracy|acc|acc_norm|exact_match|f1|cut|\w+_share|share_\w+": (0.0, 1.0),
    r"loss|loss_\w+|\w+_loss|bits|entropy": (0.0, math.inf),
    r"updates|tokens|tokens_\w+|documents|items|windows|images|examples|parameters|blocks|bytes": (0.0, math.inf),
}
"""Last part of a metric's or a column's name -> the least and the largest value that it can have: perplexity is the
exponential of a cross-entropy, which is not negative; shares are of a whole; what is counted is there or not."""


def wrong_with(record: Record, job: Job) -> str:
    """What of a record cannot be so, in a few words; empty if nothing is. `job`: the one that it describes."""
    return next(_faults(record, job), "")


def _faults(record: Record, job: Job) -> Iterator[str]:
    if record.kind != job.kind:
        yield f"kind {record.kind}, of a job of kind {job.kind}"
    if job.kind not in record.behaviour:
        yield f"behaviour says nothing of {job.kind}"
    if (record.outcome == "blocked") != bool(record.reason):
        yield "a reason stands beside the outcome blocked, and beside no other"
    if record.outcome == "blocked" and record.metrics:
        yield "outcome blocked, and numbers beside it"
    yield from _names(record, job)
    for name, value in record.metrics.items():
        yield from _out_of_range(name, value)
    bounds = {} if record.outcome in NO_MODEL else job.bounds()
    for name, value in record.metrics.items():
        least, largest = bounds.get(name, (-math.inf, math.inf))
        if value is not None and not least <= value <= largest:
            yield f"{name} is {value}; its settings leave it from {least:.15g} to {largest:.15g}"
    for name, value in record.standard_errors.items():
        if name not in record.metrics:
            yield f"a standard error of {name}, which is not measured"
        if value < 0:
            yield f"standard error of {name} {value}"
    for name, series in record.series.items():
        if any(len(row) != len(series.columns) for row in series.rows):
            yield f"series {name}: a row has not {len(series.columns)} numbers"
        for index, column in enumerate(series.columns):
            if not _ranges_of(column):
                continue
            for value in (row[index] for row in series.rows if index < len(row)):
                yield from _out_of_range(f"{name}/{column}", value)
    yield from _circumstances(record)


def _names(record: Record, job: Job) -> Iterator[str]:
    """Metrics and series that the kind does not measure."""
    known, series = job.metrics(), job.series()
    for name in record.metrics if known is not None else ():
        if name not in known:
            yield unknown("metric", name, known)
    for name, found in record.series.items() if series is not None else ():
        if name not in series:
            yield unknown("series", name, series)
        elif tuple(found.columns) != tuple(series[name]):
            yield f"series {name} has columns {', '.join(found.columns)}, not {', '.join(series[name])}"


def _out_of_range(name: str, value: Any) -> Iterator[str]:
    if value is None or isinstance(value, str):
        return
    for least, largest in _ranges_of(name):
        if not least <= value <= largest:
            yield f"{name} is {value}, which is none from {least:g} to {largest:g}"


@functools.lru_cache(10_000)  # series have many numbers under one name
def _ranges_of(name: str) -> tuple[tuple[float, float], ...]:
    return tuple(bounds for pattern, bounds in RANGES.items() if re.fullmatch(pattern, name.rpartition("/")[2]))


def _circumstances(record: Record) -> Iterator[str]:
    for name, value in record.cost:
        if isinstance(value, int | float) and value < 0:
            yield f"cost: {name} {value}"
    try:
        date.fromisoformat(record.environment.date)
    except ValueError:
        yield f"date {record.environment.date!r}"
    if record.environment.threads < 1:
        yield f"{record.environment.threads} threads"
