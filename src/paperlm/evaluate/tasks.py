"""The tasks of lm-evaluation-harness that the papers report: which split, which set of the registry, which fields.

Nothing here imports lm-eval or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator

from paperlm.errors import SpecError, unknown

Source = Literal["bundled", "local", "hub"]
"""bundled: 100 items of each task (MMLU: 114), in the package; local: the full sets, in the folder `local_data`;
hub: the sets that lm-eval names."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task; its name is lm-eval's."""

    definition: str
    "its file below lm_eval/tasks; of a group, that of a subject with `{subject}`"
    split: str
    "the split that lm-eval evaluates"
    few_shot_split: str
    "the split that lm-eval draws few-shot examples from"
    datasets: Mapping[Source, str]
    "name of the set in the registry"
    fields: tuple[str, ...]
    "what the definition reads of an item"
    items: int
    "of the split, whole"
    passes: int
    """requests of an item that the model reads: an option each; 1 where each option is one token, since lm-eval then
    reads what they share once"""
    tokens: int
    "of a request without examples as T5 splits the bundled items, on average"
    bundled: int = 100
    "items of the part in the package"
    metrics: tuple[str, ...] = ("acc",)
    "what the definition computes: acc, and acc_norm, by the likelihood over the option's length in characters"
    group: str | None = None
    "file of the group that averages over the subjects"


def _sets(name: str, hub: str) -> dict[Source, str]:
    return {"bundled": name, "local": f"{name}_full", "hub": hub}


TASKS: dict[str, Task] = {
    "mmlu": Task(
        definition="mmlu/default/mmlu_{subject}.yaml",
        group="mmlu/default/_mmlu.yaml",
        split="test",
        few_shot_split="dev",
        datasets=_sets("mmlu", "cais/mmlu"),
        fields=("question", "subject", "choices", "answer"),
        items=14_042,
        passes=1,
        tokens=102,
        bundled=114,
    ),
    "boolq": Task(
        definition="super_glue/boolq/default.yaml",
        split="validation",
        few_shot_split="train",
        datasets=_sets("boolq", "aps/super_glue/boolq"),
        fields=("question", "passage", "label"),
        items=3270,
        passes=1,
        tokens=159,
    ),
    "arc_easy": Task(
        definition="arc/arc_easy.yaml",
        split="test",
        few_shot_split="train",
        datasets=_sets("arc_easy", "allenai/ai2_arc/ARC-Easy"),
        fields=("question", "choices", "answerKey"),
        items=2376,
        passes=4,
        tokens=36,
        metrics=("acc", "acc_norm"),
    ),
    "arc_challenge": Task(
        definition="arc/arc_challenge.yaml",
        split="test",
        few_shot_split="train",
        datasets=_sets("arc_challenge", "allenai/ai2_arc/ARC-Challenge"),
        fields=("question", "choices", "answerKey"),
        items=1172,
        passes=4,
        tokens=39,
        metrics=("acc", "acc_norm"),
    ),
    "piqa": Task(
        definition="piqa/piqa.yaml",
        split="validation",
        few_shot_split="train",
        datasets=_sets("piqa", "baber/piqa"),
        fields=("goal", "sol1", "sol2", "label"),
        items=1838,
        passes=2,
        tokens=39,
        metrics=("acc", "acc_norm"),
    ),
    "hellaswag": Task(
        definition="hellaswag/hellaswag.yaml",
        split="validation",
        few_shot_split="train",
        datasets=_sets("hellaswag", "Rowan/hellaswag"),
        fields=("activity_label", "ctx_a", "ctx_b", "endings", "label"),
        items=10_042,
        passes=4,
        tokens=96,
        metrics=("acc", "acc_norm"),
    ),
    "openbookqa": Task(
        definition="openbookqa/openbookqa.yaml",
        split="test",
        few_shot_split="train",
        datasets=_sets("openbookqa", "allenai/openbookqa"),
        fields=("question_stem", "choices", "answerKey"),
        items=500,
        passes=4,
        tokens=17,
        metrics=("acc", "acc_norm"),
    ),
    "winogrande": Task(
        definition="winogrande/default.yaml",
        split="validation",
        few_shot_split="train",
        datasets=_sets("winogrande", "allenai/winogrande"),
        fields=("sentence", "option1", "option2", "answer"),
        items=1267,
        passes=2,
        tokens=25,
    ),
}
"The seven of Mix-LN Table 2 and LNS Table 3, and ARC-Challenge of BitNet a4.8, Tables 1, 3 and 4."


def _known(name: str) -> str:
    try:
        task_of(name)
    except SpecError as error:
        raise ValueError(str(error)) from None
    return name


TaskName = Annotated[str, AfterValidator(_known)]


def task_of(name: str) -> Task:
    """The task; SpecError with the nearest known name otherwise."""
    if name not in TASKS:
        raise SpecError(unknown("task", name, TASKS))
    return TASKS[name]
