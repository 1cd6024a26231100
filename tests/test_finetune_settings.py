"""What trl gets of a job: each setting as the argument that it is for, and every example, the last batch included."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from support_finetune import (
    CPU,
    inputs,
    instruction_items,
    preference_items,
    reward_model,
    rloo,
    sft,
    write_model,
    write_set,
)
from trl import RewardConfig, RLOOConfig, SFTConfig

from paperlm.finetune import examples, measure
from paperlm.finetune.common import arguments
from paperlm.jobs import run_job
from paperlm.models.folder import load_model, load_tokenizer

SETTINGS = {
    "peak_lr": 0.03, "warmup": 0.25, "adam_betas": (0.7, 0.95), "adam_eps": 1e-5, "weight_decay": 0.04,
    "grad_clip": 0.6, "seed": 17,
}  # fmt: skip
PASSED_ON = {
    "learning_rate": 0.03, "warmup_steps": 3, "adam_beta1": 0.7, "adam_beta2": 0.95, "adam_epsilon": 1e-5,
    "weight_decay": 0.04, "max_grad_norm": 0.6, "seed": 17, "max_steps": 12, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 5, "bf16": False, "dataloader_drop_last": False, "label_smoothing_factor": 0.0,
    "gradient_checkpointing": False,
}  # fmt: skip
"Of twelve updates with ten sequences each, two at once: a quarter of them, 3, are the warm-up."


@pytest.mark.parametrize(
    ("config", "make"), [(SFTConfig, sft), (RewardConfig, reward_model), (RLOOConfig, rloo)], ids=["sft", "rm", "rloo"]
)
def test_each_setting_is_the_argument_of_trl_that_it_is_for(tmp_path, config, make):
    special = {"num_generations": 5} if config is RLOOConfig else {}
    found = arguments(config, make(**SETTINGS), torch.device("cpu"), tmp_path, 12, 2, 10, **special)
    assert {name: getattr(found, name) for name in PASSED_ON} == PASSED_ON


@pytest.mark.parametrize(
    ("schedule", "name"), [("linear", "linear"), ("cosine", "cosine"), ("constant", "constant_with_warmup")]
)
def test_a_schedule_is_transformers_of_that_kind_with_a_warm_up(tmp_path, schedule, name):
    found = arguments(SFTConfig, sft(schedule=schedule), torch.device("cpu"), tmp_path, 12, 2, 4)
    assert found.lr_scheduler_type == name


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("parent"))


def test_an_epoch_of_fine_tuning_passes_over_every_example_the_last_batch_included(tmp_path, parent):
    data = write_set(tmp_path, train=instruction_items(7), validation=instruction_items(2, start=100))
    result = run_job(sft(epochs=1.0), inputs(tmp_path / "job", data, of=parent), CPU)
    texts = examples.instructions(examples.placed_items(data, "train"))
    rows = [examples.encode_instruction(load_tokenizer(parent), *text, 96, "end") for text in texts]
    assert result.metrics["updates"] == 2
    assert result.metrics["tokens"] == sum(len(row.ids) for row in rows)


def test_an_epoch_of_a_reward_model_passes_over_every_pair_the_last_batch_included(tmp_path, parent):
    data = write_set(tmp_path, train=preference_items(5), validation=preference_items(2, start=100))
    result = run_job(reward_model(epochs=1.0), inputs(tmp_path / "job", data, of=parent), CPU)
    found = examples.pairs(examples.placed_items(data, "train"))
    pairs, _ = examples.encode_pairs(load_tokenizer(parent), found, 24, 12)
    assert result.metrics["updates"] == 2
    assert result.metrics["tokens"] == sum(len(answer.ids) for pair in pairs for answer in pair)


@pytest.mark.parametrize("cut", ["end", "start"])
def test_what_is_cut_is_the_side_that_the_job_says(tmp_path, parent, cut):
    data = write_set(tmp_path, train=instruction_items(6), validation=instruction_items(4, start=100))
    result = run_job(sft(cut=cut, block=50, max_updates=1), inputs(tmp_path / "job", data, of=parent), CPU)
    texts = examples.instructions(examples.placed_items(data, "validation"))
    rows = [examples.encode_instruction(load_tokenizer(parent), *text, 50, cut) for text in texts]
    sums, counts = measure.token_losses(load_model(parent), rows, False, "fp32")
    assert result.metrics["cut_share"] == 1.0
    assert result.metrics["eval_loss_before"] == pytest.approx(sums.sum() / counts.sum(), rel=1e-6)


@pytest.mark.parametrize("nothing", [{"epochs": 0}, {"batch": 0}, {"peak_lr": 0}])
def test_a_training_of_nothing_is_refused(nothing):
    with pytest.raises(ValidationError, match="greater than 0"):
        sft(**nothing)
