"""The training loop: schedule, loss weighting, resume, divergence, bad checkpoints, many processes."""

from __future__ import annotations

import json
import math
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support import job_environment, smoke_run

from paperlm.data.prepare import prepare
from paperlm.errors import CheckpointError, DataError, PaperLMError
from paperlm.evaluate.perplexity import ValidationLosses, perplexity
from paperlm.files import write_json
from paperlm.record.record import read_record, write_record
from paperlm.spec.run import RunConfig
from paperlm.train import checkpoint
from paperlm.train.distributed import World
from paperlm.train.loop import Execution, Interrupted, Trainer, pretrain
from paperlm.train.schedule import learning_rate

QUIET = Execution(device="cpu", progress=False)
ALONE = World(0, 1, torch.device("cpu"))


def numbers(record) -> dict:
    """What must be bit-equal between two runs of one configuration."""
    return {"metrics": record.metrics, "curve": record.curve, "outcome": record.outcome, "run": record.run_id}


# -- schedule ----


def test_the_rate_starts_at_zero_peaks_after_warm_up_and_ends_near_a_tenth():
    run = smoke_run(steps=20_000, peak_lr=1e-3, warmup_fraction=0.1, final_lr_fraction=0.1)
    assert learning_rate(0, run) == 0.0
    assert learning_rate(1000, run) == pytest.approx(5e-4)
    assert learning_rate(2000, run) == 1e-3
    assert learning_rate(11_000, run) == pytest.approx(1e-3 * (0.1 + 0.9 / 2))  # cos(pi/2) = 0
    assert learning_rate(19_999, run) == pytest.approx(1e-4, rel=1e-4)


def test_without_warm_up_the_first_update_has_the_peak_rate():
    assert learning_rate(0, smoke_run(warmup_fraction=0.0)) == smoke_run().peak_lr


# -- the loss and its weights ----


@pytest.fixture(scope="module")
def ragged(tmp_path_factory) -> Path:
    """Tokens whose examples are of many lengths: the last pieces of documents are padded."""
    settings = smoke_run(example="split", seq_len=64, train_examples=400).data_settings()
    return prepare(settings, tmp_path_factory.mktemp("ragged"))


def ragged_run(**changes: object) -> RunConfig:
    return smoke_run(example="split", seq_len=64, train_examples=400, seed=3, **changes)


def written_out_loss(trainer: Trainer, update: int) -> float:
    """Mean over groups of the group's token mean, in float64, one sequence at a time."""
    model = trainer.model.double()
    ids = trainer.train_shards.rows(trainer.order.indices(update))
    group_means = []
    for start in range(0, len(ids), trainer.run.loss_group):
        losses = []
        for row in ids[start : start + trainer.run.loss_group]:
            real = row[row != trainer.train_shards.pad_id]
            logits = model(torch.tensor(real)[None]).logits[0].log_softmax(-1)
            losses += [-logits[t, real[t + 1]].item() for t in range(len(real) - 1)]
        group_means.append(sum(losses) / len(losses))
    return sum(group_means) / len(group_means)


@pytest.mark.parametrize("loss_group", [1, 2, 32])
def test_an_updates_loss_is_the_mean_over_groups_of_the_groups_token_mean(ragged, tmp_path, loss_group):
    # A large start makes the losses of sequences differ, so that the weighting shows.
    run = ragged_run(global_batch=32, loss_group=loss_group, initializer_range=0.5)
    loss = Trainer(run, ragged, tmp_path, QUIET, ALONE).step().item()
    with torch.no_grad():
        truth = written_out_loss(Trainer(run, ragged, tmp_path, QUIET, ALONE), 0)
    assert loss == pytest.approx(truth, rel=1e-5)


def test_the_loss_group_is_not_a_detail(ragged, tmp_path):
    runs = [ragged_run(global_batch=32, loss_group=group, initializer_range=0.5) for group in (1, 32)]
    one, all_of_them = (Trainer(run, ragged, tmp_path, QUIET, ALONE).step().item() for run in runs)
    assert abs(one / all_of_them - 1) > 1e-3


