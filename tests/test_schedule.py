"""Rates and weight decay of the two-phase recipe, its optimizer, and what a job refuses of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support import smoke_run
from support_engine import ALONE, QUIET, task_of, trained

from paperlm.jobs.pretrain import Pretrain
from paperlm.train.engine import Engine
from paperlm.train.schedule import learning_rate, rate_and_decay

TWO_PHASES = {
    "700M": (1.5e-3, 1e-3, 7.678e-4, 5.168e-4, 7.868e-5),
    "1.3B": (1.2e-3, 8e-4, 6.172e-4, 4.165e-4, 6.865e-5),
    "3B": (1.2e-3, 6.4e-4, 6.172e-4, 3.362e-4, 6.062e-5),
    "7B": (1e-3, 6e-4, 5.168e-4, 3.161e-4, 5.861e-5),
}
"First and second peak; rates just before and at update 50,000, and at 95,000: points of the published schedule."


def published(first: float = 1.5e-3, second: float = 1e-3, **changes: Any) -> Pretrain:
    """The recipe of the paper's runs of 100,000 updates."""
    return smoke_run(
        **{
            "steps": 100_000, "schedule": "two_phase", "optimizer": "adamw", "peak_lr": first, "second_peak_lr": second,
            "end_lr": 3e-5, "final_lr_fraction": None, "warmup_fraction": 0.00375, "weight_decay": 0.1,
            "second_weight_decay": 0.0, "decay_norms": False, "grad_clip": 2.0,
        }
        | changes
    )  # fmt: skip


def rate(update: int, job: Pretrain) -> float:
    return rate_and_decay(update, job)[0]


@pytest.mark.parametrize("size", TWO_PHASES)
def test_each_size_has_the_published_points_of_its_curve(size):
    first, second, before, after, late = TWO_PHASES[size]
    job = published(first, second)
    assert rate(0, job) == 0 and rate(375, job) == first
    points = [rate(update, job) for update in (49_999, 50_000, 95_000)]
    for found, given in zip(points, (before, after, late), strict=True):
        assert abs(found - given) < 10.0 ** (math.floor(math.log10(given)) - 3), "a unit of the last digit given"
    assert rate(100_000, job) == pytest.approx(3e-5, rel=1e-12)


def test_the_700m_curve_goes_through_the_points_read_from_the_published_plot():
    """To four digits, as they can be read off; a jump one update late, or a fresh warm-up, would show."""
    job = published()
    for update, value in ((400, 1.49962e-3), (49_950, 7.6851e-4), (50_050, 5.1634e-4)):
        assert rate(update, job) == pytest.approx(value, rel=1e-4)
    assert rate(150, job) == pytest.approx(1.5e-3 * 150 / 375, rel=1e-12)


def test_the_jump_is_from_one_line_to_the_other_and_both_run_to_the_same_end():
    job = published()
    slopes = [rate(update + 1, job) - rate(update, job) for update in (400, 49_998, 50_000, 99_998)]
    assert slopes[0] == pytest.approx(slopes[1]) and slopes[2] == pytest.approx(slopes[3])
    for update, slope in ((49_999, slopes[0]), (50_000, slopes[2])):
        assert rate(update, job) + slope * (100_000 - update) == pytest.approx(3e-5)


def test_weight_decay_is_on_in_the_first_phase_and_off_in_the_second():
    job = published()
    assert [rate_and_decay(u, job)[1] for u in (0, 49_999, 50_000, 99_999)] == [0.1, 0.1, 0.0, 0.0]
    kept = published(second_weight_decay=None)
    assert rate_and_decay(99_999, kept)[1] == 0.1


def test_one_line_is_the_first_phase_to_its_end():
    one = published(2.5e-4, None, schedule="linear", second_weight_decay=None)
    two = published(2.5e-4)
    assert [rate(u, one) for u in range(0, 50_000, 999)] == [rate(u, two) for u in range(0, 50_000, 999)]
    assert rate(99_999, one) == pytest.approx(3e-5 + 2.2e-4 / 99_625) and rate_and_decay(99_999, one)[1] == 0.1


