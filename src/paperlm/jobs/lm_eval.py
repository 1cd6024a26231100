"""Multiple-choice tasks through lm-evaluation-harness: accuracies of a model, as in tables of fine-tuned models."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from paperlm.data.settings import DataSettings, ItemData
from paperlm.evaluate.tasks import Source, TaskName, task_of
from paperlm.jobs.base import Head, Inputs, KVCacheOptions, LooksAtModel, Machine, Result, Seed

BATCH = {"cpu": 16, "cuda": 64}
"Requests per forward pass unless the machine says otherwise; no number depends on it beyond rounding."


class LmEval(LooksAtModel):
    """Accuracies of one model on tasks of lm-evaluation-harness, by the likelihood of each option.

    Metrics: `<task>/acc`, `<task>/acc_norm` where the task has it (likelihood by the option's length in characters),
    `<task>/items`, and `<task>/cut`, the share of requests that did not fit into `max_length`. MMLU is the mean over
    items of 57 subjects.
    """

    kind: ClassVar[str] = "lm_eval"
    summary: ClassVar[str] = "multiple-choice tasks through lm-evaluation-harness"

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
    kv_cache: KVCacheOptions = None
    "numbers of queries, keys and values, as the model's configuration has it; null: as it was trained"

    @field_validator("tasks")
    @classmethod
    def tasks_are_different(cls, tasks: list[str]) -> list[str]:
        if len(set(tasks)) < len(tasks):
            raise ValueError("a task is named twice")
        return tasks

    def needs_head(self) -> Head:
        return "tokens"

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

    def slug(self) -> str:
        """lm_eval-5shot-<parent's>."""
        cache = "" if self.kv_cache is None else f"-q{self.kv_cache['q_bits']}_kv{self.kv_cache['kv_bits']}"
        return f"lm_eval-{self.few_shot}shot{cache}-{self.of.slug()}"


def run(job: LmEval, inputs: Inputs, machine: Machine) -> Result:
    """Evaluate. Raises DataError for unusable items, before the model is read, and JobError for an unusable model."""
    from paperlm.evaluate.harness import evaluate, load_items
    from paperlm.models.folder import load_tokenizer, model_with_cache

    items = dict(zip(job.tasks, inputs.data, strict=True))
    load_items(job.tasks, items, few_shot=job.few_shot, limit=job.items)
    device = machine.torch_device()
    found = evaluate(
        model_with_cache(inputs.models["of"], job.kv_cache).to(device),
        load_tokenizer(inputs.models["of"]),
        job.tasks,
        items,
        few_shot=job.few_shot,
        max_length=job.max_length,
        batch_size=machine.micro_batch or BATCH[device.type],
        limit=job.items,
        few_shot_seed=job.few_shot_seed,
        progress=machine.progress,
    )
    labels = [
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
    return Result(
        outcome="measured",
        metrics=metrics,
        standard_errors=found.standard_errors,
        labels=labels,
        versions=found.versions,
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.005 else "under 1 %"
