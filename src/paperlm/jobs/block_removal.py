"""What a model loses without one of its blocks: accuracy on a task, and perplexity (Mix-LN, Figures 2, 3 and 6).

Accuracy is the share of right options on a task of lm-evaluation-harness, and of exact answers on SQuAD, which takes a
model that answers by spans; such a model has no perplexity.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from paperlm.errors import CheckpointError, unknown
from paperlm.evaluate.tasks import TASKS
from paperlm.files import read_sealed, write_sealed
from paperlm.jobs.base import Head, Inputs, Job, Machine
from paperlm.jobs.span_answers import TASK as SQUAD
from paperlm.probe.text import Sequences, TextProbe, blocks_of, flops_to_read, run_probe
from paperlm.result import Result, Series

WHAT = "scores of a removal that is not finished"
METRIC = "acc"
"Of the task; the papers print accuracies."
OF_TOKENS = ("block", "accuracy", "drop", "stderr", "perplexity")
OF_SPANS = ("block", "accuracy", "drop", "stderr", "f1", "f1_drop", "f1_stderr")
"Columns of the series of models that predict tokens, and of those that answer by spans."


def _known(task: str) -> str:
    if task not in (*TASKS, SQUAD):
        raise ValueError(unknown("task", task, [*TASKS, SQUAD]))
    return task


class BlockRemoval(TextProbe):
    """The model whole and without each of its blocks in turn; nothing is trained again.

    A block that is gone is the identity on the residual stream. The others keep their number and wiring.
    """

    kind: ClassVar[str] = "block_removal"
    summary: ClassVar[str] = "measures accuracy and perplexity of a model without each of its blocks"

    documents: int = Field(64, gt=0)
    "validation sequences of the perplexity, where there is one"
    task: Annotated[str, AfterValidator(_known)] | None = None
    "task of an lm_eval job, or squad: that of a span_answers job; None: perplexity alone"
    source: Literal["bundled", "local", "hub"] | None = None
    "of the task: where its items come from"
    items: int | None = Field(None, ge=2)
    "of the task: at most so many of its first items; None: all"
    few_shot: int = Field(0, ge=0)
    "of the task: worked examples in front of each item"
    max_length: int | None = Field(None, gt=1)
    "of the task: tokens that the model sees at once"

    @model_validator(mode="after")
    def task_is_whole(self) -> BlockRemoval:
        given = [name for name in ("source", "items", "max_length") if getattr(self, name) is not None]
        if self.task is None and (given or self.few_shot):
            raise ValueError(f"{', '.join(given or ['few_shot'])}: without a task; name one, or leave it out")
        if self.task == SQUAD and self.few_shot:
            raise ValueError("few_shot: a model that answers by spans takes no worked examples; leave it out")
        if self.task is not None:
            self.evaluation()
        return self

    def needs_head(self) -> Head:
        return "tokens" if self.reads_text() else "spans"

    def reads_text(self) -> bool:
        return self.task != SQUAD

    def metrics(self) -> tuple[str, ...]:
        if self.task == SQUAD:
            return ("full/accuracy", "full/f1")
        return ("full/perplexity", "full/accuracy") if self.task else ("full/perplexity",)

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"removal": OF_SPANS if self.task == SQUAD else OF_TOKENS}

    def flops(self) -> float | None:
        """Of a pass over texts and items with the whole model and one without each block."""
        blocks = blocks_of(self)
        if blocks is None:
            return None
        found = 0.0
        if self.reads_text():
            found += flops_to_read(self, self.length()) * self.documents * self.length()
        if self.task:
            tokens, ids = self.evaluation().tokens_asked()
            found += flops_to_read(self, ids) * tokens
        return found * (blocks + 1)

    def sequences(self) -> int:
        return self.documents

    def evaluation(self) -> Job:
        """The job whose accuracy the whole model has; it knows which tasks there are and what they need."""
        if self.task == SQUAD:
            from paperlm.jobs.span_answers import SpanAnswers

            return SpanAnswers(of=self.of, source=self.source, items=self.items, max_length=self.max_length)
        from paperlm.jobs.lm_eval import LmEval

        return LmEval(
            of=self.of,
            tasks=[self.task],
            source=self.source,
            items=self.items,
            few_shot=self.few_shot,
            max_length=self.max_length,
        )

    def data(self) -> list[Any]:
        text = super().data() if self.reads_text() else []
        return text + (self.evaluation().data() if self.task else [])

    def behaviours(self) -> dict[str, int]:
        return {**super().behaviours(), **(self.evaluation().behaviours() if self.task == SQUAD else {})}

    def slug(self) -> str:
        return super().slug() + (f"-{self.task}" if self.task else "")


def run(job: BlockRemoval, inputs: Inputs, machine: Machine) -> Result:
    """Metrics full/accuracy (a share) and full/perplexity; series `removal`, a row per block (from 1).

    Its columns: accuracy, drop = full - accuracy (positive: the block mattered), stderr of the accuracy, perplexity;
    without a task the first three are None. A perplexity that is no finite number is None. On SQuAD there are F1, its
    drop and its standard error in the place of perplexities, and accuracy is exact match. What is measured is kept
    in the work folder, so that a killed job goes on with the next block. Raises JobError for a model without blocks, or
    without the head that the task needs, DataError for unusable items.
    """
    from paperlm.evaluate.perplexity import perplexity
    from paperlm.probe.blocks import require_decoder
    from paperlm.probe.losses import sequence_losses

    if job.task == SQUAD:
        return _run_spans(job, inputs, machine)

    def measure(model: Any, text: Sequences) -> Result:
        require_decoder(model)
        accuracy = _accuracy(job, inputs, machine)

        def scores(model: Any) -> dict[str, Any]:
            loss = sequence_losses(model, text.batches()).loss_true()
            return {"perplexity": perplexity(loss), **accuracy(model)}

        full, *blocks = _whole_and_without(job, inputs, machine, model, scores)
        rows = []
        for block, found in enumerate(blocks, start=1):
            drop = full["accuracy"] - found["accuracy"] if job.task else None
            rows.append([block, found["accuracy"], drop, found["stderr"], found["perplexity"]])
        return Result(
            outcome="measured",
            metrics={"full/perplexity": full["perplexity"]} | ({"full/accuracy": full["accuracy"]} if job.task else {}),
            standard_errors={"full/accuracy": full["stderr"]} if job.task else {},
            series={"removal": Series(columns=list(OF_TOKENS), rows=rows)},
            labels=full["labels"],
            versions=full["versions"],
        )

    return run_probe(job, inputs, machine, measure)


def _run_spans(job: BlockRemoval, inputs: Inputs, machine: Machine) -> Result:
    """The same on SQuAD."""
    from paperlm.jobs.span_answers import questions, versions

    model, answers = questions(job.evaluation(), inputs.data[0], inputs.models["of"], machine)
    full, *blocks = _whole_and_without(job, inputs, machine, model, lambda model: answers(model, False))
    rows = []
    for block, found in enumerate(blocks, start=1):
        row: list[float] = [block]
        for name in ("exact_match", "f1"):
            share = found["metrics"][name]
            row += [share, full["metrics"][name] - share, found["standard_errors"][name]]
        rows.append(row)
    return Result(
        outcome="measured",
        metrics={"full/accuracy": full["metrics"]["exact_match"], "full/f1": full["metrics"]["f1"]},
        standard_errors={
            "full/accuracy": full["standard_errors"]["exact_match"],
            "full/f1": full["standard_errors"]["f1"],
        },
        series={"removal": Series(columns=list(OF_SPANS), rows=rows)},
        labels=[*full["labels"], f"{SQUAD}: accuracy is exact match"],
        versions=versions(),
    )


def _whole_and_without(
    job: BlockRemoval, inputs: Inputs, machine: Machine, model: Any, scores: Callable[[Any], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Scores of the whole model, then without each block, first to last; each is kept in the work folder at once."""
    from tqdm import tqdm

    from paperlm.probe.blocks import anatomy
    from paperlm.probe.removal import removed

    done_path, of = inputs.work / "measured.json", {"job_id": job.job_id, "behaviour": job.behaviours()}
    done = _kept(done_path, of)

    def measured(name: str) -> dict[str, Any]:
        if name not in done:
            done[name] = scores(model)
            write_sealed(done_path, WHAT, {**of, "done": done})
        return done[name]

    found = [measured("full")]
    blocks = range(1, len(anatomy(model).blocks) + 1)
    for block in tqdm(blocks, desc=job.slug(), unit="block", disable=not machine.progress):
        with removed(model, block):
            found.append(measured(str(block)))
    return found


