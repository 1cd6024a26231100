"""Pre-training with every setting of its job: each update against Adam written out, each number against the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import smoke_run
from torch import Tensor

from paperlm.data.prepare import prepare
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.pretrain import Pretrain, run
from paperlm.models.folder import load_model
from paperlm.result import Result
from paperlm.train.distributed import World
from paperlm.train.engine import Engine
from paperlm.train.language_model import LanguageModelling

QUIET = Machine(device="cpu", progress=False)
ALONE = World(0, 1, torch.device("cpu"))
SMALL = {
    "hidden_size": 24, "intermediate_size": 56, "n_heads": 6, "n_layers": 2, "norm": {"name": "pre_ln"},
    "rms_norm_eps": 1e-5, "rope_theta": 500.0, "initializer_range": 0.07, "embed_init_std": 0.3,
    "example": "split", "seq_len": 16, "train_examples": 100, "validation_tokens": 300, "steps": 5, "global_batch": 6,
    "loss_group": 3, "eval_every": 4, "seed": 7,
}  # fmt: skip
"No two numbers are equal, and examples are of many lengths, so that one in the place of another shows."
ADAM = {
    "adam_betas": (0.8, 0.7), "adam_eps": 1e-3, "weight_decay": 0.01, "grad_clip": 0.4, "peak_lr": 0.02,
    "warmup_fraction": 0.4, "final_lr_fraction": 0.3,
}  # fmt: skip


def small_run(**changes: Any) -> Pretrain:
    return smoke_run(**SMALL | ADAM | changes)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Path:
    settings = small_run().token_data().model_dump(mode="json")
    return prepare(settings, tmp_path_factory.mktemp("data"))


def task_of(job: Pretrain, manifest: Path) -> LanguageModelling:
    return LanguageModelling(job, manifest, 0, ALONE)


def trained(job: Pretrain, manifest: Path, folder: Path) -> Result:
    (folder / "model").mkdir(parents=True)
    return run(job, Inputs(data=(manifest,), work=folder / "work", model=folder / "model"), QUIET)


# -- updates ----


def losses_of(model: Any, row: np.ndarray, pad: int) -> Tensor:
    """Next-token losses of one sequence without its padding."""
    real = torch.from_numpy(row[row != pad])
    logs = model(real[None]).logits[0, :-1].log_softmax(-1)
    return -logs.gather(-1, real[1:, None])[:, 0]


def rate(update: int, peak: float, warmup: int, total: int, final: float) -> float:
    if update < warmup:
        return peak * update / warmup
    return peak * (final + (1 - final) * (1 + math.cos(math.pi * (update - warmup) / (total - warmup))) / 2)


def written_out(job: Pretrain, manifest: Path, **instead: Any) -> Tensor:
    """How far Adam as in its paper moves the weights, in float64, with these values in place of the job's."""
    task, s = task_of(job, manifest), {name: getattr(job, name) for name in ADAM} | instead
    model, pad, (b1, b2) = task.model.double(), task.train_shards.pad_id, s["adam_betas"]
    weights = list(model.parameters())
    start = [p.detach().clone() for p in weights]
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in start]
    for update in range(job.steps):
        rows = task.train_shards.rows(task.order.indices(update))
        groups = [rows[i : i + job.loss_group] for i in range(0, len(rows), job.loss_group)]
        means = [torch.cat([losses_of(model, row, pad) for row in group]).mean() for group in groups]
        gradients = torch.autograd.grad(torch.stack(means).mean(), weights)
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        shrink = min(1.0, s["grad_clip"] / norm) if s["grad_clip"] else 1.0
        lr = rate(update, s["peak_lr"], round(s["warmup_fraction"] * job.steps), job.steps, s["final_lr_fraction"])
        with torch.no_grad():
            for p, g, (m, v) in zip(weights, gradients, moments, strict=True):
                g = shrink * g + s["weight_decay"] * p
                m.mul_(b1).add_((1 - b1) * g)
                v.mul_(b2).add_((1 - b2) * g * g)
                unbiased = m / (1 - b1 ** (update + 1)), v / (1 - b2 ** (update + 1))
                p.sub_(lr * unbiased[0] / (unbiased[1].sqrt() + s["adam_eps"]))
    return torch.cat([(p.detach() - q).flatten() for p, q in zip(weights, start, strict=True)])


@pytest.fixture(scope="module")
def expected(manifest) -> Callable[..., Tensor]:
    return lambda **instead: written_out(small_run(), manifest, **instead)


@pytest.fixture(scope="module")
def moved(manifest, tmp_path_factory) -> Tensor:
    """How far the engine moves the weights."""
    task = task_of(small_run(), manifest)
    start = torch.cat([p.detach().flatten().double() for p in task.model.parameters()])
    Engine(task, tmp_path_factory.mktemp("work"), QUIET, ALONE).train()
    return torch.cat([p.detach().flatten().double() for p in task.model.parameters()]) - start


