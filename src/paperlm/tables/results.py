"""What the records say about each cell of an exhibit of jobs: one value per seed, and outcomes."""

from __future__ import annotations

import functools
import math
import operator
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paperlm.errors import RecordError, SpecError
from paperlm.jobs import Job
from paperlm.plan.exhibit import DivergedRule
from paperlm.plan.project import Cell, Project
from paperlm.record.record import Record, drift, read_record
from paperlm.result import UNIGRAM
from paperlm.tables.claims.paired import Scores
from paperlm.tables.metrics import metric_of, scores_of


def is_hash(metric: str) -> bool:
    """Whether a metric (`weights_hash`, `losses_hash`, ...) names bits, so that no mean of it says anything."""
    return metric.endswith("_hash")


@dataclass(frozen=True)
class CellResult:
    """The records of a cell, a tuple for each seed (one record, or those of the columns that it averages)."""

    cell: Cell
    records: tuple[Record, ...] = ()
    missing: tuple[str, ...] = ()
    "jobs without a record"
    rule: DivergedRule | None = None
    factor: float = 1.0
    metrics: tuple[str, ...] = ()
    "metrics that the cell averages; empty: it has one"
    drifted: tuple[str, ...] = ()
    "what has changed since the records were made"
    collapsed: str = ""
    "what has to be said of trainings that collapsed and whose models the jobs work on"

    @property
    def usable(self) -> tuple[Record, ...]:
        """Records with numbers: neither blocked nor out of memory."""
        return tuple(r for r in self.records if r.outcome not in ("blocked", "out_of_memory"))

    @property
    def finished(self) -> bool:
        """True if a seed has a record; seeds without one are counted in the diff, not waited for."""
        return bool(self.records)

    def value(self, record: Record, metric: str) -> float:
        """The cell's number of one record, times the table's factor; infinite where it is no finite number."""
        names = self.metrics or (metric,)
        found = [metric_of(record, name, self.cell.values) for name in names]
        return math.inf if None in found else self.factor * statistics.fmean(found)

    def values(self, metric: str) -> list[float]:
        """The number per seed."""
        return [self.value(record, metric) for record in self.usable]

    def _alike(self, metric: str) -> list[float]:
        """Values of the seeds that trained, or of all seeds if none did: the two outcomes have no common mean."""
        pairs = list(zip(self.values(metric), self.diverged, strict=True))
        return [v for v, diverged in pairs if not diverged] or [v for v, _ in pairs]

    def mean(self, metric: str) -> float:
        """Mean over the seeds that trained; over all if none did. Of hashes their exclusive or."""
        values = self._alike(metric)
        if is_hash(metric) and all(map(math.isfinite, values)):
            return float(functools.reduce(operator.xor, map(int, values)))
        return statistics.fmean(values)

    def spread(self, metric: str) -> float | None:
        """Sample standard deviation over the same seeds; None with fewer than two, where one is not finite, and of
        hashes."""
        values = self._alike(metric)
        unknown = len(values) < 2 or is_hash(metric) or not all(map(math.isfinite, values))
        return None if unknown else statistics.stdev(values)

    def standard_error(self, metric: str) -> float | None:
        """The measurement's own standard error of one seed's number, in the table's unit; None if it has none.

        Of a mean over metrics, which are measured on different items, the errors add up in quadrature.
        """
        names = self.metrics or (metric,)
        found = [[r.standard_errors[n] for n in names if n in r.standard_errors] for r in self.usable]
        if not found or any(len(errors) < len(names) for errors in found):
            return None
        each = [math.sqrt(sum(e * e for e in errors)) / len(names) for errors in found]
        return self.factor * statistics.fmean(each)

    def scores(self, metric: str) -> dict[int, Scores]:
        """Seed -> what its record says of each item, of the seeds that trained and whose record keeps it."""
        runs = zip(self.seeds, self.usable, self.diverged, strict=True)
        found = {s: scores_of(r, self.metrics or (metric,), self.factor) for s, r, diverged in runs if not diverged}
        return {seed: scores for seed, scores in found.items() if scores}

    def noise(self, metric: str, scale_noise: float) -> float:
        """Relative noise of one run: over seeds from five on, before that at least the scale's measured one, or the
        measurement's own standard error where it has one. Two or three seeds can agree by chance."""
        mean, spread = self.mean(metric), self.spread(metric)
        own = 0.0 if spread is None or not mean else spread / abs(mean)
        error = self.standard_error(metric)
        least = scale_noise if error is None else (error / abs(mean) if mean else 0.0)
        return own if len(self._alike(metric)) >= 5 else max(own, least)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seed of each usable record: that of the model it is about, where the job has none of its own."""
        return tuple(seed_of(record.job) for record in self.usable)

    @property
    def diverged(self) -> list[bool]:
        """Per seed: a loss was no number, or the table's rule calls the perplexity one of a model that learned nothing.

        The rule reads token-weighted perplexity, whatever is printed.
        """
        return [r.outcome == "not_finite" or self._on_plateau(r) for r in self.usable]

    def _on_plateau(self, record: Record) -> bool:
        if self.rule is None:
            return False
        value, unigram = (metric_of(record, name, {}) for name in ("ppl_true", UNIGRAM))
        return value is None or value > self.rule.threshold(unigram)

    @property
    def out_of_memory(self) -> bool:
        """True if any seed ran out of memory."""
        return any(r.outcome == "out_of_memory" for r in self.records)

    @property
    def blocked(self) -> str:
        """Why there is no honest number of a seed; empty if every record has one."""
        return "; ".join(dict.fromkeys(r.reason for r in self.records if r.outcome == "blocked"))


@dataclass(frozen=True)
class Results:
    """Every cell of an exhibit, by row and column label."""

    exhibit: str
    cells: Mapping[tuple[str, str], CellResult] = field(default_factory=dict)

    def column(self, column: str) -> list[CellResult]:
        """Cells of a column that are jobs."""
        return [c for (_, name), c in self.cells.items() if name == column and not c.cell.sum_of_column]

    @functools.cached_property
    def trainings(self) -> dict[str, int]:
        """How many trainings of each model its cells are of, by the digests of weights in their records: a card that
        trains a job twice gives two models."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for result in self.cells.values():
            for record in result.records:
                for model, weights in record.weights.items():
                    found[model].add(weights)
        return {model: len(weights) for model, weights in found.items()}

    def trained_apart(self, result: CellResult) -> list[str]:
        """What has to be said of a cell beside others that are of another training of one of its models."""
        models = sorted({model for record in result.records for model in record.weights})
        return [
            f"cells here are of {count} trainings of {model}: their gap is one of trainings too"
            for model in models
            if (count := self.trainings[model]) > 1
        ]


