"""Reward model: a language model with a scalar head, trained by trl to score chosen answers above rejected ones."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from pydantic import Field

from paperlm.data.settings import DataSettings
from paperlm.errors import DataError
from paperlm.finetune import examples as texts
from paperlm.finetune.settings import Training, named_after
from paperlm.jobs.base import Inputs, Job, Machine, parent
from paperlm.probe.text import root
from paperlm.result import Result


class RewardModel(Training):
    """Every weight and a fresh linear score at the last token; loss -log sigmoid(chosen - rejected) (Bradley-Terry)."""

    kind: ClassVar[str] = "reward_model"
    priority: ClassVar[int] = 1
    summary: ClassVar[str] = "trains a reward model on pairs of preferred and rejected answers (trl's RewardTrainer)"
    leaves_model: ClassVar[bool] = True

    of: parent("sft", "pretrain")
    "model to start from"
    examples: int = Field(gt=0)
    "at most so many of its training pairs"
    validation_examples: int = Field(gt=1)
    "at most so many of its validation pairs, for the accuracy"
    prompt_length: int = Field(gt=0)
    "pairs with a longer prompt, in ids, are left out"
    answer_length: int = Field(gt=0)
    "answers are cut behind so many ids, eos included"

    def data(self) -> list[DataSettings]:
        if self.train_split == self.validation_split:
            raise ValueError("validation_split has to differ from train_split: several pairs of a set share a prompt")
        return [self.items(self.examples, self.validation_examples, "chosen", "rejected")]

    def metrics(self) -> tuple[str, ...]:
        return (
            "accuracy", "loss", "margin", "train_loss", "updates", "tokens", "pairs", "pairs_left_out",
            "validation_pairs", "cut_share",
        )  # fmt: skip

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"train": ("update", "loss", "lr", "accuracy", "margin")}

    def weight_count(self) -> int | None:
        """The head of the model that it starts from is one score."""
        model, count = root(self), super().weight_count()
        if model.kind != "pretrain" or model.tie_word_embeddings:
            return count
        return count - (model.vocab_size - 1) * model.hidden_size

    def most(self) -> tuple[int, int, int]:
        return self.examples, 2, self.prompt_length + self.answer_length

    def slug(self) -> str:
        return named_after(self, self.of)


def run(job: Job, inputs: Inputs, machine: Machine) -> Result:
    """Train and leave the model (AutoModelForSequenceClassification); metrics are of the held-out pairs.

    Raises DataError for a bad pair, JobError for a model that cannot be read, Interrupted and CheckpointError.
    """
    assert isinstance(job, RewardModel)
    started = time.monotonic()
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    from paperlm.finetune.common import Checkpointed, arguments, cast, train
    from paperlm.models.folder import load_tokenizer, save_model

    class Trainer(Checkpointed, RewardTrainer):
        pass

    tokenizer = load_tokenizer(inputs.models["of"])
    pairs, left_out = _pairs(job, inputs, tokenizer, job.train_split)
    held_out, _ = _pairs(job, inputs, tokenizer, job.validation_split)
    rows = [{"chosen_ids": chosen.ids, "rejected_ids": rejected.ids} for chosen, rejected in pairs]
    device = machine.torch_device()

    def build(micro: int) -> Trainer:
        options = arguments(RewardConfig, job, device, inputs.work, updates, micro, job.batch, max_length=None)
        model = cast(reward_model(inputs.models["of"], tokenizer, job.seed), job.numerics)
        return Trainer(model=model, args=options, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)

    updates = job.updates(len(rows))
    width = 2 * (job.prompt_length + job.answer_length)
    trained = train(build, job, inputs, machine, updates=updates, rows=job.batch, width=width, started=started)
    if trained.model is None:
        return Result(outcome="out_of_memory", cost=trained.cost)
    losses = trained.series(loss="loss", lr="learning_rate", accuracy="accuracy", margin="margin")
    measured, errors = _accuracy(trained.model, held_out, job.numerics) if trained.finite else ({}, {})
    finite = trained.finite and measured["loss"] is not None
    if finite:
        save_model(inputs.model, trained.model, tokenizer)
    metrics = {
        "accuracy": None,
        "loss": None,
        "margin": None,
        **measured,
        "train_loss": trained.final("loss", 0.1),
        "updates": trained.updates,
        "tokens": trained.tokens,
        "pairs": len(pairs),
        "pairs_left_out": left_out,
        "validation_pairs": len(held_out),
        "cut_share": sum(a.cut or b.cut for a, b in pairs) / len(pairs),
    }
    return Result(
        outcome="trained" if finite else "not_finite",
        metrics=metrics,
        standard_errors=errors if finite else {},
        series={"train": losses},
        cost=trained.cost,
        labels=_labels(metrics, pairs, held_out),
    )


def _pairs(job: RewardModel, inputs: Inputs, tokenizer: Any, split: str) -> tuple[list[Any], int]:
    found = texts.pairs(texts.placed_items(inputs.data[0], split))
    kept, left_out = texts.encode_pairs(tokenizer, found, job.prompt_length, job.answer_length)
    if len(kept) < 2:
        raise DataError(
            f"{inputs.data[0]}: {len(kept)} {split} pairs have a prompt of at most {job.prompt_length} ids and answers "
            f"that differ in {job.answer_length}; raise the lengths"
        )
    return kept, left_out


def reward_model(folder: Any, tokenizer: Any, seed: int) -> Any:
    """The decoder of a folder with a fresh scalar head, its weights normal of std `initializer_range` by this seed."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from paperlm.models.folder import load_model

    causal = load_model(folder)
    config = causal.config
    config.num_labels = 1
    config.pad_token_id = tokenizer.pad_token_id
    model = AutoModelForSequenceClassification.from_config(config)
    model.base_model.load_state_dict(causal.base_model.state_dict())
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.score.weight, 0.0, config.initializer_range)
    return model


def _accuracy(model: Any, pairs: list[Any], numerics: str) -> tuple[dict[str, float | None], dict[str, float]]:
    """Metrics of scored pairs and their standard errors over pairs; a tie counts as wrong."""
    import numpy as np

    from paperlm.finetune.measure import mean_and_error, scores

    values = scores(model, [example.ids for pair in pairs for example in pair], numerics).reshape(-1, 2)
    margin = values[:, 0] - values[:, 1]
    if not np.isfinite(margin).all():
        return {"accuracy": None, "loss": None, "margin": None}, {}
    per_pair = {"accuracy": (margin > 0).astype(float), "loss": np.logaddexp(0.0, -margin), "margin": margin}
    found = {name: mean_and_error(each) for name, each in per_pair.items()}
    return {name: mean for name, (mean, _) in found.items()}, {name: error for name, (_, error) in found.items()}


def _labels(metrics: dict[str, Any], pairs: list[Any], held_out: list[Any]) -> list[str]:
    labels = []
    if metrics["cut_share"] > 0:
        labels.append(f"{100 * metrics['cut_share']:.0f} % of the training pairs have an answer that was cut")
    prompts = {tuple(chosen.ids[: chosen.answer]) for chosen, _ in pairs}
    seen = sum(tuple(chosen.ids[: chosen.answer]) in prompts for chosen, _ in held_out)
    if seen:
        labels.append(f"{seen} of {len(held_out)} held-out pairs have a prompt that was trained on")
    return labels
