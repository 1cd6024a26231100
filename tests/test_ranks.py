"""Several processes of one job: they agree before they join a group, and hold a card each."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import is_free, job_environment, smoke_run

from paperlm import ranks
from paperlm.errors import JobError
from paperlm.jobs import Machine
from paperlm.locks import held
from paperlm.record.places import Places
from paperlm.run import Maker


def torchrun(count: int, code: Path, *arguments: object, **environment: str) -> subprocess.Popen:
    """So many processes of a Python file, under torchrun."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        count,
        code,
        *arguments,
    ]
    words = list(map(str, command))
    inside = job_environment(**environment)
    return subprocess.Popen(words, env=inside, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen, seconds: float = 200) -> str:
    """What a process said that ended well in time."""
    try:
        out, said = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, out + said
    return out + said


def written(folder: Path, count: int) -> list[object]:
    """What each process wrote, in order of rank."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def test_a_process_that_is_alone_decides_for_itself(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ranks.agreed(lambda: ["mine"]) == ["mine"]


def test_several_processes_that_torchrun_did_not_start_are_refused_in_words(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    ranks._store.cache_clear()
    with pytest.raises(JobError, match="WORLD_SIZE is 2, and this is no process of torchrun"):
        ranks.agreed(lambda: True)


AGREE = """
import json, os, pathlib, sys, time
from paperlm.ranks import agreed
from paperlm.train.gpu_lock import gpus_of_job

rank, folder, locks = os.environ["RANK"], *map(pathlib.Path, sys.argv[1:])
slow = lambda: (time.sleep(2), f"of {rank}")[1]
answers = [agreed(slow), agreed(lambda: [rank, "second"]), agreed(lambda: None)]
with gpus_of_job(folder=locks):
    seen = os.environ["CUDA_VISIBLE_DEVICES"]
    (folder / f"{rank}.json").write_text(json.dumps([answers, seen]))
    while not (folder / "go").exists():
        time.sleep(0.1)
(folder / f"{rank}.after").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
"""


def test_all_processes_have_the_leaders_answers_and_hold_a_free_card_each_until_the_job_ends(tmp_path):
    """Each question has its own answer, also one that takes long; of cards 4, 7 and 9 another job has the first."""
    locks = tmp_path / "locks"
    locks.mkdir()
    code = tmp_path / "main.py"
    code.write_text(AGREE)
    with (locks / "4.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        outside = {name: "" for name in ("SLURM_JOB_ID",) if name in os.environ}
        process = torchrun(2, code, tmp_path, locks, CUDA_VISIBLE_DEVICES="4,7,9", **outside)
        until(lambda: all((tmp_path / f"{rank}.json").is_file() for rank in range(2)), process)
        time.sleep(0.2)
        assert written(tmp_path, 2) == [[["of 0", ["0", "second"], None], "7,9"]] * 2
        assert not is_free(locks / "7.lock") and not is_free(locks / "9.lock")
        assert is_free(locks / "7.users") and not is_free(locks / "9.users"), "the second holds its own"
        (tmp_path / "go").touch()
        ended(process)
    assert is_free(locks / "7.lock") and is_free(locks / "9.lock")
    assert [(tmp_path / f"{rank}.after").read_text() for rank in range(2)] == ["4,7,9"] * 2


def until(holds, process: subprocess.Popen, seconds: float = 120) -> None:
    """Wait until something is so while a process runs."""
    end = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.1)


MAIN = """
import sys
from pathlib import Path
from paperlm.plan import project
project.ROOT = Path({root!r})
from paperlm.cli import main
sys.exit(main())
"""


def arguments(job: object) -> Sequence[str]:
    return "run", "--job", json.dumps(job.canonical()), "--scale", "smoke", "--device", "cpu"


def test_a_job_that_another_process_made_meanwhile_leaves_no_process_waiting(prepared, tmp_path):
    """The second of its processes never looks at the lock: it would join a group that the first never joins."""
    job, other = smoke_run(), tmp_path / "other"
    shutil.copytree(prepared / "results", other / "results")
    Maker(Places(other, "smoke"), Machine(device="cpu", progress=False)).make(job)
    places = Places(prepared, "smoke")
    code = tmp_path / "main.py"
    code.write_text(MAIN.format(root=str(prepared)))
    with held(prepared / places.lock(job), job.job_id):
        process = torchrun(2, code, *arguments(job))
        said = process.stderr.readline()
        while "waiting" not in said:
            assert said, process.communicate()
            said = process.stderr.readline()
        for made in ("models", "pretrain"):
            shutil.copytree(other / f"results/smoke/{made}", prepared / f"results/smoke/{made}")
        before = (prepared / places.made(job)).read_bytes()
    assert "another process has made it" in ended(process, 60)
    assert (prepared / places.made(job)).read_bytes() == before
    assert not (prepared / places.work(job)).exists(), "nothing was begun"


def test_a_job_that_three_processes_cannot_share_is_refused_before_they_meet(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    maker = Maker(Places(prepared, "smoke"), Machine(device="cpu", progress=False))
    with pytest.raises(JobError, match="global_batch 4 does not split over 3 processes"):
        maker.make(smoke_run())
    monkeypatch.setenv("WORLD_SIZE", "2")
    stored = smoke_run(
        optimizer="sgd", adam_betas=None, adam_eps=None, weights="raw", numerics="pure_bf16", grad_clip=0.0
    )
    with pytest.raises(JobError, match="weights raw lie in stores, whose gradients processes do not exchange"):
        maker.make(stored)
    lomo = stored.model_copy(update={"optimizer": "lomo"})
    with pytest.raises(JobError, match="optimizer lomo takes the sequences of an update in one pass"):
        maker.make(lomo)