def read_records(paths: Iterable[Path]) -> dict[str, Record]:
    """Job id -> record. Raises RecordError for a file that is no valid record, and for two of one job."""
    found: dict[str, Record] = {}
    for path in paths:
        record = read_record(path)
        if record.job_id in found:
            raise RecordError(f"{path}: a second record of {record.job_id}; keep one")
        found[record.job_id] = record
    return found


def check_asked(project: Project, records: Iterable[Path]) -> None:
    """RecordError where records are given and no exhibit has a job of any of them: a whole table would be "not run"."""
    names = [path.name for path in records if path.suffix == ".json"]
    if names and not any(name.removesuffix(".json") in project.jobs for name in names):
        raise RecordError(
            f"{names[0]}: no job of scale {project.scale.scale} and seeds {project.config.seeds}, and no other of the "
            f"{len(names)} records is of one: give --config scale=... and --config seeds=[...] as they were made with"
        )


def collect(project: Project, name: str, records: Iterable[Path]) -> Results:
    """Match records with the exhibit's cells. SpecError for a mean of columns that are not of one job."""
    by_job = read_records(records)
    _, exhibit = project.exhibit(name)
    rule, factor = project.diverged_rule(name), getattr(exhibit, "factor", 1.0)
    cells = {}
    for cell in project.cells(name):
        names = _averaged(project, name, cell)
        found = tuple(by_job[job.job_id] for job in cell.jobs if job.job_id in by_job)
        cells[cell.row, cell.column] = CellResult(
            cell,
            found,
            tuple(job.job_id for job in cell.jobs if job.job_id not in by_job),
            rule,
            cell.factor or factor,
            names,
            tuple(dict.fromkeys(d for r, job in _pairs(found, cell) for d in drift(job, r.behaviour, r.ancestors))),
            _said_of([job for _, job in _pairs(found, cell)], by_job),
        )
    return Results(name, cells)


PLATEAU = 0.9
"Share of the unigram distribution's perplexity from which a training has ended no better than that."


def _collapsed(job: Job, by_job: Mapping[str, Record]) -> tuple[float, float] | None:
    """Perplexity, and that of the unigrams, of a training that a job works on the end of and that ended no better."""
    for one in job.worked_on():
        metrics = by_job[one.job_id].metrics if one.job_id in by_job else {}
        value, unigram = metrics.get("ppl_true"), metrics.get(UNIGRAM)
        if value is not None and unigram is not None and value > PLATEAU * unigram:
            return value, unigram
    return None


def _said_of(jobs: list[Job], by_job: Mapping[str, Record]) -> str:
    """What is to be said beside a number of these jobs, one a seed, of trainings that collapsed; empty: of none."""
    found = list(filter(None, (_collapsed(job, by_job) for job in jobs)))
    if not found:
        return ""
    seeds = f" in {len(found)} of {len(jobs)} seeds" if len(jobs) > 1 else ""
    values = ", ".join(f"{value:.5g}" for value, _ in found)
    return (
        f"pre-training ended no better than token frequencies{seeds} (perplexity {values}, unigrams {found[0][1]:.5g})"
    )


def _averaged(project: Project, name: str, cell: Cell) -> tuple[str, ...]:
    """Metrics of the columns that a cell is the mean of."""
    columns = {c.column: c for c in project.cells(name) if c.row == cell.row}
    if any(columns[column].jobs != cell.jobs for column in cell.mean_of):
        raise SpecError(
            f"{name} [{cell.row}, {cell.column}]: mean_of takes metrics of one job; of {', '.join(cell.mean_of)} one "
            "has another job: leave it out"
        )
    return tuple(columns[column].metric for column in cell.mean_of)


def seed_of(job: Mapping[str, Any]) -> int:
    """A job's seed, or that of the job it works on."""
    if "seed" in job:
        return job["seed"]
    parents = [value for value in job.values() if isinstance(value, Mapping) and "kind" in value]
    return next((seed_of(parent) for parent in parents), 0)


def _pairs(records: tuple[Record, ...], cell: Cell):
    jobs = {job.job_id: job for job in cell.jobs}
    return [(record, jobs[record.job_id]) for record in records]
