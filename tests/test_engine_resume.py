"""Trainings that were killed, stopped or ran out of disk: checkpoints, what continues from them, what is kept."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import smoke_run
from support_engine import numbers, start, task_of, trained, wait_for_update

from paperlm.errors import CheckpointError, Interrupted, PaperLMError
from paperlm.files import write_json
from paperlm.jobs.base import Machine
from paperlm.jobs.pretrain import Pretrain
from paperlm.record.places import Places
from paperlm.record.record import read_record
from paperlm.train import checkpoint


def test_a_job_killed_twice_ends_in_the_same_record_and_weights_bit_for_bit(manifest, prepared, tmp_path):
    job = smoke_run(steps=60, eval_every=10, norm={"name": "admin"}, numerics="fp32_master")
    unbroken = trained(job, manifest, tmp_path / "unbroken")
    places = Places(prepared, "smoke")
    for update in (6, 27):
        process = start(job, prepared)
        wait_for_update(prepared / places.work(job), update, process)
        process.kill()
        process.wait()
        assert not places.is_file(places.made(job)) and not places.is_file(places.manifest(job))
    process = start(job, prepared)
    assert process.wait(timeout=120) == 0, process.stderr.read()
    resumed = read_record(prepared / places.made(job), job.job_id)
    assert numbers(resumed) == numbers(unbroken)
    assert len(resumed.cost.resumed_from) == 2
    weights = [load_file(p / "model.safetensors") for p in (prepared / places.model(job), tmp_path / "unbroken/model")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not (prepared / places.work(job)).exists(), "finished: its checkpoints are gone"


def test_a_terminated_job_writes_a_checkpoint_and_asks_to_be_continued(prepared):
    job = smoke_run(steps=5000, eval_every=5000)
    work = prepared / Places(prepared, "smoke").work(job)
    process = start(job, prepared)
    wait_for_update(work, 3, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    assert "start again to go on" in process.stderr.read()
    state = json.loads((checkpoint.steps(work)[-1] / "state.json").read_text())
    assert state["update"] >= 3


def interrupted(job: Pretrain, manifest: Path, folder: Path, update: int, keep: tuple[int, ...] = ()) -> None:
    with pytest.raises(Interrupted):
        trained(job, manifest, folder, Machine(device="cpu", progress=False, stop_after=update), keep)


def test_an_update_that_is_kept_is_the_model_of_a_job_that_ends_there(manifest, tmp_path):
    flat = {"warmup_fraction": 0.0, "final_lr_fraction": 1.0, "eval_every": 2}
    trained(smoke_run(steps=2, **flat), manifest, tmp_path / "short")
    trained(smoke_run(steps=5, **flat), manifest, tmp_path / "long", keep=(2, 0))
    two, kept, last = (
        load_file(tmp_path / place / "model.safetensors") for place in ("short/model", "long/model/at-2", "long/model")
    )
    assert all(torch.equal(two[name], kept[name]) for name in two)
    assert not all(torch.equal(two[name], last[name]) for name in two)
    start_weights = load_file(tmp_path / "long/model/at-0/model.safetensors")
    fresh = task_of(smoke_run(steps=5, **flat), manifest).model
    assert all(torch.equal(start_weights[name], p) for name, p in fresh.named_parameters() if name in start_weights)


def test_a_snapshot_that_is_asked_for_after_a_checkpoint_beyond_it_is_still_made(manifest, tmp_path):
    job = smoke_run(steps=6)
    interrupted(job, manifest, tmp_path, 4)
    assert trained(job, manifest, tmp_path, keep=(2,)).outcome == "trained"
    trained(job, manifest, tmp_path / "unbroken", keep=(2,))
    for place in ("model/at-2", "model"):
        one, other = (load_file(p / place / "model.safetensors") for p in (tmp_path, tmp_path / "unbroken"))
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_of_several_snapshots_that_are_asked_for_later_the_first_one_is_made_too(manifest, tmp_path):
    """It lies before the newest checkpoint, the second behind it."""
    job = smoke_run(steps=6)
    interrupted(job, manifest, tmp_path, 4)
    assert trained(job, manifest, tmp_path, keep=(2, 5)).outcome == "trained"
    assert all((tmp_path / f"model/at-{update}/model.safetensors").is_file() for update in (2, 5))


def test_a_snapshot_that_is_asked_for_at_the_update_of_a_checkpoint_is_made_from_it(manifest, tmp_path):
    job = smoke_run(steps=6)
    interrupted(job, manifest, tmp_path, 4)
    assert trained(job, manifest, tmp_path, keep=(4,)).cost.resumed_from == [4]
    assert (tmp_path / "model/at-4/model.safetensors").is_file()


def test_a_checkpoint_of_another_job_is_refused_and_left_alone(manifest, tmp_path):
    interrupted(smoke_run(steps=6), manifest, tmp_path, 2)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match=r"differs in peak_lr.*move the folder away"):
        trained(smoke_run(steps=6, peak_lr=1e-4), manifest, tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_checkpoint_of_earlier_rules_is_not_continued_under_todays(manifest, tmp_path, monkeypatch):
    interrupted(smoke_run(steps=6), manifest, tmp_path, 2)
    monkeypatch.setattr(Pretrain, "behaviour", Pretrain.behaviour + 1)
    with pytest.raises(CheckpointError, match=r"made under earlier rules .*delete .*work: training starts anew"):
        trained(smoke_run(steps=6), manifest, tmp_path)


@pytest.mark.parametrize("damage", ["truncate", "alter"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(manifest, tmp_path, damage):
    job = smoke_run(steps=6)
    unbroken = trained(job, manifest, tmp_path / "unbroken")
    for update in (2, 4):
        interrupted(job, manifest, tmp_path / "run", update)
    newest = checkpoint.steps(tmp_path / "run/work")[-1]
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "model.safetensors").write_bytes(content[:-9] if damage == "truncate" else content)
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: missing, truncated or altered; delete .*step-00000002"
    ):
        trained(job, manifest, tmp_path / "run")
    shutil.rmtree(newest)
    assert numbers(trained(job, manifest, tmp_path / "run")) == numbers(unbroken)


@pytest.mark.parametrize(
    "damage", [lambda text: text[:40], lambda text: text.replace("behaviour", "behavior"), lambda text: "[]"]
)
def test_a_damaged_checkpoint_state_is_named(manifest, tmp_path, damage):
    interrupted(smoke_run(steps=6), manifest, tmp_path, 2)
    state = checkpoint.steps(tmp_path / "work")[-1] / "state.json"
    state.write_text(damage(state.read_text()))
    with pytest.raises(CheckpointError, match=r"state.json: truncated or altered; delete"):
        trained(smoke_run(steps=6), manifest, tmp_path)


def test_a_full_disk_keeps_the_checkpoint_before_and_says_how_to_go_on(manifest, tmp_path):
    job = smoke_run(steps=6)
    interrupted(job, manifest, tmp_path, 2)
    kept = checkpoint.steps(tmp_path / "work")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # a file cannot grow beyond this: EFBIG
    try:
        with pytest.raises(PaperLMError, match="no space left for the checkpoint"):
            trained(job, manifest, tmp_path, Machine(device="cpu", progress=False, stop_after=4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kept and checkpoint.steps(tmp_path / "work") == kept
    assert trained(job, manifest, tmp_path).metrics["updates"] == 6


def test_a_full_disk_leaves_the_old_file_whole(tmp_path):
    target = tmp_path / "record.json"
    write_json(target, {"old": True})
    (tmp_path / ".record.json.tmp").symlink_to("/dev/full")
    with pytest.raises(PaperLMError, match="no space left to write"):
        write_json(target, {"new": "x" * 100_000})
    assert json.loads(target.read_text()) == {"old": True}
