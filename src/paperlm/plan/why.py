"""`paperlm why`: every difference between two jobs: settings, data, rules, versions, commit, hardware."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paperlm.errors import SpecError, unknown
from paperlm.jobs import Job
from paperlm.plan.project import Project
from paperlm.plan.state import State
from paperlm.record.record import Record, read_record

CHOICES = ("micro_batch", "compiled", "world_size")
"Of a record's cost: what was computed in parts or together."


def why(project: Project, first: str, second: str) -> None:
    """Print what differs between two jobs, given by id or by the path of a record. SpecError for an unknown id."""
    sides = [_side(project, name) for name in (first, second)]
    grid = Table(title=f"{first} against {second}", title_justify="left")
    for column in ("", "what", first, second):
        grid.add_column(column, overflow="fold")
    for (group, key), pair in differences(*sides).items():
        grid.add_row(group, key, *map(str, pair))
    console = Console(width=None if Console().is_terminal else 160)
    console.print(grid if grid.row_count else "no difference")
    for name, (_, record) in zip((first, second), sides, strict=True):
        if record is None:
            console.print(f"{name}: no record yet, so that only settings and data are compared")


def _side(project: Project, name: str) -> tuple[Job, Record | None]:
    if name.endswith(".json"):
        record = read_record(Path(name))
        return record.value(), record
    job = project.job_named(name)
    if job is None:
        raise SpecError(unknown("job", name, project.jobs))
    stored = State(project).stored(job)
    return job, read_record(project.root / stored.path) if stored else None


def differences(first: tuple[Job, Record | None], second: tuple[Job, Record | None]) -> dict[tuple[str, str], tuple]:
    """(group, what) -> both values, for everything that differs. A side without a record has its settings alone."""
    flat = [_flat(*side) for side in (first, second)]
    both = first[1] is not None and second[1] is not None
    keys = list(dict.fromkeys(key for side in flat for key in side))
    keys = [key for key in keys if both or key[0] in ("setting", "data")]
    pairs = {key: (flat[0].get(key, "-"), flat[1].get(key, "-")) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _flat(job: Job, record: Record | None) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    _settings(found, job, "")
    for settings in job.data():
        found["data", settings.dataset] = settings.data_id
    if record is None:
        return found
    for one in record.data:  # as it was read, which may be another than today's
        found["data", one.dataset] = one.data_id
        found |= {("data", f"{one.dataset}: {name}"): _short(value) for name, value in one.checksums.items()}
    for part, number in record.behaviour.items():
        found["rules", part] = number
    for ancestor, parts in record.ancestors.items():
        found |= {("rules", f"{ancestor}: {part}"): number for part, number in parts.items()}
    environment = record.environment.model_dump()
    found |= {("version", name): version for name, version in environment.pop("packages").items()}
    found |= {("version", name): version for name, version in record.versions.items()}
    found |= {("environment", key): value for key, value in environment.items()}
    found |= {("result", key): value for key, value in record.metrics.items()}
    found |= {("result", "outcome"): record.outcome, ("result", "reason"): record.reason}
    found["result", "labels"] = "; ".join(record.labels)
    found |= {("weights", job_id): digest for job_id, digest in record.weights.items()}
    found |= {("standard error", key): value for key, value in record.standard_errors.items()}
    for group, parts in (("series", record.series), ("answers", record.answers)):
        found |= {(group, key): _short(value.model_dump()) for key, value in parts.items()}
    cost = record.cost.model_dump()
    found |= {("machine's choice", key): cost[key] for key in CHOICES if key in cost}
    return found


def _short(value: Any) -> Any:
    """Of many numbers a digest, which says that they differ."""
    if not isinstance(value, dict | list):
        return value
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _settings(found: dict[tuple[str, str], Any], job: Job, prefix: str) -> None:
    found["setting", f"{prefix}kind"] = job.kind
    for key in type(job).model_fields:
        value = getattr(job, key)
        if isinstance(value, Job):
            _settings(found, value, f"{prefix}{key}.")
        else:
            found["setting", f"{prefix}{key}"] = value
