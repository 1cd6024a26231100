"""Many jobs that are started at the same time, of a model that none of them finds made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import copy_tracked, smoke_run
from support_workflow import clone_environment

from paperlm.jobs import Job, Machine, parse_job
from paperlm.record.places import Places
from paperlm.record.record import read_record
from paperlm.run import Maker


def evaluations() -> list[Job]:
    """Ten of one model, none of which has its data, its parent or its record."""
    of = smoke_run(steps=5, eval_every=2, train_examples=40, validation_tokens=600).canonical()
    asked = {"kind": "lm_eval", "of": of, "tasks": ["arc_easy"], "source": "bundled", "max_length": 64}
    return [parse_job(asked | {"items": 3 + n % 5, "few_shot": n // 5}) for n in range(10)]


def outcome(root: Path, job: Job) -> dict[str, Any]:
    path = root / Places(root, "smoke").made(job)
    return read_record(path, job.job_id).model_dump(exclude={"cost", "environment"})


@pytest.mark.slow
def test_ten_evaluations_at_once_end_as_one_after_the_other_do(tmp_path):
    clone, alone, jobs = copy_tracked(tmp_path / "clone"), tmp_path / "alone", evaluations()
    assert len({job.job_id for job in jobs}) == 10
    command = [sys.executable, "-m", "paperlm", "run", "--scale", "smoke", "--with-parents", "--device", "cpu", "--job"]
    running = [
        subprocess.Popen(
            [*command, json.dumps(job.canonical())], cwd=clone, env=clone_environment(clone), text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for job in jobs
    ]  # fmt: skip
    said = [process.communicate(timeout=900)[1] for process in running]
    assert [process.returncode for process in running] == [0] * 10, said
    for job in jobs:
        Maker(Places(alone, "smoke"), Machine(device="cpu", progress=False)).with_parents(job)
        assert outcome(clone, job) == outcome(alone, job)
    (parent,) = {job.of.job_id for job in jobs}
    assert outcome(clone, jobs[0].of) == outcome(alone, jobs[0].of)
    assert not [*(clone / "results").rglob(".*.tmp")] and (clone / f"results/smoke/models/{parent}").is_dir()
