"""Helpers of the tests of the training engine: a job on one CPU, its result, its task, what must be bit-equal."""

from __future__ import annotations

from pathlib import Path

import torch

from paperlm.jobs.base import Inputs, Machine, Result
from paperlm.jobs.pretrain import Pretrain, run
from paperlm.train.distributed import World
from paperlm.train.language_model import LanguageModelling

QUIET = Machine(device="cpu", progress=False)
ALONE = World(0, 1, torch.device("cpu"))


def numbers(found) -> dict:
    """What must be bit-equal between two results, or records, of one job."""
    series = {name: one.rows for name, one in found.series.items()}
    return {"metrics": found.metrics, "series": series, "outcome": found.outcome, "labels": found.labels}


def trained(job: Pretrain, manifest: Path, folder: Path, machine: Machine = QUIET, keep: tuple = ()) -> Result:
    """The job's result; its model is in folder / model, its checkpoints in folder / work."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    return run(job, Inputs(data=(manifest,), work=folder / "work", model=folder / "model", keep=keep), machine)


def task_of(job: Pretrain, manifest: Path, micro_batch: int = 0) -> LanguageModelling:
    return LanguageModelling(job, manifest, micro_batch, ALONE)
