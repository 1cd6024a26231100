"""Policy optimization: a fine-tuned model trained by REINFORCE leave-one-out (trl) to earn a reward model's score.

What is special: rewards are in standard deviations of the samples of one shared fine-tuned model, a second reward
model, which trains nothing, may judge the same samples, and prompts that were not trained on decide.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from paperlm.data.settings import DataSettings
from paperlm.errors import DataError
from paperlm.finetune import examples as texts
from paperlm.finetune.settings import Training, named_after
from paperlm.jobs.base import Inputs, Job, Machine, parent
from paperlm.models.sizes import bytes_in_training
from paperlm.result import Result

FINAL = 0.05
"Share of the updates, the last ones, whose mean is the final reward (our choice; the Mix-LN paper does not say)."


class RLOO(Training):
    """RLOO (arXiv 2402.14740): the baseline of each sample is the mean reward of the other samples of its prompt.

    The prompts are those of a set of preferences. `batch` counts prompts; an epoch is a pass over the training prompts,
    in whole batches.
    """

    kind: ClassVar[str] = "rloo"
    priority: ClassVar[int] = 1
    summary: ClassVar[str] = "optimizes a fine-tuned model against a reward model (trl's RLOOTrainer)"
    leaves_model: ClassVar[bool] = True

    of: parent("sft")
    "policy to start from, and reference of the KL penalty"
    reward: parent("reward_model")
    "scores the samples that are trained on"
    baseline: parent("sft")
    "its samples define the unit: 0 is their mean reward, 1 a standard deviation above; shared by compared policies"
    judge: parent("reward_model") = None
    "a second reward model that only scores the held-out samples, against a home-team effect"
    prompts: int = Field(gt=0)
    "training prompts: the first that fit into prompt_length"
    validation_prompts: int = Field(gt=1)
    "held-out prompts: the first of the validation split that fit"
    prompt_length: int = Field(gt=0)
    "longest prompt, in ids"
    answer_length: int = Field(gt=0)
    "longest sample, in ids"
    samples: int = Field(gt=1)
    "samples for each prompt, in training and in held-out measurements"
    beta: float = Field(ge=0)
    "weight of the KL penalty against the starting policy, in the unit of the reward"
    temperature: float = Field(1.0, gt=0)
    "of sampling"

    def data(self) -> list[DataSettings]:
        # Not every item has a prompt that fits or that is new, so all of them are prepared.
        if self.train_split == self.validation_split:
            raise ValueError("validation_split has to differ from train_split: several pairs of a set share a prompt")
        return [self.items(None, None, "chosen", "rejected")]

    def metrics(self) -> tuple[str, ...]:
        judges = ("reward", "judge") if self.judge is not None else ("reward",)
        rewards = [f"{judge}_{when}" for judge in judges for when in ("before", "after", "gain")]
        counts = ("updates", "prompts", "validation_prompts")
        return ("final_reward", *counts, *rewards, "kl", "length_before", "length_after")

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"reward": ("update", "reward", "reward_std", "kl", "length")}

    def most(self) -> tuple[int, int, int]:
        return self.prompts, self.samples, self.prompt_length + self.answer_length

    def card_bytes(self) -> int | None:
        """With the reference, the reward model and the judge, whose weights are of the same kind."""
        beside = [model.weight_count() for name, model in self.parents().items() if name != "baseline"]
        if None in beside:
            return None
        return super().card_bytes() + bytes_in_training(sum(beside), self.numerics, moments=0, gradients=False)

    def slug(self) -> str:
        return named_after(self, self.of)

    def updates(self, examples: int) -> int:
        """Updates on so many prompts; what is left of an epoch behind its last whole batch is dropped."""
        return super().updates(examples - examples % self.batch)


def run(job: Job, inputs: Inputs, machine: Machine) -> Result:
    """Train and leave the policy.

    Raises DataError for a bad pair or too few prompts, JobError for a model that cannot be read, Interrupted and
    CheckpointError.
    """
    assert isinstance(job, RLOO)
    started = time.monotonic()
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    from paperlm.finetune.common import Checkpointed, arguments, cast, quiet, train
    from paperlm.finetune.policy import HeldOut, Reward
    from paperlm.models.folder import load_model, load_tokenizer, save_model

    class Trainer(Checkpointed, RLOOTrainer):
        pass

    quiet()
    if job.prompts < job.batch:
        raise DataError(f"rloo: {job.prompts} prompts do not fill a batch of {job.batch}; lower batch")
    tokenizer = load_tokenizer(inputs.models["of"])
    tokenizer.padding_side = "left"  # trl asks for it
    device = machine.torch_device()
    prompts = _prompts(job, inputs, tokenizer, job.train_split, job.prompts)
    held_out = HeldOut(job, tokenizer, _prompts(job, inputs, tokenizer, job.validation_split, job.validation_prompts))
    baseline = held_out.sample(load_model(inputs.models["baseline"]).to(device))
    rewards = {
        name: Reward(load_model(inputs.models[name], "sequence").to(device), tokenizer, baseline, job.numerics)
        for name in ("reward", "judge")
        if name in inputs.models
    }
    same = job.of == job.baseline
    before = baseline if same else held_out.sample(load_model(inputs.models["of"]).to(device))
    updates = job.updates(job.prompts)

    def build(micro: int) -> Trainer:
        special = {
            "num_generations": job.samples,
            "max_completion_length": job.answer_length,
            "temperature": job.temperature,
            "beta": job.beta,
            "shuffle_dataset": False,  # the rows are in their order; trl would start its own anew when it resumes
        }
        rows = job.batch * job.samples
        return Trainer(
            model=cast(load_model(inputs.models["of"]), job.numerics),
            reward_funcs=rewards["reward"].of_texts,
            args=arguments(RLOOConfig, job, device, inputs.work, updates, micro, rows, **special),
            train_dataset=Dataset.from_list(_order(job, prompts, updates)),
            processing_class=tokenizer,
        )

    trained = train(
        build,
        job,
        inputs,
        machine,
        updates=updates,
        rows=job.batch * job.samples,
        width=job.prompt_length + job.answer_length,
        started=started,
    )
    if trained.model is None:
        return Result(outcome="out_of_memory", cost=trained.cost)
    keys = {"reward": "reward", "reward_std": "reward_std", "kl": "kl", "length": "completions/mean_length"}
    metrics: dict[str, float | int | None] = {
        "final_reward": trained.final("reward", FINAL),
        "updates": trained.updates,
        "prompts": len(prompts),
        "validation_prompts": len(held_out.prompts),
    }
    errors: dict[str, float | None] = {}
    if trained.finite:
        after = held_out.sample(trained.model)
        reference = load_model(inputs.models["of"]).to(device)
        for found, its_errors in held_out.compare(rewards, before, after, trained.model, reference):
            metrics |= found
            errors |= its_errors
        # Samples of a prompt go together, so that the prompts are what is counted.
        errors["final_reward"] = trained.error("reward_std", FINAL, job.batch)
        save_model(inputs.model, trained.model, load_tokenizer(inputs.models["of"]))
    return Result(
        outcome="trained" if trained.finite else "not_finite",
        metrics=metrics,
        standard_errors=errors,
        series={"reward": trained.series(**keys)},
        cost=trained.cost,
        labels=[
            f"reward in standard deviations of the samples of {job.baseline.slug()}; not on the paper's scale",
            *(["no second reward model judges the samples"] if "judge" not in rewards else []),
        ],
    )


def _prompts(job: RLOO, inputs: Inputs, tokenizer: Any, split: str, count: int) -> list[str]:
    found = texts.pairs(texts.placed_items(inputs.data[0], split))
    return texts.short_prompts(tokenizer, found, job.prompt_length, count, Path(f"{inputs.data[0]}, {split}"))


def _order(job: RLOO, prompts: list[str], updates: int) -> list[dict[str, str]]:
    """A row for each prompt of each update; every epoch has an order of its own."""
    import numpy as np

    whole = len(prompts) - len(prompts) % job.batch
    rows: list[dict[str, str]] = []
    epoch = 0
    while len(rows) < updates * job.batch:
        order = np.random.default_rng((job.seed, epoch)).permutation(len(prompts))[:whole]
        rows += [{"prompt": prompts[i]} for i in order]
        epoch += 1
    return rows[: updates * job.batch]
