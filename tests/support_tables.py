"""Helpers of the tests of tables: made-up records of pre-training, and papers that exist only in a test."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import yaml
from support import copy_declarations

from paperlm.jobs import Job
from paperlm.plan.project import Project
from paperlm.record.record import Environment, Record, behaviours_of_ancestors, write_record
from paperlm.result import Cost, Series

ENVIRONMENT = Environment(
    date="2026-01-01", commit=None, modified=None, python="3", platform="x", cpu="x", device="x", cuda=None,
    threads=1, packages={},
)  # fmt: skip
BATCHES = 200
"Batches of the published runs' evaluation, as the paper file says of every size."
TRUE = 1.02
"Token-weighted perplexity of a made-up record over that in the paper's form: one in place of the other shows."


def record_of(job: Job, metrics: dict[str, float | None] | None = None, **fields: object) -> Record:
    """A record of a job; only its numbers matter."""
    values = {
        "job_id": job.job_id, "kind": job.kind, "behaviour": job.behaviours(),
        "ancestors": behaviours_of_ancestors(job), "job": job.canonical(), "outcome": "measured",
        "metrics": metrics or {}, "cost": Cost(wall_seconds=1), "environment": ENVIRONMENT,
    }  # fmt: skip
    return Record(**values | fields)


def pretrained(job: Job, ppl: float, form: str = "ppl_true", **fields: object) -> Record:
    """A record whose perplexity in that form, ppl_true or ppl_paper, is `ppl`; infinite: a loss was no number."""
    finite = math.isfinite(ppl)
    true, printed = (ppl, ppl / TRUE) if form == "ppl_true" else (ppl * TRUE, ppl)
    metrics = {
        "ppl_true": true if finite else None,
        "loss_batches": math.log(printed) * (BATCHES + 1) / BATCHES if finite else None,
        "tokens_nonpad": 1_100_000_000 + 1_000_000 * job.seed, "unigram_perplexity": 1400.0,
    }  # fmt: skip
    last = true if finite else None
    series = {
        "train": Series(columns=["update", "tokens", "loss"], rows=[[1, 10, 6.0], [2, 20, 5.0 if finite else None]]),
        "eval": Series(columns=["update", "tokens", "ppl_true"], rows=[[2, 20, last]]),
    }
    common = {"series": series, "outcome": "trained" if finite else "not_finite"}
    return record_of(job, metrics, **common | fields)


def write_records(
    project: Project, folder: Path, value: Callable[[str, str, int], float | None], table: str = "mixln_table1"
) -> list[Path]:
    """A record for every job whose value(row, column, seed), in the form that the table shows, is not None."""
    paths, form = [], "ppl_paper" if project.scale.comparable else "ppl_true"
    for cell in project.cells(table):
        for job in cell.jobs:
            made = value(cell.row, cell.column, job.seed)
            if made is not None:
                paths.append(folder / f"{job.job_id}.json")
                write_record(paths[-1], pretrained(job, made, form))
    return paths


def edited(tmp_path: Path, paper: str, edit: Callable[[dict], None]) -> Path:
    """A copy of the declarations with an edited paper file; returns its root."""
    path = copy_declarations(tmp_path) / f"workflow/papers/{paper}.yaml"
    content = yaml.safe_load(path.read_text())
    edit(content)
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return tmp_path