def _kept(path: Path, of: dict[str, Any]) -> dict[str, Any]:
    """What an earlier start measured of the same job under the same rules. Raises CheckpointError if altered."""
    if not path.exists() and not path.is_symlink():
        return {}
    remedy = f"delete it: {of['job_id']} is then measured from the start"
    found = read_sealed(path, WHAT, [*of, "done"], CheckpointError, remedy)
    return found["done"] if all(found[key] == value for key, value in of.items()) else {}


def _accuracy(job: BlockRemoval, inputs: Inputs, machine: Machine) -> Any:
    """Function of a model: its accuracy on the task with standard error, labels and versions."""
    if job.task is None:
        return lambda model: {"accuracy": None, "stderr": None, "labels": [], "versions": {}}
    from paperlm.evaluate.harness import evaluate
    from paperlm.evaluate.questions import at_once
    from paperlm.models.folder import load_tokenizer

    tokenizer = load_tokenizer(inputs.models["of"])

    def accuracy(model: Any) -> dict[str, Any]:
        found = evaluate(
            model,
            tokenizer,
            [job.task],
            {job.task: inputs.data[1]},
            few_shot=job.few_shot,
            max_length=job.max_length,
            batch_size=at_once(machine, job.max_length),
            limit=job.items,
            progress=False,
        )
        key = f"{job.task}/{METRIC}"
        labels = [f"{job.task}: {found.items[job.task]} items"]
        if share := found.cut[job.task]:
            labels.append(f"{job.task}: {100 * share:.1f} % of requests cut on the left to {job.max_length} tokens")
        return {
            "accuracy": found.metrics[key],
            "stderr": found.standard_errors[key],
            "labels": labels,
            "versions": found.versions,
        }

    return accuracy