@pytest.mark.parametrize("micro", [1, 2])
def test_the_micro_batch_changes_gradients_by_rounding_only(ragged, tmp_path, micro):
    run = ragged_run(global_batch=32, loss_group=4)
    gradients = []
    for size in (4, micro):
        trainer = Trainer(run, ragged, tmp_path, Execution(device="cpu", micro_batch=size, progress=False), ALONE)
        trainer.optimizer.zero_grad = lambda: None
        trainer.step()
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-7)
    assert gradients[0].norm() > 0.01


def test_a_micro_batch_that_does_not_divide_the_group_is_refused(manifest, tmp_path):
    with pytest.raises(DataError, match="micro_batch 3 must divide the loss group 2"):
        Trainer(smoke_run(), manifest, tmp_path, Execution(device="cpu", micro_batch=3), ALONE)


def test_the_first_update_of_a_warm_up_changes_no_weight(manifest, tmp_path):
    trainer = Trainer(smoke_run(steps=10), manifest, tmp_path, QUIET, ALONE)
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    trainer.step()
    assert not all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_pure_bf16_keeps_weights_and_moments_in_bf16_and_fp32_master_in_fp32(manifest, tmp_path):
    for numerics, dtype in (("pure_bf16", torch.bfloat16), ("fp32_master", torch.float32)):
        trainer = Trainer(smoke_run(numerics=numerics), manifest, tmp_path, QUIET, ALONE)
        assert trainer.step().item() == pytest.approx(math.log(1024), rel=0.02)
        assert {p.dtype for p in trainer.model.parameters()} == {dtype}
        moments = {s["exp_avg_sq"].dtype for s in trainer.optimizer.state.values()}
        assert moments == {dtype}


def test_bf16_second_moments_do_not_decay(manifest, tmp_path):
    """0.999 v rounds back to v in bfloat16: the sticky maximum that pure_bf16 training lives with."""
    parameter = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([parameter], lr=1e-3, fused=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = optimizer.state[parameter]["exp_avg_sq"].clone()
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(100):
        optimizer.step()
    assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], before)


# -- evaluation ----


def test_the_papers_perplexity_differs_by_n_over_n_plus_one_exactly():
    losses = ValidationLosses(np.full(10, 31 * 3.3), np.full(10, 31))
    assert losses.loss_paper(400, 5) == pytest.approx(losses.loss_true() * 400 / 401, rel=1e-15)
    # A true perplexity of 27 prints as 26.78 at n = 400 and 26.13 at n = 100.
    at_27 = ValidationLosses(np.full(4, math.log(27)), np.ones(4))
    assert round(perplexity(at_27.loss_paper(400, 4)), 2) == 26.78
    assert round(perplexity(at_27.loss_paper(100, 4)), 2) == 26.13


def test_batch_means_are_not_token_weighted_in_the_papers_form():
    losses = ValidationLosses(np.array([10.0, 2.0, 9.0]), np.array([5, 2, 3]))
    assert losses.loss_true() == pytest.approx(21 / 10)
    assert losses.loss_paper(10**9, 2) == pytest.approx((12 / 7 + 9 / 3) / 2)


def test_an_infinite_loss_has_no_perplexity():
    assert perplexity(800.0) is None


# -- outcomes ----


def test_a_run_that_explodes_is_recorded_as_diverged(manifest, tmp_path):
    record, _ = pretrain(smoke_run(peak_lr=1e30, steps=8, norm={"name": "pre_ln"}), manifest, tmp_path, QUIET)
    assert record.outcome == "diverged"
    write_record(tmp_path / "r.json", record)
    assert read_record(tmp_path / "r.json") == record


