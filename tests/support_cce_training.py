"""Helpers of the tests of Cut Cross-Entropy's training figures: runs, made-up records, and the verdicts on them."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np

from paperlm.figures.base import write_figure
from paperlm.jobs import Inputs, Machine, Result, run_job
from paperlm.jobs.base import Job
from paperlm.jobs.pretrain import Pretrain
from paperlm.plan.project import Project
from paperlm.record.record import Environment, Record, write_record
from paperlm.result import Cost, Series

CONTROL = "CCE (No Grad. Filter)"
ROWS = ("torch.compile", "CCE", "CCE-Kahan-FullC", CONTROL)
ENVIRONMENT = Environment(
    date="2030-01-01", commit=None, modified=None, python="3", platform="x", cpu="x", device="A CARD", cuda=None,
    threads=1, packages={},
)  # fmt: skip


def trained(job: Job, manifest: Path, work: Path, model: Path | None = None, **machine: object) -> Result:
    """What the job computes, without a record; on the CPU unless told otherwise. `model`: where it leaves its model."""
    for folder in filter(None, (work, model)):
        folder.mkdir(parents=True, exist_ok=True)
    inputs = Inputs(data=(manifest,), work=work, model=model)
    return run_job(job, inputs, Machine(**{"device": "cpu", "progress": False, **machine}))


def made_up(job: Pretrain, losses: np.ndarray, final: float, final_sequences: float = 0.0) -> Record:
    """A record of these losses whose last perplexities are these."""
    slots = job.global_batch * job.seq_len
    train = [[i + 1, slots * (i + 1), float(loss)] for i, loss in enumerate(losses)]
    columns = job.series()["eval"]
    last = dict(zip(columns[2:], (final, final_sequences or 1.1 * final), strict=False))
    metrics = {**last, "tokens_nonpad": 1, "unigram_perplexity": 2e3}
    evaluations = [[job.steps // 2, 1, *(2 * value for value in last.values())], [job.steps, 2, *last.values()]]
    series = {
        "train": Series(columns=["update", "tokens", "loss"], rows=train),
        "eval": Series(columns=columns, rows=evaluations),
    }
    return Record(
        job_id=job.job_id, kind=job.kind, behaviour=job.behaviours(), job=job.canonical(), outcome="trained",
        metrics=metrics, series=series, cost=Cost(wall_seconds=1), environment=ENVIRONMENT,
    )  # fmt: skip


def records(folder: Path, above: dict[str, list[float]], between: float = 0.02, wobble: float = 0.0) -> list[Path]:
    """Records at scale gpu. above: row -> nats above torch.compile, one a seed; between: nats between seeds."""
    paths = []
    folder.mkdir(parents=True, exist_ok=True)
    for cell in Project({"scale": "gpu"}).cells("cce_figure4"):
        for job, nats in zip(cell.jobs, above.get(cell.row, []), strict=False):
            noise = np.random.default_rng(job.seed).normal(0, 0.01, job.steps)
            offset = between * (job.seed - 1) + nats
            wave = wobble * np.sin(np.arange(job.steps) / 60) * (cell.row != "torch.compile")
            losses = 3 + 8 * np.exp(-np.arange(job.steps) / 200) + offset + noise + wave
            path = folder / f"{job.job_id}.json"
            write_record(path, made_up(job, losses, 20 * math.exp(offset)))
            paths.append(path)
    return paths


def verdicts(folder: Path, figure: str, files: list[Path], scale: str = "gpu") -> dict[str, dict[str, str]]:
    write_figure(Project({"scale": scale}), figure, files, folder / f"{figure}.svg")
    rows = csv.DictReader((folder / f"{figure}.claims.csv").read_text().splitlines())
    return {row["claim"]: row for row in rows if not row["part"]}
