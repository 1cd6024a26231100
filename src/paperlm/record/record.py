"""The one schema of a record: what a job computed. Tables and figures are built from records alone.

A record carries its own checksum. Those that were committed before records had one are listed with theirs in
paper_tables/records/SHA256SUMS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from paperlm_kernels.seal import SEAL, is_sealed, sealed
from pydantic import Field, ValidationError

from paperlm.errors import RecordError, SpecError
from paperlm.files import SUMS, listed_sums, sha256_of, write_json
from paperlm.frozen import Frozen
from paperlm.jobs import job_from
from paperlm.jobs.base import Job
from paperlm.record.plausible import wrong_with
from paperlm.result import Answers, Cost, Outcome, Series


class Environment(Frozen):
    """Where a number was made. A record without it is invalid."""

    date: str
    commit: str | None
    modified: bool | None
    """True if the tree had changes that are not in the commit, or the code changed while the job was made;
    None: not known"""
    source: str | None = None
    "digest of both packages' modules; None: the record is older than this field"
    python: str
    platform: str
    cpu: str
    device: str
    cuda: str | None
    "version of CUDA that PyTorch was built with; None on a CPU"
    threads: int
    packages: dict[str, str]


class DataUsed(Frozen):
    """One prepared data set that a job read."""

    data_id: str
    dataset: str
    licence: str
    checksums: dict[str, Any]


class Record(Frozen):
    """One job's numbers, what made them, and where."""

    schema_version: Literal[2] = 2
    job_id: str
    kind: str
    behaviour: dict[str, int]
    "Job.behaviours() at the time"
    ancestors: dict[str, dict[str, int]] = {}
    "job id -> behaviours that the model worked on was made under"
    weights: dict[str, str] = {}
    """job of a model, its own, that worked on, and those it was made from (`model_store.weights_of`) -> digest of its
    files of tensors: a card that trains a job twice gives two; empty: there is none, or the record is older"""
    job: dict[str, Any]
    "Job.canonical()"
    outcome: Outcome
    reason: str = ""
    metrics: dict[str, float | int | None] = {}
    standard_errors: dict[str, float] = {}
    series: dict[str, Series] = {}
    answers: dict[str, Answers] = {}
    "metric -> which items were answered rightly; empty: not kept, as by records that are older than this field"
    labels: list[str] = Field([])
    "warnings that must stand wherever the number does, e.g. a method that leaks the future"
    versions: dict[str, str] = {}
    "beyond those of packages, e.g. of evaluation tasks"
    data: list[DataUsed] = []
    cost: Cost
    environment: Environment

    def value(self) -> Job:
        """The job."""
        return job_from(self.job)


def write_record(path: Path, record: Record) -> None:
    """Store atomically, sealed."""
    write_json(path, sealed(json.loads(record.model_dump_json())))


def read_record(path: Path, expected: str | None = None) -> Record:
    """A stored record; RecordError if it is missing, altered, not of the job that its name or `expected` says, or says
    what no job can have measured (`paperlm.record.plausible`)."""
    again = "delete it and run its job again"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(f"{path}: no such record") from None
    except IsADirectoryError:
        raise RecordError(f"{path}: a folder in place of a record; move it away") from None
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror}); {again}") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not a valid record ({error}); {again}") from None
    record = _parsed(path, found, again)
    try:
        job = record.value()
    except (SpecError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise RecordError(f"{path}: describes no job that is known here ({first}); delete it") from None
    if job.job_id != record.job_id:
        raise RecordError(
            f"{path}: says it is {record.job_id}, but its settings and data are {job.job_id}'s; delete it and make it "
            "again"
        )
    if expected is not None and record.job_id != expected:
        raise RecordError(f"{path}: is a record of {record.job_id}, not of {expected}; delete or rename it")
    if wrong := wrong_with(record, job):
        raise RecordError(f"{path}: not a valid record ({wrong}); {again}")
    return record


def _parsed(path: Path, found: Any, again: str) -> Record:
    """RecordError for what has another checksum than its own or the listed one, and for what is no record."""
    if isinstance(found, dict) and SEAL in found:
        if not is_sealed(found):
            raise RecordError(f"{path}: not a valid record (altered: its checksum is another one); {again}")
        del found[SEAL]
    else:
        folder = path.absolute().parent.parent.parent
        listed = listed_sums(folder / SUMS, RecordError).get(path.absolute().relative_to(folder).as_posix())
        if listed is None:
            raise RecordError(f"{path}: not a valid record (no checksum of itself, and none in {SUMS}); {again}")
        if sha256_of(path) != listed:
            raise RecordError(f"{path}: not a valid record (altered: {SUMS} has another checksum); restore it with git")
    try:
        return Record.model_validate(found)
    except ValidationError as error:
        first = " ".join(str(error).splitlines()[:3])
        raise RecordError(f"{path}: not a valid record ({first}); {again}") from None


def behaviours_of_ancestors(job: Job) -> dict[str, dict[str, int]]:
    """Ancestor's name -> the behaviours that it would be made under now."""
    return {ancestor.job_id: ancestor.behaviours() for ancestor in job.ancestors()}


def drift(job: Job, behaviour: Mapping[str, int], ancestors: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What has changed since a record of the job was made: `pretrain 1 -> 2` of itself or of an ancestor."""
    pairs = [("", behaviour, job.behaviours())]
    pairs += [(f"{name}: ", ancestors.get(name, {}), now) for name, now in behaviours_of_ancestors(job).items()]
    return [
        f"{who}{part} {then.get(part, 'none')} -> {number}"
        for who, then, now in pairs
        for part, number in now.items()
        if then.get(part) != number
    ]
