"""The training engine: schedule, weights of the loss, evaluation, losses that are no numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import smoke_run
from support_engine import ALONE, QUIET, numbers, task_of, trained

from paperlm.data.prepare import prepare
from paperlm.errors import DataError
from paperlm.evaluate.perplexity import ValidationLosses, perplexity
from paperlm.jobs.base import Machine
from paperlm.jobs.pretrain import Pretrain
from paperlm.models.folder import load_model
from paperlm.plan.project import Project
from paperlm.tables.metrics import metric_of
from paperlm.train.engine import Engine
from paperlm.train.language_model import LanguageModelling
from paperlm.train.schedule import learning_rate


def first_loss(job: Pretrain, manifest: Path, folder: Path) -> float:
    return Engine(task_of(job, manifest), folder, QUIET, ALONE).step()[0].item()


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
    settings = smoke_run(example="split", seq_len=64, train_examples=400).token_data().model_dump(mode="json")
    return prepare(settings, tmp_path_factory.mktemp("ragged"))


def ragged_run(**changes: object) -> Pretrain:
    return smoke_run(example="split", seq_len=64, train_examples=400, seed=3, **changes)


def written_out_loss(task: LanguageModelling, update: int) -> float:
    """Mean over groups of the group's token mean, in float64, one sequence at a time."""
    model = task.model.double()
    ids = task.train_shards.rows(task.order.indices(update))
    group_means = []
    for start in range(0, len(ids), task.job.loss_group):
        losses = []
        for row in ids[start : start + task.job.loss_group]:
            real = row[row != task.train_shards.pad_id]
            logits = model(torch.tensor(real)[None]).logits[0].log_softmax(-1)
            losses += [-logits[t, real[t + 1]].item() for t in range(len(real) - 1)]
        group_means.append(sum(losses) / len(losses))
    return sum(group_means) / len(group_means)


@pytest.mark.parametrize("loss_group", [1, 2, 32])
def test_an_updates_loss_is_the_mean_over_groups_of_the_groups_token_mean(ragged, tmp_path, loss_group):
    # A large start makes the losses of sequences differ, so that the weighting shows.
    job = ragged_run(global_batch=32, loss_group=loss_group, initializer_range=0.5)
    with torch.no_grad():
        truth = written_out_loss(task_of(job, ragged), 0)
    assert first_loss(job, ragged, tmp_path) == pytest.approx(truth, rel=1e-5)


def test_the_loss_group_is_not_a_detail(ragged, tmp_path):
    jobs = [ragged_run(global_batch=32, loss_group=group, initializer_range=0.5) for group in (1, 32)]
    one, all_of_them = (first_loss(job, ragged, tmp_path) for job in jobs)
    assert abs(one / all_of_them - 1) > 1e-3


@pytest.mark.parametrize("micro", [1, 2])
def test_the_micro_batch_changes_gradients_by_rounding_only(ragged, tmp_path, micro):
    gradients = []
    for size in (4, micro):
        task = task_of(ragged_run(global_batch=32, loss_group=4), ragged, size)
        task.optimizer.zero_grad = lambda: None
        Engine(task, tmp_path, QUIET, ALONE).step()
        gradients.append(torch.cat([p.grad.flatten() for p in task.model.parameters()]))
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-7)
    assert gradients[0].norm() > 0.01


@pytest.mark.parametrize("wish", [3, 4, -1])
def test_a_micro_batch_that_does_not_divide_the_group_is_refused(manifest, wish):
    with pytest.raises(DataError, match=rf"micro_batch {wish} must divide the loss group 2 .*choose a divisor of 2"):
        task_of(smoke_run(), manifest, wish)


def test_the_first_update_of_a_warm_up_changes_no_weight(manifest, tmp_path):
    task = task_of(smoke_run(steps=10), manifest)
    engine = Engine(task, tmp_path, QUIET, ALONE)
    before = [p.clone() for p in task.model.parameters()]
    engine.step()
    assert all(torch.equal(a, b) for a, b in zip(before, task.model.parameters(), strict=True))
    engine.step()
    assert not all(torch.equal(a, b) for a, b in zip(before, task.model.parameters(), strict=True))


def test_pure_bf16_keeps_weights_and_moments_in_bf16_and_fp32_master_in_fp32(manifest, tmp_path):
    for numerics, dtype in (("pure_bf16", torch.bfloat16), ("fp32_master", torch.float32)):
        task = task_of(smoke_run(numerics=numerics), manifest)
        loss, _ = Engine(task, tmp_path, QUIET, ALONE).step()
        assert loss.item() == pytest.approx(math.log(1024), rel=0.02)
        assert {p.dtype for p in task.model.parameters()} == {dtype}
        assert {s["exp_avg_sq"].dtype for s in task.optimizer.state.values()} == {dtype}


def test_bf16_second_moments_do_not_decay():
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


def test_gradients_are_clipped_to_the_norm_that_the_job_says(manifest, tmp_path):
    norms = []
    for clip in (0.0, 0.05):
        task = task_of(smoke_run(grad_clip=clip), manifest)
        task.optimizer.zero_grad = lambda: None
        Engine(task, tmp_path, QUIET, ALONE).step()
        norms.append(torch.cat([p.grad.flatten() for p in task.model.parameters()]).norm().item())
    assert norms[0] > 0.1 and norms[1] == pytest.approx(0.05, rel=1e-3)


# -- evaluation ----


