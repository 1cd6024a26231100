"""What a job says that asks a model tasks of lm-evaluation-harness, and the accuracies that it finds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from paperlm.data.settings import DataSettings, ItemData
from paperlm.errors import JobError
from paperlm.evaluate.tasks import Source, TaskName, task_of
from paperlm.jobs.base import Head, Inputs, LooksAtModel, Machine, Seed
from paperlm.result import Result

ON_CPU = 16
"Requests per forward pass on a CPU."
TOKENS_ON_GPU = 2**15
"""Tokens per forward pass on a GPU, 128 requests of 256 or 8 of 4,096: with 32,000 words their logits are 4 GiB in
float32, and their logarithms, which the harness takes of all at once, as much again."""


class AskedModel(LooksAtModel):
    """Settings of a job that asks one model tasks of lm-evaluation-harness, by the likelihood of each option.

    Metrics: `<task>/acc`, `<task>/acc_norm` where the task has it (likelihood by the option's length in characters),
    `<task>/items`, and `<task>/cut`, the share of requests that did not fit into `max_length`. MMLU is the mean over
    items of 57 subjects. The record keeps which items were right, so that two models can be compared in pairs.
    """

    tasks: list[TaskName] = Field(min_length=1)
    "names of paperlm.evaluate.tasks"
    source: Source
    "where the items come from"
    items: int | None = Field(None, ge=2)
    """At most so many of a task's first items; None: all. Of MMLU floor(items / 57) of each subject, and at least two,
    which a standard error needs."""
    few_shot: int = Field(ge=0)
    "worked examples in front of each item"
    few_shot_seed: Seed = 1234
    "of the draw of examples; the default is lm-eval's"
    max_length: int = Field(gt=1)
    "tokens that the model sees at once; longer requests are cut on the left"
    begin: Literal["tokenizer", "bos"] = "tokenizer"
    """what a request begins with: what the tokenizer adds by itself, which is lm-eval's default, or BOS, and EOS where
    the tokenizer has none, which a request that is cut keeps"""
    tokenized: Literal["together", "apart"] = "together"
    """apart: context and option each without the blanks around it, as the public evaluation of b1.58 has it, which is
    written for lm-eval 0.3.0; together, as lm-eval has it since, is their text as one"""

    @field_validator("tasks")
    @classmethod
    def tasks_are_different(cls, tasks: list[str]) -> list[str]:
        if len(set(tasks)) < len(tasks):
            raise ValueError("a task is named twice")
        return tasks

    def needs_head(self) -> Head:
        return "tokens"

    def tokens_asked(self) -> tuple[float, int]:
        """Tokens that the model reads, about, and ids of the longest request of them: for estimates."""
        found, longest = 0.0, 1
        for task in map(task_of, self.tasks):
            items = task.bundled if self.source == "bundled" else task.items
            ids = min(task.tokens * (1 + self.few_shot), self.max_length)
            found += ids * task.passes * min(items, self.items or items)
            longest = max(longest, ids)
        return found, longest

    def data(self) -> list[DataSettings]:
        """One set a task, whole: `items` is applied later, so that jobs share what is prepared."""
        found: list[DataSettings] = []
        for task in map(task_of, self.tasks):
            splits = [task.split, task.few_shot_split] if self.few_shot else [task.split]
            dataset = f"{self.source}:{task.datasets[self.source]}"
            found.append(ItemData(dataset=dataset, splits=dict.fromkeys(splits)))
        return found

    def metrics(self) -> tuple[str, ...]:
        kinds = {name: (*task_of(name).metrics, "items", "cut") for name in self.tasks}
        return tuple(f"{name}/{kind}" for name in self.tasks for kind in kinds[name])

    def series(self) -> dict[str, tuple[str, ...]]:
        return {}


def check_items(job: AskedModel, inputs: Inputs) -> None:
    """DataError for unusable items, to be found before a model is read."""
    from paperlm.evaluate.harness import load_items

    load_items(job.tasks, _items(job, inputs), few_shot=job.few_shot, limit=job.items)


def at_once(machine: Machine, max_length: int) -> int:
    """Requests per forward pass unless the machine says otherwise; likelihoods depend on it in their rounding alone."""
    if machine.micro_batch:
        return machine.micro_batch
    return ON_CPU if machine.torch_device().type == "cpu" else max(1, TOKENS_ON_GPU // max_length)


def ask(job: AskedModel, model: Any, inputs: Inputs, machine: Machine) -> tuple[Result, list[float]]:
    """The metrics of the settings, with standard errors and labels; and the likelihood of each option in the order of
    the requests. The model is on its device. Raises DataError for unusable items, JobError without a tokenizer."""
    from paperlm.evaluate.harness import evaluate
    from paperlm.models.folder import load_tokenizer

    tokenizer = load_tokenizer(inputs.models["of"])
    if job.tokenized == "apart" and tokenizer.encode("a") != tokenizer.encode(" a"):
        raise JobError(
            f"{job.slug()}: tokenized: apart is of vocabularies whose words begin with a blank of their own, as "
            "SentencePiece's; this one would glue an option to its context: set tokenized: together"
        )
    found = evaluate(
        model,
        tokenizer,
        job.tasks,
        _items(job, inputs),
        few_shot=job.few_shot,
        max_length=job.max_length,
        batch_size=at_once(machine, job.max_length),
        limit=job.items,
        few_shot_seed=job.few_shot_seed,
        bos=job.begin == "bos",
        apart=job.tokenized == "apart",
        progress=machine.progress,
    )
    labels = []
    if job.begin == "bos" and tokenizer.bos_token_id is None:
        labels.append("its tokenizer has no BOS: each request begins with its EOS")
    labels += [
        f"{task}: {_percent(share)} of requests cut on the left to {job.max_length} tokens"
        for task, share in found.cut.items()
        if share
    ]
    labels += [
        f"{task}: {_percent(share)} of likelihoods are no numbers; the first such option counts as chosen"
        for task, share in found.not_finite.items()
        if share
    ]
    if job.source == "bundled" or job.items is not None:
        labels += [f"{task}: a subset of {count} items" for task, count in found.items.items()]
    metrics: dict[str, float | int | None] = dict(found.metrics)
    for task in job.tasks:
        metrics |= {f"{task}/items": found.items[task], f"{task}/cut": found.cut[task]}
    result = Result(
        outcome="measured",
        metrics=metrics,
        standard_errors=found.standard_errors,
        answers=found.answers,
        labels=labels,
        versions=found.versions,
    )
    return result, found.likelihoods


def _items(job: AskedModel, inputs: Inputs) -> dict[str, Any]:
    return dict(zip(job.tasks, inputs.data, strict=True))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.005 else "under 1 %"
