"""Helpers of the tests of the training engine: a job on one CPU, its result, its task, what must be bit-equal."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from support import job_environment

from paperlm.jobs import Job
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.pretrain import Pretrain, run
from paperlm.result import Result
from paperlm.train import checkpoint
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


def start(job: Job, root: Path, *more: str) -> subprocess.Popen:
    """`paperlm run` of a job whose data is prepared, with everything below `root`."""
    code = (
        "import sys; from pathlib import Path; from paperlm.plan import project; root = sys.argv.pop(1); "
        "project.ROOT = Path(root); from paperlm.cli import main; sys.exit(main())"
    )
    command = [
        sys.executable, "-c", code, root, "run", "--job", json.dumps(job.canonical()), "--scale", "smoke",
        "--device", "cpu", "--checkpoint-updates", "3", *more,
    ]  # fmt: skip
    return subprocess.Popen(list(map(str, command)), env=job_environment(), stderr=subprocess.PIPE, text=True)


def wait_for_update(folder: Path, update: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not any(int(p.name[5:]) >= update for p in checkpoint.steps(folder)):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.005)
