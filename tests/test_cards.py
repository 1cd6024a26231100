"""Jobs and the cards of a machine: never more of them compute at once than there are cards."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time

import pytest
from support import is_free, job_environment

from paperlm.errors import JobError
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


def test_of_jobs_that_take_several_cards_one_collects_at_a_time_so_that_none_waits_for_ever(tmp_path):
    """Two that held one card each would wait for the other's."""

    def taker(cards: str) -> subprocess.Popen:
        code = (
            "import pathlib, sys; from paperlm.train.gpu_lock import some_gpus\n"
            "print('begins', flush=True)\n"
            "with some_gpus(2, folder=pathlib.Path(sys.argv[1])) as cards: print(cards)"
        )
        environment = job_environment(CUDA_VISIBLE_DEVICES=cards)
        environment.pop("SLURM_JOB_ID", None)
        return subprocess.Popen(
            [sys.executable, "-c", code, tmp_path], env=environment, stdout=subprocess.PIPE, text=True
        )

    with (tmp_path / "7.lock").open("w") as another:
        fcntl.flock(another, fcntl.LOCK_EX)
        first = taker("4,7")
        while is_free(tmp_path / "4.lock"):
            time.sleep(0.1)
        second = taker("7,9")
        assert second.stdout.readline() == "begins\n"
        time.sleep(2.5)
        assert is_free(tmp_path / "9.lock"), "the second waits with none in hand"
        assert first.poll() is second.poll() is None
    assert first.communicate(timeout=30)[0] == "begins\n['4', '7']\n"
    assert second.communicate(timeout=30)[0] == "['7', '9']\n"


def test_more_processes_than_cards_are_refused(monkeypatch, tmp_path):
    from paperlm.train.gpu_lock import some_gpus

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with (
        pytest.raises(JobError, match="3 processes need a GPU each, and there are 2 here"),
        some_gpus(3, folder=tmp_path),
    ):
        pass


def test_jobs_in_an_allocation_of_slurm_share_its_cards_and_none_with_another_allocation(monkeypatch, tmp_path):
    """Cards of an allocation may be numbered from 0, as those of its neighbour on the same machine are."""
    from paperlm.train.gpu_lock import some_gpus

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    code = "from paperlm.train.gpu_lock import one_gpu\nwith one_gpu() as card: print(card)"

    def one(allocation: str) -> subprocess.Popen:
        environment = job_environment(CUDA_VISIBLE_DEVICES="0,1", SLURM_JOB_ID=allocation, TMPDIR=str(tmp_path))
        return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)

    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with some_gpus(2) as held:
        assert held == ["0", "1"], "a job of all cards holds them, too"
        same, other = one("1"), one("2")
        assert other.communicate(timeout=30)[0] == "0\n"
        time.sleep(2.5)
        assert same.poll() is None
    assert same.communicate(timeout=30)[0] == "0\n"


def test_a_card_is_not_free_while_a_process_of_a_job_whose_first_process_ended_still_uses_it(monkeypatch, tmp_path):
    from paperlm.train.gpu_lock import some_gpus

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    with (tmp_path / "4.users").open("w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        with some_gpus(1, folder=tmp_path) as held:
            assert held == ["7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    with some_gpus(1, folder=tmp_path) as held:
        assert held == ["4"]


def test_a_card_is_known_by_its_uuid_whatever_number_it_has_here(monkeypatch):
    from paperlm.train.gpu_lock import lock_names

    said = (
        "GPU 0: NVIDIA H100 (UUID: GPU-aa-1)\nGPU 1: NVIDIA H100 (UUID: GPU-bb-2)\n  MIG 1g Device 0: (UUID: MIG-c)\n"
    )
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, said))
    assert lock_names(["1", "0", "GPU-dd-4"]) == {"1": "GPU-bb-2", "0": "GPU-aa-1", "GPU-dd-4": "GPU-dd-4"}
    assert lock_names(["3"]) == {"3": "slurm5-3"}, "of one that is not told"
