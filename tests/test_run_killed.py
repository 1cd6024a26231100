"""A job that was killed goes on where it stopped, and of two processes that want one job, one makes it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import job_environment
from support_jobs import folder_of, made, maker, model

from paperlm.jobs import Job
from paperlm.record.places import Places


@pytest.fixture(autouse=True)
def _toys(toy_kinds):
    """Every test here has the toy kinds."""


def start(root: Path, kinds: Path, job: Job, **environment: str) -> subprocess.Popen:
    script = Path(__file__).with_name("support_jobs.py")
    command = [sys.executable, script, kinds, root, json.dumps(job.canonical())]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        list(map(str, command)), env=job_environment(**environment), stdout=pipe, stderr=pipe, text=True
    )


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)


def test_a_job_killed_in_the_middle_and_started_again_gives_the_same_record(tmp_path, toy_kinds):
    job = model(steps=40)
    maker(tmp_path / "unbroken").make(job)
    far = tmp_path / Places(tmp_path, "smoke").work(job) / "count.json"
    process = start(tmp_path, toy_kinds, job, TOY_PAUSE="0.05")
    wait_for(lambda: far.is_file() and far.read_text() and int(far.read_text()) > 3, process)
    process.kill()
    process.wait()
    assert not folder_of(tmp_path, job).exists() and not (tmp_path / Places(tmp_path, "smoke").made(job)).exists()
    again = start(tmp_path, toy_kinds, job)
    out, errors = again.communicate(timeout=60)
    assert again.returncode == 0, errors
    assert int(out.split()[-1]) > 3, "it went on, and did not begin anew"
    broken, whole = made(tmp_path, job), made(tmp_path / "unbroken", job)
    assert broken.model_copy(update={"cost": whole.cost}) == whole.model_copy(
        update={"environment": broken.environment}
    )
    files = [
        json.loads((folder_of(root, job) / "manifest.json").read_text()) for root in (tmp_path, tmp_path / "unbroken")
    ]
    assert files[0] == files[1]


def test_of_two_processes_one_makes_the_job_and_the_other_waits(tmp_path, toy_kinds):
    job = model(steps=30)
    first = start(tmp_path, toy_kinds, job, TOY_PAUSE="0.1")
    far = tmp_path / Places(tmp_path, "smoke").work(job) / "count.json"
    wait_for(far.is_file, first)
    second = start(tmp_path, toy_kinds, job, TOY_PAUSE="0.1")
    _, said = second.communicate(timeout=60)
    assert second.returncode == 0 and first.wait(timeout=60) == 0, said
    assert "another process is making it; waiting" in said and "another process has made it" in said
    assert made(tmp_path, job).metrics["count"] == 30


def test_a_process_that_waited_for_one_that_died_makes_the_job_itself(tmp_path, toy_kinds):
    job = model(steps=400)
    first = start(tmp_path, toy_kinds, job, TOY_PAUSE="0.02")
    far = tmp_path / Places(tmp_path, "smoke").work(job) / "count.json"
    wait_for(far.is_file, first)
    second = start(tmp_path, toy_kinds, job)
    assert "waiting" in second.stderr.readline()
    first.kill()
    first.wait()
    assert second.wait(timeout=60) == 0
    assert made(tmp_path, job).metrics["count"] == 400
