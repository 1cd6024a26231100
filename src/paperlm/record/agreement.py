"""Whether a job that was made again says what its committed record says."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from paperlm.record.record import Record
from paperlm.result import NO_MODEL, Series

RELATIVE = 0.05
"""Share of a value by which it may differ on other hardware, where sums are taken in another order. Measured: of nine
committed pairs of runs whose losses differ in rounding alone two end 4 % apart in perplexity (gpt2 at scale gpu)."""
ABSOLUTE = 0.001
"Or by so much, of a loss in nats, a share, a perplexity: near zero a ratio says nothing."
STANDARD_ERRORS = 5
"Or by so many standard errors, of those that have one: a retrained model answers some items otherwise."


def disagreements(committed: Record, made: Record) -> list[str]:
    """Where two records of one job contradict each other; what only the new one has is no contradiction.

    The outcome is the same. On the same kind of CPU with the same packages and threads so are metrics, standard errors
    and series, to the last bit. Elsewhere, that is also on every GPU:

    - of a job that ended without a number the outcome alone counts: when a loss overflows is a matter of rounding;
    - whole numbers are counts, and equal;
    - a metric with a standard error is within 5 of the larger one of the two records;
    - another one is within 5 %, or within 0.001;
    - a series has the same columns and as many rows; of a column of words or whole numbers every row is equal; of
      another one the median deviation over the rows is within 5 % of the row's value, or within the noise from row to
      row, the median second difference. Its last row is no test of its own: in a curve of training that is a single
      batch, and what a job ends in are its metrics. A perplexity beside its loss is that loss once more, and the loss
      is what is compared (of metrics each is): measured before a fine-tuning whose model was made again on another
      card, losses are 2.4 % apart, which is 12 % in perplexity, and after it 0.06 % and 0.1 %;
    - answers are to the same items in the same order; how many are right is a metric.
    """
    if committed.outcome != made.outcome:
        return [f"outcome {committed.outcome}, now {made.outcome}"]
    exact = _kind_of_machine(committed) == _kind_of_machine(made) and made.environment.device == "CPU"
    if made.outcome in NO_MODEL and not exact:
        return []
    return [
        *_metrics(committed, made, exact),
        *_series(committed, made, exact),
        *_answers(committed, made, exact),
    ]


def _kind_of_machine(record: Record) -> tuple[Any, ...]:
    where = record.environment
    return where.device, where.cpu, where.packages, where.threads


def _metrics(committed: Record, made: Record, exact: bool) -> Iterator[str]:
    for key, then in committed.metrics.items():
        now = made.metrics.get(key)
        errors = [record.standard_errors.get(key, 0.0) for record in (committed, made)]
        if then != now and (exact or not _close(then, now, max(errors))):
            yield f"{key} {then}, now {now}" + (f" (standard error {max(errors):.3g})" if max(errors) else "")
        if exact and errors[0] != errors[1]:
            yield f"standard error of {key} {errors[0]}, now {errors[1]}"


def _close(then: float | None, now: float | None, error: float) -> bool:
    """Whether two different values of a metric agree on different hardware."""
    if then is None or now is None or (isinstance(then, int) and isinstance(now, int)):
        return False
    if error:
        return abs(now - then) <= STANDARD_ERRORS * error
    return abs(now - then) <= max(ABSOLUTE, RELATIVE * max(abs(then), abs(now)))


def _series(committed: Record, made: Record, exact: bool) -> Iterator[str]:
    for name, then in committed.series.items():
        now = made.series.get(name)
        if then == now:
            continue
        if now is None or then.columns != now.columns or len(then.rows) != len(now.rows):
            yield f"series {name}: {_shape(then)}, now {_shape(now)}"
            continue
        for column in then.columns:
            if column == "ppl" and "loss" in then.columns and not exact:
                continue
            pairs = list(zip(then.column(column), now.column(column), strict=True))
            row = next((index for index, pair in enumerate(pairs) if pair[0] != pair[1]), None)
            if row is not None and (exact or not _alike(pairs)):
                yield f"series {name}: {column} {pairs[row][0]}, now {pairs[row][1]} (row {row + 1}, the first)"


def _answers(committed: Record, made: Record, exact: bool) -> Iterator[str]:
    for name, then in committed.answers.items():
        now = made.answers.get(name)
        if now is None or (then.items, then.digest) != (now.items, now.digest):
            yield f"answers {name}: to {then.items} items ({then.digest}), now " + (
                f"to {now.items} ({now.digest})" if now else "missing"
            )
        elif exact and then != now:
            first = next(n for n, pair in enumerate(zip(then.flags(), now.flags(), strict=True)) if len(set(pair)) > 1)
            yield f"answers {name}: another one to item {first + 1} (the first)"


def _shape(series: Series | None) -> str:
    return f"{len(series.rows)} rows of {', '.join(series.columns)}" if series else "missing"


def _alike(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Whether two columns that differ agree on different hardware. A row without a number in both says nothing."""
    filled = [pair for pair in pairs if pair != (None, None)]
    if not all(isinstance(value, int | float) for pair in filled for value in pair):
        return False
    if all(isinstance(value, int) for pair in filled for value in pair):
        return False
    shares = [abs(b - a) / (max(abs(a), abs(b)) or 1.0) for a, b in filled]
    steps = [b - a for a, b in pairwise(pair[0] for pair in filled)]
    noise = statistics.median([abs(b - a) for a, b in pairwise(steps)] or [0.0])
    return statistics.median(shares) <= RELATIVE or statistics.median(abs(b - a) for a, b in filled) <= noise