def test_the_papers_perplexity_differs_by_n_over_n_plus_one_exactly():
    losses = ValidationLosses(np.full(10, 31 * 3.3), np.full(10, 31))
    assert losses.loss_batches(5) == pytest.approx(losses.loss_true(), rel=1e-15)
    record = lambda loss: SimpleNamespace(metrics={"loss_batches": loss})  # noqa: E731
    paper = lambda loss, n: metric_of(record(loss), "ppl_paper", {"published_batches": n})  # noqa: E731
    # A true perplexity of 27 prints as 26.78 at n = 400 and 26.13 at n = 100.
    assert (round(paper(math.log(27), 400), 2), round(paper(math.log(27), 100), 2)) == (26.78, 26.13)
    assert paper(None, 400) is None


def test_batch_means_are_not_token_weighted_in_the_papers_form():
    losses = ValidationLosses(np.array([10.0, 2.0, 9.0]), np.array([5, 2, 3]))
    assert losses.loss_true() == pytest.approx(21 / 10)
    assert losses.loss_batches(2) == pytest.approx((12 / 7 + 9 / 3) / 2)


def test_an_infinite_loss_has_no_perplexity():
    assert perplexity(800.0) is None


def test_an_evaluation_is_the_token_mean_over_every_validation_example(manifest):
    task = task_of(smoke_run(initializer_range=0.3), manifest)
    found = task.evaluate()
    model, shards = task.model.double().eval(), task.validation_shards
    total = count = 0
    with torch.no_grad():
        for index in range(len(shards)):
            row = shards.rows(np.array([index]))[0]
            real = torch.tensor(row[row != shards.pad_id])
            losses = -model(real[None]).logits[0].log_softmax(-1)
            total += sum(losses[t, real[t + 1]].item() for t in range(len(real) - 1))
            count += len(real) - 1
    assert found["ppl_true"] == pytest.approx(math.exp(total / count), rel=1e-4)


# -- outcomes ----

EXPLODES = {"peak_lr": 1e30, "norm": {"name": "pre_ln"}}


def test_a_job_whose_loss_is_no_number_ends_there_and_leaves_no_model(manifest, tmp_path):
    result = trained(smoke_run(steps=8, **EXPLODES), manifest, tmp_path)
    assert result.outcome == "not_finite" and result.metrics["updates"] < 8
    assert result.metrics["ppl_true"] is None and result.metrics["loss_true"] is None
    assert not list((tmp_path / "model").iterdir())


def test_an_exploding_job_ends_at_its_first_bad_loss_wherever_checkpoints_fall(manifest, tmp_path):
    job = smoke_run(steps=30, eval_every=30, **EXPLODES)
    results = []
    for every in (0, 1, 3):
        machine = Machine(device="cpu", progress=False, checkpoint_updates=every)
        results.append(trained(job, manifest, tmp_path / str(every), machine))
    assert numbers(results[0]) == numbers(results[1]) == numbers(results[2])
    assert results[0].series["train"].rows[-1][2] is None and results[0].metrics["updates"] < 20


def test_a_job_on_the_unigram_plateau_is_trained_whether_it_diverged_is_the_tables_rule(manifest, tmp_path):
    result = trained(smoke_run(steps=4), manifest, tmp_path)
    assert result.outcome == "trained" and result.metrics["ppl_true"] > 0.9 * result.metrics["unigram_perplexity"]
    rule = Project({"scale": "smoke"}).diverged_rule("mixln_table1")
    assert result.metrics["ppl_true"] > rule.threshold(result.metrics["unigram_perplexity"])


def test_out_of_memory_halves_the_micro_batch_and_ends_as_such_when_nothing_fits(manifest, tmp_path, monkeypatch):
    tried, fits = [], [1]

    def step(self):
        tried.append(self.task.micro_batch)
        if self.task.micro_batch > fits[0]:
            raise torch.cuda.OutOfMemoryError
        return whole(self)

    whole = Engine.step
    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    job = smoke_run(steps=1, global_batch=8, loss_group=8)
    result = trained(job, manifest, tmp_path / "fits")
    assert tried == [8, 4, 2, 1] and result.outcome == "trained" and result.cost.micro_batch == 1
    fits[0] = 0
    result = trained(job, manifest, tmp_path / "does not")
    assert result.outcome == "out_of_memory" and result.metrics["ppl_true"] is None


def test_a_preset_that_leaks_the_future_is_labelled(manifest, tmp_path):
    job = smoke_run(norm={"name": "group_ln", "preset": "authors_sequence"}, steps=1, hidden_size=16)
    assert any("leaks the future" in label for label in trained(job, manifest, tmp_path).labels)


def test_counts_follow_from_the_data(manifest, tmp_path):
    job = smoke_run(steps=3)
    result, task = trained(job, manifest, tmp_path), task_of(job, manifest)
    real = sum(int((task.train_shards.rows(task.order.indices(u)) != 0).sum()) for u in range(3))
    assert result.metrics["tokens_nonpad"] == real
    assert result.metrics["tokens_slots"] == 3 * job.global_batch * job.seq_len
    assert result.metrics["parameters"] == sum(p.numel() for p in load_model(tmp_path / "model").parameters())


@pytest.mark.parametrize("curve", ["thinned", "every_update"])
def test_the_curve_has_every_update_or_means_over_bins_of_equal_width(manifest, tmp_path, curve):
    result = trained(smoke_run(steps=200, eval_every=100, curve=curve), manifest, tmp_path)
    rows = result.series["train"].rows
    whole = [row for row in map(json.loads, (tmp_path / "work/curve.jsonl").open()) if "loss" in row]
    assert len(whole) == 200 and rows[-1][0] == 200
    assert len(rows) == (200 if curve == "every_update" else 100)
    width = 200 // len(rows)
    assert rows[3][2] == pytest.approx(sum(r["loss"] for r in whole[3 * width : 4 * width]) / width, abs=1e-6)
    assert [row[0] for row in result.series["eval"].rows] == [100, 200]
    assert ("ppl_sequences" in result.metrics) == (curve == "every_update")