def test_an_exploding_run_ends_at_its_first_bad_loss_wherever_checkpoints_fall(manifest, tmp_path):
    run = smoke_run(peak_lr=1e30, steps=30, eval_every=30, norm={"name": "pre_ln"})
    records = []
    for every in (0, 1, 3):
        execution = Execution(device="cpu", progress=False, checkpoint_updates=every)
        records.append(numbers(pretrain(run, manifest, tmp_path / str(every), execution)[0]))
    assert records[0] == records[1] == records[2]
    assert records[0]["curve"]["train"][-1][2] is None and records[0]["metrics"]["updates"] < 20


def test_a_run_on_the_unigram_plateau_is_recorded_as_diverged_and_a_better_one_is_not(manifest, tmp_path):
    record, _ = pretrain(smoke_run(steps=4), manifest, tmp_path / "a", QUIET)
    assert record.outcome == "diverged" and record.metrics["ppl_true"] > 0.9 * record.metrics["unigram_perplexity"]
    better, _ = pretrain(smoke_run(steps=4, diverged={"above": 1e9}), manifest, tmp_path / "b", QUIET)
    assert better.outcome == "trained"


def test_a_preset_that_leaks_the_future_is_labelled_in_its_record(manifest, tmp_path):
    run = smoke_run(norm={"name": "group_ln", "preset": "authors_sequence"}, steps=1, hidden_size=16)
    record, _ = pretrain(run, manifest, tmp_path, QUIET)
    assert any("leaks the future" in label for label in record.labels)


def test_counts_in_the_record_follow_from_the_data(manifest, tmp_path):
    run = smoke_run(steps=3)
    record, model = pretrain(run, manifest, tmp_path, QUIET)
    trainer = Trainer(run, manifest, tmp_path, QUIET, ALONE)
    real = sum(int((trainer.train_shards.rows(trainer.order.indices(u)) != 0).sum()) for u in range(3))
    assert record.metrics["tokens_nonpad"] == real
    assert record.metrics["tokens_slots"] == 3 * run.global_batch * run.seq_len
    assert record.metrics["parameters"] == sum(p.numel() for p in model.parameters())


# -- kill and resume ----


def start(run: RunConfig, manifest: Path, folder: Path) -> subprocess.Popen:
    command = [
        sys.executable, "-m", "paperlm", "pretrain", "--settings", json.dumps(run.canonical()), "--data", manifest,
        "--out", folder / "record.json", "--checkpoints", folder / "ck", "--model", folder / "model",
        "--device", "cpu", "--checkpoint-updates", "3",
    ]  # fmt: skip
    return subprocess.Popen(list(map(str, command)), env=job_environment(), stderr=subprocess.PIPE, text=True)


def wait_for_update(folder: Path, update: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not any(int(p.name[5:]) >= update for p in checkpoint.steps(folder / "ck")):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.005)


def test_a_run_killed_twice_ends_in_the_same_record_and_weights_bit_for_bit(manifest, tmp_path):
    run = smoke_run(steps=60, eval_every=10, norm={"name": "admin"}, numerics="fp32_master")
    unbroken, model = pretrain(run, manifest, tmp_path / "unbroken", QUIET)
    for update in (6, 27):
        process = start(run, manifest, tmp_path)
        wait_for_update(tmp_path, update, process)
        process.kill()
        process.wait()
        assert not (tmp_path / "record.json").exists()
    process = start(run, manifest, tmp_path)
    assert process.wait(timeout=120) == 0, process.stderr.read()
    resumed = read_record(tmp_path / "record.json", run.run_id)
    assert numbers(resumed) == numbers(unbroken)
    assert len(resumed.cost.resumed_from) == 2
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "model/model.safetensors")
    assert all(torch.equal(weights[n], p) for n, p in model.named_parameters())


