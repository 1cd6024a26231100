"""The one schema of a pre-training record. Tables are built from records alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from paperlm.errors import RecordError
from paperlm.files import write_json
from paperlm.spec.run import BEHAVIOUR, Frozen, RunConfig

Outcome = Literal["trained", "diverged", "out_of_memory"]
OTHER_RULES = "made under other rules than this version's; delete it and run its job again"
Schema = TypeVar("Schema", bound=Frozen)


class Environment(Frozen):
    """Where a number was made. A record without it is invalid."""

    date: str
    commit: str | None
    modified: bool | None
    "True if the tree had changes that are not in the commit"
    python: str
    platform: str
    cpu: str
    device: str
    driver: str | None
    threads: int
    packages: dict[str, str]


class Cost(Frozen):
    """What the run took; the only part that differs between two runs of the same configuration on a CPU."""

    wall_seconds: float
    train_seconds: float
    tokens_per_second: float | None
    "slots a second over the updates of the last start, its first ten left out"
    flops: float
    peak_memory_mib: float
    micro_batch: int
    compiled: bool
    loss: str | None = None
    "what computed the training loss since the last start: that of the run, or cce_exact_kept in its place; none in the"
    " first records"
    world_size: int
    resumed_from: list[int] = []


class Record(Frozen):
    """One pre-training run."""

    schema_version: Literal[1] = 1
    run_id: str
    behaviour: int
    run: RunConfig
    outcome: Outcome
    metrics: dict[str, float | int | None]
    curve: dict[Literal["train", "eval"], list[list[float | None]]]
    "train: [update, real tokens, mean loss since the point before]; eval: [update, real tokens, ppl_true], and "
    "ppl_sequences where the run keeps every update"
    data: dict[str, Any]
    cost: Cost
    environment: Environment
    labels: list[str] = Field([])
    "warnings that must stand wherever the number does, e.g. a method that leaks the future"


def write_record(path: Path, record: Frozen) -> None:
    """Store atomically."""
    write_json(path, json.loads(record.model_dump_json()))


def parse_record(path: Path, schema: type[Schema]) -> Schema:
    """A stored record of a schema with `run` and `run_id`; RecordError if it is missing, damaged or of another run."""
    try:
        record = schema.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(f"{path}: no such record") from None
    except (ValidationError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[:3]
        raise RecordError(f"{path}: not a valid record ({' '.join(first)}); delete it and run its job again") from None
    if record.run.run_id != record.run_id:
        raise RecordError(f"{path}: {OTHER_RULES}")
    return record


def read_record(path: Path, expected_run: str | None = None) -> Record:
    """A stored record; RecordError if it is damaged, of another run, or made under another BEHAVIOUR number."""
    record = parse_record(path, Record)
    if record.behaviour != BEHAVIOUR:
        raise RecordError(f"{path}: {OTHER_RULES}")
    if expected_run is not None and record.run_id != expected_run:
        raise RecordError(f"{path}: is a record of {record.run_id}, not of {expected_run}; delete or rename it")
    return record