def test_a_run_that_is_all_warm_up_ends_at_the_end_rate():
    job = published(2.5e-4, None, schedule="linear", second_weight_decay=None, steps=750, warmup_fraction=0.9999)
    assert job.warmup_steps == job.steps == 750 and rate(749, job) == pytest.approx(2.5e-4 * 749 / 750)
    assert rate(750, job) == job.end_rate


def test_a_warm_up_that_reaches_into_the_second_phase_rises_to_its_peak():
    job = published(steps=100, warmup_fraction=0.8)
    assert (job.warmup_steps, job.phase_step) == (80, 50)
    assert rate(49, job) == pytest.approx(1.5e-3 * 49 / 80) and rate(60, job) == pytest.approx(1e-3 * 60 / 80)


def test_the_second_phase_begins_at_the_nearest_update_to_its_share():
    assert published(steps=100, phase_at=0.29).phase_step == 29, "0.29 times 100 is less than 29 in float64"


def test_a_cosine_is_what_it_was():
    job = smoke_run(steps=200, weight_decay=0.3)
    assert [rate_and_decay(u, job) for u in range(200)] == [(learning_rate(u, job), 0.3) for u in range(200)]


def test_a_shorter_run_has_the_schedule_by_shares_with_a_warm_up_of_at_least_so_many_updates():
    """Section 16's proxies: 2 % of the first peak at the end, the jump at half."""
    scaled = {"steps": 1500, "end_lr": None, "final_lr_fraction": 0.02, "warmup_at_least": 50}
    job = published(2.4e-3, 1.6e-3, **scaled)
    assert job.warmup_steps == 50 and rate(50, job) == 2.4e-3 and rate(25, job) == pytest.approx(1.2e-3)
    assert job.end_rate == pytest.approx(4.8e-5)
    assert rate(749, job) == pytest.approx(4.8e-5 + (2.4e-3 - 4.8e-5) * 751 / 1450)
    assert rate(750, job) == pytest.approx(4.8e-5 + (1.6e-3 - 4.8e-5) * 750 / 1450)
    assert published(**scaled | {"steps": 100_000}).warmup_steps == 375


def test_what_follows_from_the_schedule_is_said_with_the_job():
    said = {name: value for name, (value, _) in published().derived().items()}
    assert said["warm-up"] == "375 updates" and said["second phase"] == "from update 50,000 on"
    assert said["rate at its start"] == "0.0007678 -> 0.0005168"
    assert said["weight decay at its start"] == "0.1 -> 0"
    assert "second phase" not in smoke_run().derived()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"second_peak_lr": None}, "schedule two_phase needs second_peak_lr"),
        ({"schedule": "linear"}, "schedule two_phase needs second_peak_lr, and no other one has it"),
        ({"schedule": "linear", "second_peak_lr": None}, "schedule linear has no second phase"),
        ({"final_lr_fraction": 0.1}, "what does the rate fall to"),
        ({"end_lr": None}, "what does the rate fall to"),
        ({"steps": 1}, "phase_at 0.5 of 1 steps leaves a phase empty"),
        ({"steps": 100, "phase_at": 0.9999}, "phase_at 0.9999 of 100 steps leaves a phase empty"),
        ({"warmup_at_least": 100_000}, "warmup_at_least 100000 takes all of the 100000 steps: lower it"),
        (
            {"schedule": "cosine", "second_peak_lr": None, "second_weight_decay": None},
            "schedule cosine falls to final_lr_fraction of the peak: leave end_lr out",
        ),
    ],
)
def test_a_schedule_that_is_said_twice_or_not_at_all_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        published(**changes)


# -- the optimizer ----

SHORT = {
    "steps": 6, "warmup_fraction": 0.2, "end_lr": 1e-3, "hidden_size": 16, "weight_decay": 2.0, "adam_eps": 1e-3,
    "second_weight_decay": 0.1, "grad_clip": 0.0, "peak_lr": 0.02, "second_peak_lr": 0.01, "eval_every": 6,
}  # fmt: skip


def losses(model: torch.nn.Module, rows: np.ndarray, pad: int) -> torch.Tensor:
    found = []
    for row in rows:
        real = torch.from_numpy(row[row != pad])
        logs = model(real[None]).logits[0, :-1].log_softmax(-1)
        found.append(-logs.gather(-1, real[1:, None])[:, 0])
    return torch.cat(found).mean()


