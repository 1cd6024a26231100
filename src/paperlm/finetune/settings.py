"""Settings that the three kinds of job trained by trl share. Nothing here imports torch."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal

from pydantic import Field, model_validator

from paperlm.data.registry import DatasetName, dataset_entry
from paperlm.data.settings import ItemData
from paperlm.jobs.base import Beta, Job, Seed
from paperlm.models.sizes import bytes_in_training

Numerics = Literal["fp32", "fp32_master", "pure_bf16"]
"""fp32: everything; fp32_master: float32 weights and products in bfloat16 (autocast); pure_bf16: weights, gradients and
Adam's moments in bfloat16."""


class Training(Job):
    """Data, optimizer, schedule and length of a training by trl."""

    dataset: DatasetName
    "set of items: `bundled:`, `local:` or `hub:` and a name of the data registry"
    train_split: str = "train"
    "its split to train on"
    validation_split: str = "validation"
    "its split for what is measured"
    batch: int = Field(gt=0)
    "examples an update: texts, pairs, or prompts"
    epochs: float = Field(gt=0)
    "passes over the training examples; it need not be whole"
    peak_lr: float = Field(gt=0)
    warmup: float = Field(ge=0, lt=1)
    "share of the updates during which the learning rate rises linearly from 0"
    schedule: Literal["linear", "cosine", "constant"]
    "after the warm-up: linearly or along half a cosine to 0, or level"
    numerics: Numerics
    seed: Seed
    max_updates: int | None = Field(None, gt=0)
    "stop, with the schedule ended, after so many updates even if epochs are left"
    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)
    adam_eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    "decoupled (AdamW); norm weights are left out"
    grad_clip: float = Field(1.0, ge=0)
    "largest norm of the gradient; 0: not clipped. 1 is the default of transformers' trainer"

    @model_validator(mode="after")
    def data_exist(self) -> Training:
        self.data()
        return self

    def items(self, training: int | None, validation: int | None, *fields: str) -> ItemData:
        """So many items of both splits; None: all. ValueError if the set is unknown or its items lack a field."""
        counts = {self.train_split: training, self.validation_split: validation}
        found = ItemData(dataset=self.dataset, splits=counts)
        known = dataset_entry(self.dataset)[1].fields
        if missing := [field for field in fields if field not in known]:
            raise ValueError(f"dataset {self.dataset!r} has no field {missing[0]!r}; it has {', '.join(known)}")
        return found

    @abstractmethod
    def most(self) -> tuple[int, int, int]:
        """How many training examples there are at most, how many texts one is, and of how many ids each."""

    def flops(self) -> float | None:
        """Of training, were there as many examples as may be, each as long as it may be, without measurements. None for
        a model from elsewhere, whose shape its folder has."""
        model = next((job for job in self.ancestors() if job.kind == "pretrain"), None)
        if model is None:
            return None
        examples, texts, ids = self.most()
        return model.flops_of_a_token(ids) * self.updates(examples) * self.batch * texts * ids

    def card_bytes(self) -> int | None:
        count = self.weight_count()
        return bytes_in_training(count, self.numerics) if count else None

    def updates(self, examples: int) -> int:
        """Updates of a training on so many examples; an epoch's last update may have fewer than `batch`."""
        wanted = max(1, round(self.epochs * math.ceil(examples / self.batch)))
        return min(wanted, self.max_updates or wanted)

    def warmup_updates(self, updates: int) -> int:
        """Updates of the warm-up, rounded up."""
        return math.ceil(self.warmup * updates)


def named_after(job: Job, parent: Job) -> str:
    """`<kind>-<slug of the parent without its kind>`: sft-pre_ln-s0."""
    return f"{job.kind}-{parent.slug().removeprefix(f'{parent.kind}-')}"
