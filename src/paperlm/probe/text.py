"""What jobs that look into a model on text share: their settings, the model, and tokens to run it on.

A model that was trained here, or made from one that was, reads the prepared validation tokens of its pre-training,
unless the job names a text. A model from elsewhere reads such a text of the registry, through its own tokenizer, with
the special tokens that it adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, model_validator

from paperlm.data.registry import DatasetName, model_entry
from paperlm.data.shards import TokenShards
from paperlm.data.texts import TextData, read_documents
from paperlm.errors import JobError
from paperlm.jobs.base import Inputs, Job, LooksAtModel, Machine
from paperlm.result import Result

if TYPE_CHECKING:
    import torch

LOGITS = {"cpu": 2**26, "cuda": 2**28}
"Logits of a pass at most: float32, with their softmax and gradients about 0.8 and 3 GB."
SEQUENCES = 32
"Sequences of a pass at most."


def root(job: Job) -> Job:
    """The job at the start of the chain of `of`: a pre-training, or a model from elsewhere."""
    while isinstance(before := getattr(job, "of", None), Job):
        job = before
    return job


def blocks_of(job: Job) -> int | None:
    """Of the model that a job works on; None for one from elsewhere of which the registry does not say it."""
    first = root(job)
    if first.kind != "hub_model":
        return first.n_layers
    size = model_entry(first.name)[1].size
    return size.blocks if size else None


def flops_to_read(job: Job, ids: int) -> float | None:
    """Operations with which the model that a job works on reads a token of texts of so many ids, a third of those that
    train it; of one from elsewhere two for each weight. None where nobody says how many it has."""
    first = root(job)
    if first.kind != "hub_model":
        return first.flops_of_a_token(ids) / 3
    count = first.weight_count()
    return 2.0 * count if count else None


class TextProbe(LooksAtModel):
    """Settings of a measurement inside a model. Weights are float32, also of a model that was trained in bfloat16."""

    text: DatasetName | None = None
    "the text of the registry that is read; None, for a model of ours: the validation tokens of its pre-training"
    text_tokens: int | None = Field(None, gt=1)
    "tokens of a document of that text that are read; the rest is dropped"

    def sequences(self) -> int:
        """How many sequences are read."""
        raise NotImplementedError

    def card_bytes(self) -> int | None:
        count = self.weight_count()
        return 4 * count if count else None

    def length(self) -> int:
        """Ids of each of them at most."""
        return self.text_tokens or root(self).seq_len

    def reads_text(self) -> bool:
        """Whether any are."""
        return True

    @model_validator(mode="after")
    def reads_what_the_model_does(self) -> TextProbe:
        elsewhere = root(self).kind == "hub_model"
        if not self.reads_text():
            if self.text is not None or self.text_tokens is not None:
                raise ValueError("text and text_tokens: no text is read beside the task: leave them out")
        elif None in (self.text, self.text_tokens) and (elsewhere or self.text != self.text_tokens):
            raise ValueError(
                "text and text_tokens say what a hub_model reads: set both"
                if elsewhere
                else "text and text_tokens go together: set both, or neither to read the model's validation tokens"
            )
        elif self.text is not None:
            self.data()  # the text exists
        return self

    def data(self) -> list[Any]:
        if self.text is not None:
            return [TextData(dataset=self.text, documents=self.sequences())]
        return [root(self).token_data()]

    def slug(self) -> str:
        return f"{self.kind}-{self.of_what()}"


@dataclass(frozen=True)
class Sequences:
    """Token ids, padded on the right, and the mask of real ones; both (N, S) int64."""

    ids: np.ndarray
    mask: np.ndarray
    device: Any
    at_once: int

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """ids and mask of sequences start to stop, as many a pass as fit, on the device."""
        import torch

        stop = len(self.ids) if stop is None else stop
        for first in range(start, stop, self.at_once):
            rows = slice(first, min(first + self.at_once, stop))
            yield tuple(torch.from_numpy(part[rows]).to(self.device) for part in (self.ids, self.mask))


def run_probe(job: TextProbe, inputs: Inputs, machine: Machine, measure: Callable[[Any, Sequences], Result]) -> Result:
    """`measure(model, sequences)` with the job's model, in float32 on the machine's device, and its sequences.

    Streams or gradients that are not finite make the outcome `blocked`.
    """
    import torch

    from paperlm.models.folder import load_model
    from paperlm.probe.blocks import NotFiniteError

    device = machine.torch_device()
    model = load_model(inputs.models["of"], head="own", dtype=torch.float32).to(device)
    sequences = read_sequences(job, inputs, machine, model.config.vocab_size, device)
    try:
        return measure(model, sequences)
    except NotFiniteError as error:
        return Result(outcome="blocked", reason=str(error))


def read_sequences(job: TextProbe, inputs: Inputs, machine: Machine, vocab_size: int, device: Any) -> Sequences:
    """The job's first sequences. Raises JobError if there are fewer."""
    ids, mask = _own_text(job, inputs) if job.text is not None else _prepared(job, inputs)
    if len(ids) < job.sequences():
        raise JobError(
            f"{job.slug()}: {job.sequences()} sequences are asked for, its data has {len(ids)} of two tokens or more; "
            "ask for at most so many, or prepare more validation tokens"
        )
    room = LOGITS[device.type] // (vocab_size * ids.shape[1])
    return Sequences(ids, mask, device, machine.micro_batch or max(1, min(SEQUENCES, room)))


def _prepared(job: TextProbe, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    shards = TokenShards(inputs.data[0], "validation")
    ids = shards.rows(np.arange(min(job.sequences(), len(shards))))
    return ids, (ids != shards.pad_id).astype(np.int64)


def _own_text(job: TextProbe, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    from paperlm.models.folder import load_tokenizer

    tokenizer = load_tokenizer(inputs.models["of"])
    head = []
    if getattr(root(job), "example", "") == "packed_bos":  # as each of its own examples begins
        head = [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]
    rows = [
        head + tokenizer(text, truncation=True, max_length=job.text_tokens - len(head))["input_ids"]
        for text in read_documents(inputs.data[0])
    ]
    rows = [row for row in rows if len(row) > 1]
    ids = np.zeros((len(rows), max(map(len, rows), default=0)), dtype=np.int64)
    mask = np.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return ids, mask