def written_out(job: Pretrain, manifest: Path) -> dict[str, torch.Tensor]:
    """AdamW of Loshchilov and Hutter in float64: decay apart from the gradient, times the rate; norms have none."""
    task = task_of(job, manifest)
    model, (b1, b2) = task.model.double(), job.adam_betas
    named = dict(model.named_parameters())
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in named.items()}
    for update in range(job.steps):
        rows = task.train_shards.rows(task.order.indices(update))
        groups = [rows[i : i + job.loss_group] for i in range(0, len(rows), job.loss_group)]
        loss = torch.stack([losses(model, group, task.train_shards.pad_id) for group in groups]).mean()
        gradients = torch.autograd.grad(loss, list(named.values()))
        late = update >= job.steps / 2
        peak, decay = (0.01, 0.1) if late else (0.02, 2.0)
        warmup = round(0.2 * job.steps)
        lr = peak * update / warmup if update < warmup else 1e-3 + (peak - 1e-3) * (6 - update) / (6 - warmup)
        with torch.no_grad():
            for (name, p), g in zip(named.items(), gradients, strict=True):
                m, v = moments[name]
                m.mul_(b1).add_((1 - b1) * g)
                v.mul_(b2).add_((1 - b2) * g * g)
                if "norm" not in name:
                    p.mul_(1 - lr * decay)
                unbiased = m / (1 - b1 ** (update + 1)), v / (1 - b2 ** (update + 1))
                p.sub_(lr * unbiased[0] / (unbiased[1].sqrt() + job.adam_eps))
    return {name: p.detach() for name, p in named.items()}


def test_the_weights_move_as_adamw_written_out_moves_them_with_decay_off_norms(manifest, tmp_path):
    job = published(**SHORT)
    truth, task = written_out(job, manifest), task_of(job, manifest)
    start = {name: p.detach().double().clone() for name, p in task.model.named_parameters()}
    Engine(task, tmp_path, QUIET, ALONE).train()
    for name, p in task.model.named_parameters():
        moved, wanted = p.detach().double() - start[name], truth[name] - start[name]
        rounding = job.steps * torch.finfo(torch.float32).eps * truth[name].norm()  # gains stay near 1
        assert (moved - wanted).norm() < 1e-3 * wanted.norm() + rounding, name


@pytest.mark.parametrize(
    "change", [{"optimizer": "adam"}, {"decay_norms": True}, {"second_weight_decay": None}], ids=str
)
def test_another_optimizer_or_decay_moves_them_elsewhere(manifest, tmp_path, change):
    ends = []
    for number, job in enumerate((published(**SHORT), published(**SHORT | change))):
        task = task_of(job, manifest)
        Engine(task, tmp_path / str(number), QUIET, ALONE).train()
        ends.append(torch.cat([p.detach().flatten() for p in task.model.parameters()]))
    start = torch.cat([p.detach().flatten() for p in task_of(published(**SHORT), manifest).model.parameters()])
    assert (ends[0] - ends[1]).norm() / (ends[0] - start).norm() > 1e-2, "ten times what rounding may do"


def test_gains_of_norms_alone_are_exempt_and_nothing_is_left_out(manifest):
    model = task_of(published(**SHORT), manifest)
    with_decay, without = (group["params"] for group in model.optimizer.param_groups)
    names = {id(p): name for name, p in model.model.named_parameters()}
    assert {names[id(p)] for p in without} == {n for n in names.values() if "norm" in n}
    assert len(with_decay) + len(without) == len(names)
    assert len(task_of(published(**SHORT | {"decay_norms": True}), manifest).optimizer.param_groups) == 1


def test_the_curve_file_notes_rate_and_decay_of_every_update(manifest, tmp_path):
    trained(published(**SHORT), manifest, tmp_path)
    rows = [row for row in map(json.loads, (tmp_path / "work/curve.jsonl").open()) if "loss" in row]
    assert [(row["lr"], row["weight_decay"]) for row in rows] == [
        rate_and_decay(u, published(**SHORT)) for u in range(6)
    ]
