"""Questions answered by spans of a passage, SQuAD v1.1: exact match and F1 of a model with such a head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from paperlm.data.settings import DataSettings, ItemData
from paperlm.evaluate.tasks import Source
from paperlm.jobs.base import Head, Inputs, Job, Machine, parent
from paperlm.result import Result

TASK = "squad"
SETS: dict[Source, str] = {"bundled": "squad", "local": "squad_1000", "hub": "rajpurkar/squad"}
"Names in the registry."
ITEMS: dict[Source, int] = {"bundled": 100, "local": 1000, "hub": 10_570}
"Of their validation splits."
TOKENS = 194
"Of question and passage as T5 splits those of the bundled items, on average."
BATCH = {"cpu": 8, "cuda": 64}
"Windows per forward pass unless the machine says otherwise; no number depends on it beyond rounding."


class SpanAnswers(Job):
    """Exact match and F1 of SQuAD v1.1's own script; how spans are found and passages cut is BERT's run_squad.py.

    Metrics: exact_match and f1 (shares between 0 and 1), items, windows, unanswered (share of items without a span).
    """

    kind: ClassVar[str] = "span_answers"
    summary: ClassVar[str] = "answers questions by spans of a passage (SQuAD v1.1)"
    behaviour: ClassVar[int] = 2  # a token behind all windows but a short last one may start an answer

    of: parent("hub_model")
    "the model, of an architecture whose head marks spans"
    source: Source
    "where the items come from"
    items: int | None = Field(None, ge=2)
    "at most so many of the first items; None: all"
    max_length: int = Field(gt=1)
    "tokens that the model sees at once, question and passage; a longer passage is read in windows"
    stride: int = Field(128, gt=0)
    "tokens between the beginnings of two windows; the default is run_squad.py's"
    n_best: int = Field(20, gt=0)
    "so many starts and so many ends of a window are looked at; the default is run_squad.py's"
    longest: int = Field(30, gt=0)
    "tokens of an answer at most; the default is run_squad.py's"

    def needs_head(self) -> Head:
        return "spans"

    def data(self) -> list[DataSettings]:
        """The validation items, whole: `items` is applied later, so that jobs share what is prepared."""
        return [ItemData(dataset=f"{self.source}:{SETS[self.source]}", splits={"validation": None})]

    def tokens_asked(self) -> tuple[float, int]:
        """Tokens that the model reads, about, and ids of a text of them: for estimates."""
        ids = min(TOKENS, self.max_length)
        return float(ids * min(ITEMS[self.source], self.items or ITEMS[self.source])), ids

    def metrics(self) -> tuple[str, ...]:
        return ("exact_match", "f1", "items", "windows", "unanswered")

    def series(self) -> dict[str, tuple[str, ...]]:
        return {}

    def slug(self) -> str:
        return f"span_answers-{self.of.slug()}"


Answers = dict[str, Any]
"Metrics, standard errors and labels of a model, as plain JSON values."


def run(job: SpanAnswers, inputs: Inputs, machine: Machine) -> Result:
    """Evaluate. Raises DataError for unusable items, before the model is read, and JobError for an unusable model."""
    model, asked = questions(job, inputs.data[0], inputs.models["of"], machine)
    found = asked(model, machine.progress)
    return Result(outcome="measured", versions=versions(), **found)


def questions(
    job: SpanAnswers, items: Path, folder: Path, machine: Machine
) -> tuple[Any, Callable[[Any, bool], Answers]]:
    """The model of a folder, in float32 on the machine's device, and a function of a model with the same tokenizer:
    what it answers, with a bar of progress or without.

    `items`: manifest of the prepared ones. Raises what `run` raises.
    """
    import torch

    from paperlm.evaluate.spans import answer, load_questions, require_spans, scores, windows_of
    from paperlm.finetune.measure import mean_and_error
    from paperlm.models.folder import load_model, load_tokenizer

    asked = load_questions(items, job.items)
    device = machine.torch_device()
    model = load_model(folder, head="own", dtype=torch.float32).to(device)
    require_spans(model, job.max_length)
    windows = windows_of(load_tokenizer(folder), asked, max_length=job.max_length, stride=job.stride)
    batch = machine.micro_batch or BATCH[device.type]

    def answers(model: Any, progress: bool) -> Answers:
        texts = answer(
            model, windows, asked, n_best=job.n_best, longest=job.longest, batch_size=batch, progress=progress
        )
        exact, f1 = (mean_and_error(values) for values in scores(texts, asked))
        unanswered = texts.count("") / len(texts)
        whole = job.source == "hub" and job.items is None
        labels = [f"{TASK}: {len(asked)} items" if whole else f"{TASK}: a subset of {len(asked)} items"]
        if unanswered:
            labels.append(f"{TASK}: {100 * unanswered:.1f} % of questions without a span as an answer, which counts 0")
        return {
            "metrics": {
                "exact_match": exact[0],
                "f1": f1[0],
                "items": len(asked),
                "windows": len(windows),
                "unanswered": unanswered,
            },
            "standard_errors": {"exact_match": exact[1], "f1": f1[1]},
            "labels": labels,
        }

    return model, answers


def versions() -> dict[str, str]:
    """Of the package whose copy of SQuAD's script is used."""
    import lm_eval

    return {"lm_eval": lm_eval.__version__}
