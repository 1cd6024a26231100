"""What a model loses without one of its blocks: accuracy on a task, and perplexity (Mix-LN, Figures 2, 3 and 6)."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from paperlm.evaluate.tasks import TaskName
from paperlm.files import write_json
from paperlm.jobs.base import Inputs, Job, Machine, Result, Series
from paperlm.probe.text import Sequences, TextProbe, run_probe

METRIC = "acc"
"Of the task; the papers print accuracies."


class BlockRemoval(TextProbe):
    """The model whole and without each of its blocks in turn; nothing is trained again.

    A block that is gone is the identity on the residual stream. The others keep their number and wiring.
    """

    kind: ClassVar[str] = "block_removal"
    summary: ClassVar[str] = "measures accuracy and perplexity of a model without each of its blocks"

    documents: int = Field(64, gt=0)
    "validation sequences of the perplexity"
    task: TaskName | None = None
    "task of an lm_eval job; None: perplexity alone"
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
        if self.task is not None:
            self.evaluation()
        return self

    def metrics(self) -> tuple[str, ...]:
        return ("full/perplexity", "full/accuracy") if self.task else ("full/perplexity",)

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"removal": ("block", "accuracy", "drop", "stderr", "perplexity")}

    def sequences(self) -> int:
        return self.documents

    def evaluation(self) -> Job:
        """The lm_eval job whose accuracy the trained model has; it knows which tasks there are and what they need."""
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
        return super().data() + (self.evaluation().data() if self.task else [])

    def slug(self) -> str:
        return super().slug() + (f"-{self.task}" if self.task else "")


def run(job: BlockRemoval, inputs: Inputs, machine: Machine) -> Result:
    """Metrics full/accuracy (a share) and full/perplexity; series `removal`, a row per block (from 1).

    Its columns: accuracy, drop = full - accuracy (positive: the block mattered), stderr of the accuracy, perplexity;
    without a task the first three are None. A perplexity that is no finite number is None. What is measured is kept
    in the work folder, so that a killed job goes on with the next block. Raises JobError for a model without blocks or
    next-token loss, DataError for unusable items.
    """
    from tqdm import tqdm

    from paperlm.evaluate.perplexity import perplexity
    from paperlm.probe.blocks import anatomy, require_decoder
    from paperlm.probe.losses import sequence_losses
    from paperlm.probe.removal import removed

    done_path = inputs.work / "measured.json"
    done = json.loads(done_path.read_text(encoding="utf-8")) if done_path.is_file() else {}

    def measure(model: Any, text: Sequences) -> Result:
        require_decoder(model)
        accuracy = _accuracy(job, inputs, machine, text.device)

        def measured(name: str) -> dict[str, Any]:
            if name not in done:
                loss = sequence_losses(model, text.batches()).loss_true()
                done[name] = {"perplexity": perplexity(loss), **accuracy(model)}
                write_json(done_path, done)
            return done[name]

        full = measured("full")
        rows = []
        blocks = range(1, len(anatomy(model).blocks) + 1)
        for block in tqdm(blocks, desc=job.slug(), unit="block", disable=not machine.progress):
            with removed(model, block):
                found = measured(str(block))
            drop = full["accuracy"] - found["accuracy"] if job.task else None
            rows.append([block, found["accuracy"], drop, found["stderr"], found["perplexity"]])
        return Result(
            outcome="measured",
            metrics={"full/perplexity": full["perplexity"]} | ({"full/accuracy": full["accuracy"]} if job.task else {}),
            standard_errors={"full/accuracy": full["stderr"]} if job.task else {},
            series={"removal": Series(columns=["block", "accuracy", "drop", "stderr", "perplexity"], rows=rows)},
            labels=full["labels"],
            versions=full["versions"],
        )

    return run_probe(job, inputs, machine, measure)


def _accuracy(job: BlockRemoval, inputs: Inputs, machine: Machine, device: Any) -> Any:
    """Function of a model: its accuracy on the task with standard error, labels and versions."""
    if job.task is None:
        return lambda model: {"accuracy": None, "stderr": None, "labels": [], "versions": {}}
    from paperlm.evaluate.harness import evaluate
    from paperlm.jobs.lm_eval import BATCH
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
            batch_size=machine.micro_batch or BATCH[device.type],
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