def off(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def test_the_weights_move_as_adam_written_out_moves_them(moved, expected):
    assert off(moved, expected()) < 1e-3  # float32 against float64


@pytest.mark.parametrize(
    "instead",
    [
        {"adam_betas": (0.9, 0.7)}, {"adam_betas": (0.8, 0.999)}, {"adam_eps": 1e-8}, {"weight_decay": 0.0},
        {"grad_clip": 0.0}, {"peak_lr": 0.003}, {"warmup_fraction": 0.2}, {"final_lr_fraction": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_each_setting_of_the_optimizer_is_the_jobs(moved, expected, instead):
    """With another one Adam ends elsewhere, by more than ten times what rounding does."""
    assert off(moved, expected(**instead)) > 1e-2


# -- the model ----


def test_the_model_has_every_setting_of_its_job(manifest):
    job = small_run(zero_last_embedding_row=True)
    config, names = (
        task_of(job, manifest).model.config,
        {"n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"},
    )
    for name in (
        "hidden_size", "intermediate_size", "n_heads", "n_layers", "vocab_size", "norm", "rms_norm_eps", "rope_theta",
        "initializer_range", "embed_init_std", "zero_last_embedding_row",
    ):  # fmt: skip
        assert getattr(config, names.get(name, name)) == getattr(job, name), name


def test_the_seed_draws_the_weights_and_apart_from_them_the_order_of_the_examples(manifest):
    one, other = (task_of(small_run(seed=seed), manifest) for seed in (7, 8))
    assert one.order.indices(0).tolist() != other.order.indices(0).tolist()
    assert not torch.equal(one.model.lm_head.weight, other.model.lm_head.weight)


def test_a_method_that_starts_from_a_batch_gets_the_first_loss_group(manifest, monkeypatch):
    from paperlm.norms.pre_ln import PreLN

    seen = []
    monkeypatch.setattr(PreLN, "initialize_from_batch", lambda self, model, ids: seen.append(ids))
    task = task_of(small_run(), manifest)
    assert torch.equal(seen[0], torch.from_numpy(task.train_shards.rows(task.order.indices(0))[:3]))


@pytest.mark.parametrize(("numerics", "dtype"), [("fp32", torch.float32), ("fp32_master", torch.bfloat16)])
def test_products_are_taken_in_the_numbers_that_the_job_says(manifest, numerics, dtype):
    task = task_of(small_run(numerics=numerics), manifest)
    with task.autocast():
        assert task.model.lm_head(torch.ones(1, 24)).dtype == dtype


def test_validation_losses_of_bfloat16_weights_are_float32_losses_of_their_logits(manifest):
    task = task_of(small_run(numerics="pure_bf16", initializer_range=0.5), manifest)
    ids = torch.from_numpy(task.validation_shards.rows(np.arange(4)))
    losses = task.model.token_losses(ids, ids)
    logs = task.model.lm_head(task.model.model.hidden(ids[:, :-1])).double().log_softmax(-1)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), -logs.gather(-1, ids[:, 1:, None])[..., 0], rtol=1e-5, atol=1e-5)


# -- the record ----


def test_the_record_has_the_losses_of_the_model_that_is_left_to_the_last_example(manifest, tmp_path):
    job = small_run()
    found, shards = trained(job, manifest, tmp_path).metrics, task_of(job, manifest).validation_shards
    assert len(shards) % 8 and len(shards) % job.loss_group, "the last batch is partial"
    model = load_model(tmp_path / "model").double()
    with torch.no_grad():
        each = [losses_of(model, row, shards.pad_id) for row in shards.rows(np.arange(len(shards)))]
    batches = [torch.cat(each[i : i + 3]).mean() for i in range(0, len(each), 3)]
    assert found["loss_true"] == pytest.approx(float(torch.cat(each).mean()), rel=1e-5)
    assert found["loss_batches"] == pytest.approx(float(torch.stack(batches).mean()), rel=1e-5)
    assert found["validation_tokens"] == sum(map(len, each))
    assert abs(found["loss_batches"] / found["loss_true"] - 1) > 1e-4, "the two differ"


def test_epochs_and_counts_of_the_curve_are_those_of_the_examples_that_were_seen(manifest, tmp_path):
    job = small_run(steps=170, eval_every=170)  # bins of two updates
    result, task = trained(job, manifest, tmp_path), task_of(job, manifest)
    real = np.cumsum([(task.train_shards.rows(task.order.indices(u)) != 0).sum() for u in range(170)])
    rows = result.series["train"].rows
    assert [row[:2] for row in rows] == [[u, real[u - 1]] for u in range(2, 171, 2)]
    assert result.metrics["epochs"] == 170 * 6 / len(task.train_shards)
    assert result.metrics["tokens_nonpad"] == real[-1] < result.metrics["tokens_slots"] == 170 * 6 * 16
