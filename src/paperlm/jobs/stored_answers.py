"""Perplexity of answers by an encoder-decoder whose weights are stored in fewer bits (NeuZip, Table 3b)."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from paperlm.data.settings import DataSettings
from paperlm.evaluate.stores import StoredModel, cannot_store, counted, put_into_stores
from paperlm.jobs.base import At, Head, Inputs, Machine, parent
from paperlm.jobs.text_to_sql import Questions
from paperlm.result import Result, Series

REPEATS = 20
"Forward passes that are timed."


class StoredAnswers(StoredModel):
    """exp of the unweighted mean of batch losses, over the held-out questions of a set.

    The protocol of the paper's program: batches in the order of the text, padded to their longest, a batch counts with
    the mean loss of its target tokens, however many. Products are in bfloat16, losses in float32, means in float64.
    """

    kind: ClassVar[str] = "stored_answers"
    summary: ClassVar[str] = "perplexity of answers by an encoder-decoder whose weights are stored in fewer bits"

    of: parent("text_to_sql", "hub_model")
    "the model"
    questions: Questions | None = None
    "for a model from elsewhere alone; one that was trained here reads those that are held out from its training"
    at: At = "end"
    "of its end; no other state is kept"
    batch: int = Field(gt=0)
    "questions of a batch; the last one may be smaller"
    in_float32: list[Literal[".wo."]] = []
    """weights with one of these in their name are not stored, and lie in float32, as in the paper's program: the second
    projections of the feed-forward alone, whose layers take any input"""
    timed: bool = False
    "time forward passes of the first batch on a GPU, in place of evaluating"
    cap_gib: float | None = Field(None, gt=0)
    "timed: memory of the card at most, in GiB, from reading the model on: that of a smaller card; null: all it has"

    @model_validator(mode="after")
    def cap_is_of_a_timed_one(self) -> StoredAnswers:
        if self.cap_gib is not None and not self.timed:
            raise ValueError("cap_gib is of a timed job, which a GPU alone can do: set timed, or leave cap_gib out")
        return self

    @model_validator(mode="after")
    def head_is_the_embedding(self) -> StoredAnswers:
        if self.policy == "all_linear":
            raise ValueError("policy: the head of a T5 is its embedding: say all to store both, or paper for neither")
        return self

    @model_validator(mode="after")
    def reads_one_set(self) -> StoredAnswers:
        elsewhere = self.of.kind == "hub_model"
        if elsewhere != (self.questions is not None):
            raise ValueError(
                "questions say what a hub_model reads: set them"
                if elsewhere
                else "questions are for a hub_model; this one reads those of its own set: leave them out"
            )
        return self

    def needs_head(self) -> Head:
        return "answers"

    def data(self) -> list[DataSettings]:
        return [self.questions.data()] if self.questions else self.of.data()

    def read(self) -> Questions:
        """What it reads."""
        return self.questions or self.of.held_out()

    def metrics(self) -> tuple[str, ...]:
        if self.timed:
            return ("iterations_per_second", "peak_bytes")
        return (
            "perplexity", "loss", "losses_hash", "tokens", "questions", "parameters", "weight_bytes", "bits_per_weight",
            "stored_weights",
        )  # fmt: skip

    def series(self) -> dict[str, tuple[str, ...]]:
        return {} if self.timed else {"batches": ("batch", "mean_loss", "tokens")}

    def slug(self) -> str:
        apart = "-float32" if self.in_float32 else ""
        return super().slug().replace(f"-{self.of_what()}", f"{apart}-{self.of_what()}") + (
            "-timed" if self.timed else ""
        )


EXACT = ("losses_hash", "parameters", "weight_bytes", "bits_per_weight", "stored_weights")
"Metrics that follow from the weights alone."


def run(job: StoredAnswers, inputs: Inputs, machine: Machine) -> Result:
    """Metrics: perplexity and loss (nats a target token), losses_hash (48 bits of the hash of all batches' losses),
    tokens, questions, parameters, weight_bytes (all parameters, each once), bits_per_weight (of those stored; 16 where
    none is), stored_weights. Series `batches`: mean loss and target tokens of each. Timed: iterations_per_second, by
    the median of single passes, and peak_bytes, of a GPU.

    `out_of_memory` where the cap is too small. `blocked` for a store that is not to be had here, for losses that are no
    finite numbers, and where speed is asked for without a GPU. Raises DataError for altered items, JobError for an
    unusable model.
    """
    from paperlm.evaluate.cap import under_cap

    if job.timed and machine.torch_device().type != "cuda":
        return Result(outcome="blocked", reason="speed is of the kernels, which run on a GPU; there is none here")
    if why := cannot_store(job):
        return Result(outcome="blocked", reason=why)
    return under_cap(machine.torch_device(), job.cap_gib, lambda: _measured(job, inputs, machine))


def _measured(job: StoredAnswers, inputs: Inputs, machine: Machine) -> Result:
    import math

    import numpy as np
    import torch

    from paperlm.evaluate.perplexity import perplexity
    from paperlm.jobs.stored_speed import speed_of
    from paperlm.models.folder import load_model

    model = load_model(inputs.models["of"], head="own", dtype=torch.bfloat16)
    # transformers may keep feed-forward projections of a T5 in float32, which no store takes
    model = model.bfloat16()
    parameters = sum(p.numel() for p in model.parameters())
    put_into_stores(model, job, machine.torch_device(), job.in_float32)
    batches = batches_of(job, inputs, machine)
    if job.timed:
        forward = torch.no_grad()(lambda: model(**batches[0], use_cache=False))
        return speed_of(forward, REPEATS, machine.torch_device())
    losses, tokens = mean_losses(model, batches, job, machine)
    stored = counted(model, machine.torch_device())
    if not all(map(math.isfinite, losses)):
        return Result(outcome="blocked", reason="losses of this model are no finite numbers")
    loss = float(np.mean(losses))
    metrics = {
        "perplexity": perplexity(loss),
        "loss": loss,
        "losses_hash": int(hashlib.sha256(np.array(losses, dtype=np.float32).tobytes()).hexdigest()[:12], 16),
        "tokens": sum(tokens),
        "questions": sum(len(batch["labels"]) for batch in batches),
        "parameters": parameters,
        **stored,
    }
    rows: list[list[Any]] = [[index, *pair] for index, pair in enumerate(zip(losses, tokens, strict=True))]
    return Result(
        outcome="measured",
        metrics=metrics,
        standard_errors=dict.fromkeys(EXACT, 0.0),
        series={"batches": Series(columns=["batch", "mean_loss", "tokens"], rows=rows)},
    )


def batches_of(job: StoredAnswers, inputs: Inputs, machine: Machine) -> list[dict[str, Any]]:
    """input_ids, attention_mask and labels of each batch, on the machine's device."""
    from paperlm.data.items import read_items
    from paperlm.data.tokenizer import TextTokenizer
    from paperlm.train.text_to_sql import batch

    read = job.read()
    items, tokenizer = read_items(inputs.data[0], read.split), TextTokenizer(read.tokenizer)
    starts = range(0, len(items), job.batch)
    return [batch(read, tokenizer, items[start : start + job.batch], machine.torch_device()) for start in starts]


def mean_losses(
    model: Any, batches: list[dict[str, Any]], job: StoredAnswers, machine: Machine
) -> tuple[list[float], list[int]]:
    """Of each batch: the mean over its target tokens in nats, as a float32 has it, and how many they are."""
    import torch
    from tqdm import tqdm

    from paperlm.train.text_to_sql import IGNORED

    losses, tokens = [], []
    with torch.no_grad():
        for given in tqdm(batches, desc=job.job_id, unit="batch", disable=not machine.progress):
            logits = model(**given, use_cache=False).logits.float()
            labels = given["labels"].flatten()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED)
            losses.append(loss.item())
            tokens.append(int((given["labels"] != IGNORED).sum()))
    return losses, tokens
