"""The training engine in several processes, and when it goes on: one model, one micro-batch, stops in time."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import pytest
import torch
from support import job_environment, smoke_run
from support_engine import QUIET, task_of, trained

from paperlm.errors import DataError, Interrupted, JobError
from paperlm.jobs.base import Inputs, Machine
from paperlm.quantizers.presets import PRESETS
from paperlm.record.places import Places
from paperlm.record.record import read_record
from paperlm.train.distributed import World
from paperlm.train.engine import Engine
from paperlm.train.language_model import pretrain


def of_two_processes(job, main, root, tmp_path):
    """The record of a job that torchrun makes with two processes of this program, and what they said."""
    (code := tmp_path / "main.py").write_text(main)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", code, "run",
        "--job", json.dumps(job.canonical()), "--scale", "smoke", "--device", "cpu",
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), env=job_environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return read_record(root / Places(root, "smoke").made(job), job.job_id), done.stderr


@pytest.mark.parametrize("preset", ["llama", "b158"])
def test_two_processes_under_torchrun_train_the_same_model_as_one(preset, manifest, prepared, tmp_path):
    """The scale of a quantized weight is that of the whole matrix in each of them."""
    job = smoke_run(steps=6, global_batch=8, loss_group=4, eval_every=3, **PRESETS[preset])
    alone = trained(job, manifest, tmp_path / "alone")
    main = "import sys; from pathlib import Path; from paperlm.plan import project\n"
    main += f"project.ROOT = Path({str(prepared)!r})\nfrom paperlm.cli import main\nsys.exit(main())\n"
    two, said = of_two_processes(job, main, prepared, tmp_path)
    assert "FutureWarning" not in said, "an option of PyTorch that is to go"
    places = Places(prepared, "smoke")
    assert two.cost.world_size == 2 and places.is_file(places.manifest(job))
    assert two.metrics["tokens_nonpad"] == alone.metrics["tokens_nonpad"]
    assert two.metrics["loss_true"] == pytest.approx(alone.metrics["loss_true"], rel=1e-5)
    for mine, theirs in zip(two.series["train"].rows, alone.series["train"].rows, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


SHORT = """
import os, sys
from pathlib import Path
import torch
from paperlm.plan import project
from paperlm.train import language_model
project.ROOT = Path({root!r})
whole, most = language_model.SummedLoss.forward, {most}

def forward(self, ids, labels):
    if self.training and os.environ["RANK"] == "1" and len(ids) > most:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
    return whole(self, ids, labels)

language_model.SummedLoss.forward = forward
from paperlm.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("most", [1, 0])
def test_processes_of_which_one_is_short_of_memory_all_take_a_smaller_micro_batch(most, manifest, prepared, tmp_path):
    """The other one would wait for its gradients, and torchrun would end both."""
    job = smoke_run(steps=3, global_batch=8, loss_group=4, eval_every=3)
    record, _ = of_two_processes(job, SHORT.format(root=str(prepared), most=most), prepared, tmp_path)
    if not most:
        assert record.outcome == "out_of_memory"
        return
    alone = trained(job, manifest, tmp_path / "alone")
    assert record.cost.micro_batch == 1 and record.cost.world_size == 2
    for mine, theirs in zip(record.series["train"].rows, alone.series["train"].rows, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_several_processes_ask_whether_to_stop_at_each_update_that_takes_a_second_else_at_every_tenth(
    manifest, tmp_path, monkeypatch
):
    task, clock, asked = task_of(smoke_run(), manifest), [0.0], []

    def gather(self, value):
        asked.append(engine.at.update)
        return [value]

    monkeypatch.setattr(World, "gather", gather)
    engine = Engine(task, tmp_path, QUIET, World(0, 1, torch.device("cpu")))
    engine.world = World(0, 2, torch.device("cpu"))
    monkeypatch.setattr("paperlm.train.engine.time.monotonic", lambda: clock[0])
    engine._asked = (1000, 0.0)
    for update in range(1001, 1041):
        engine.at.update = update
        clock[0] += 0.2 if update <= 1020 else 3.0
        engine._decide(False, clock[0], False)
    assert asked == [1001, 1010, 1020, *range(1030, 1041)]


def test_a_run_that_goes_on_measures_its_pace_from_where_it_goes_on(manifest, tmp_path, monkeypatch):
    job, seen = smoke_run(), []
    with pytest.raises(Interrupted):
        trained(job, manifest, tmp_path, Machine(device="cpu", progress=False, stop_after=3))
    decide = Engine._decide
    monkeypatch.setattr(Engine, "_decide", lambda self, *all_: (seen.append(self._asked[0]), decide(self, *all_))[1])
    trained(job, manifest, tmp_path)
    assert seen[0] == 3


def test_a_part_is_tried_beside_all_that_stays_in_memory(manifest, tmp_path):
    """Adam's two numbers of each weight, and its gradient, are there while activations are."""
    task, seen = task_of(smoke_run(), manifest), []
    whole = task.loss_module.forward

    def forward(*arguments):
        alive = sum(t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor and t.dim())
        seen.append((alive, all(p.grad is not None for p in task.model.parameters())))
        return whole(*arguments)

    task.loss_module.forward = forward
    engine = Engine(task, tmp_path, QUIET, World(0, 1, torch.device("cpu")))
    before = sum(t.nbytes for t in gc.get_objects() if type(t) is torch.Tensor and t.dim())
    assert engine._fits() and seen[0][1]
    assert seen[0][0] - before >= 2 * sum(p.nbytes for p in task.model.parameters())
    assert all(p.grad is None for p in task.model.parameters())


def test_all_but_the_leading_process_have_no_result(manifest, tmp_path, monkeypatch):
    follower = World(1, 1, torch.device("cpu"))
    monkeypatch.setattr("paperlm.train.language_model.start_world", lambda device: follower)
    monkeypatch.setattr(Engine, "train", lambda self: "trained")
    assert pretrain(smoke_run(), Inputs(data=(manifest,), work=tmp_path), QUIET) is None


def test_a_card_that_is_not_there_is_named_before_anything_is_trained(manifest, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(JobError, match="device cuda: this PyTorch sees no GPU; use --device cpu, or run the job where"):
        trained(smoke_run(), manifest, tmp_path, Machine(device="cuda", progress=False))


def test_tokens_prepared_for_other_settings_are_refused(manifest):
    with pytest.raises(DataError, match=r"prepared for other settings \(seq_len\)"):
        task_of(smoke_run(seq_len=64), manifest)
