"""Jobs and the cards of a machine: never more of them compute at once than there are cards."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from support import job_environment

from paperlm.plan.project import Project
from paperlm.plan.workflow import Workflow


def test_on_gpus_a_job_claims_so_many_threads_that_no_card_is_idle_and_few_jobs_wait(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    plan = Workflow(Project({"scale": "gpu", "run_missing": "no"}))
    assert [plan.threads_per_job(cores) for cores in (8, 2, 1, None)] == [4, 1, 1, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    plan = Workflow(Project({"scale": "gpu", "run_missing": "no"}))
    for cores in range(3, 20):
        at_once = cores // plan.threads_per_job(cores)
        assert at_once >= 3, "no card is idle"
        assert at_once == 3 or cores % 3, "where they divide evenly nobody waits for one"
    assert Workflow(Project({"scale": "tiny"})).threads_per_job(8) == 1


def test_two_jobs_take_two_cards_and_a_third_waits(monkeypatch, tmp_path):
    from paperlm.train.gpu_lock import one_gpu

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    for name in ("RANK", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with one_gpu(folder=tmp_path) as first:
        assert first == os.environ["CUDA_VISIBLE_DEVICES"] == "4"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
        with one_gpu(folder=tmp_path) as second:
            assert second == "7"
            code = (
                "import pathlib, sys; from paperlm.train.gpu_lock import one_gpu\n"
                "with one_gpu(folder=pathlib.Path(sys.argv[1])) as card: print(card)"
            )
            environment = job_environment(CUDA_VISIBLE_DEVICES="4,7")
            third = subprocess.Popen(
                [sys.executable, "-c", code, tmp_path], env=environment, stdout=subprocess.PIPE, text=True
            )
            time.sleep(2.5)
            assert third.poll() is None, "no card is free"
        assert third.communicate(timeout=30)[0].strip() == "7"