def test_a_terminated_run_writes_a_checkpoint_and_asks_to_be_continued(manifest, tmp_path):
    process = start(smoke_run(steps=5000, eval_every=5000), manifest, tmp_path)
    wait_for_update(tmp_path, 3, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    assert "start again to go on" in process.stderr.read()
    state = json.loads((checkpoint.steps(tmp_path / "ck")[-1] / "state.json").read_text())
    assert state["update"] >= 3


def interrupted(run: RunConfig, manifest: Path, folder: Path, update: int) -> None:
    with pytest.raises(Interrupted):
        pretrain(run, manifest, folder, Execution(device="cpu", progress=False, stop_after=update))


def test_a_checkpoint_of_another_configuration_is_refused_and_left_alone(manifest, tmp_path):
    interrupted(smoke_run(steps=6), manifest, tmp_path, 2)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match=r"differs in peak_lr.*move the folder away"):
        pretrain(smoke_run(steps=6, peak_lr=1e-4), manifest, tmp_path, QUIET)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("damage", ["truncate", "alter"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(manifest, tmp_path, damage):
    run = smoke_run(steps=6)
    unbroken, _ = pretrain(run, manifest, tmp_path / "unbroken", QUIET)
    for update in (2, 4):
        interrupted(run, manifest, tmp_path / "run", update)
    newest = checkpoint.steps(tmp_path / "run")[-1]
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "model.safetensors").write_bytes(content[:-9] if damage == "truncate" else content)
    with pytest.raises(CheckpointError, match=r"model.safetensors: truncated or altered; delete .*step-00000002"):
        pretrain(run, manifest, tmp_path / "run", QUIET)
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    resumed, _ = pretrain(run, manifest, tmp_path / "run", QUIET)
    assert numbers(resumed) == numbers(unbroken)


def test_a_damaged_checkpoint_state_is_named(manifest, tmp_path):
    interrupted(smoke_run(steps=6), manifest, tmp_path, 2)
    state = checkpoint.steps(tmp_path)[-1] / "state.json"
    state.write_text(state.read_text()[:40])
    with pytest.raises(CheckpointError, match=r"state.json: truncated or altered; delete"):
        pretrain(smoke_run(steps=6), manifest, tmp_path, QUIET)


def test_a_full_disk_keeps_the_checkpoint_before_and_says_how_to_go_on(manifest, tmp_path):
    run = smoke_run(steps=6)
    interrupted(run, manifest, tmp_path, 2)
    kept = checkpoint.steps(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # a file cannot grow beyond this: EFBIG
    try:
        with pytest.raises(PaperLMError, match="no space left for the checkpoint"):
            pretrain(run, manifest, tmp_path, Execution(device="cpu", progress=False, stop_after=4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoint.steps(tmp_path) == kept
    assert numbers(pretrain(run, manifest, tmp_path, QUIET)[0])["metrics"]["updates"] == 6


def test_a_full_disk_leaves_the_old_file_whole(tmp_path):
    target = tmp_path / "record.json"
    write_json(target, {"old": True})
    (tmp_path / ".record.json.tmp").symlink_to("/dev/full")
    with pytest.raises(PaperLMError, match="no space left to write"):
        write_json(target, {"new": "x" * 100_000})
    assert json.loads(target.read_text()) == {"old": True}


# -- many processes ----


def test_two_processes_under_torchrun_train_the_same_model_as_one(manifest, tmp_path):
    run = smoke_run(steps=6, global_batch=8, loss_group=4, eval_every=3)
    alone, _ = pretrain(run, manifest, tmp_path / "alone", QUIET)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "paperlm",
        "pretrain", "--settings", json.dumps(run.canonical()), "--data", manifest, "--out", tmp_path / "two.json",
        "--checkpoints", tmp_path / "two", "--device", "cpu",
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), env=job_environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    two = read_record(tmp_path / "two.json", run.run_id)
    assert two.cost.world_size == 2
    assert two.metrics["tokens_nonpad"] == alone.metrics["tokens_nonpad"]
    assert two.metrics["loss_true"] == pytest.approx(alone.metrics["loss_true"], rel=1e-5)
    for mine, theirs in zip(two.curve["train"], alone.curve["train"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_tokens_prepared_for_other_settings_are_refused(manifest, tmp_path):
    with pytest.raises(DataError, match=r"prepared for other settings \(seq_len\)"):
        Trainer(smoke_run(seq_len=64), manifest, tmp_path, QUIET, ALONE)
