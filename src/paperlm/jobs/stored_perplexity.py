"""Perplexity of a model whose weights are stored in fewer bits, and their bytes (NeuZip, Tables 3a and 4)."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import ClassVar

from pydantic import Field

from paperlm.data.registry import DatasetName
from paperlm.data.settings import DataSettings
from paperlm.data.texts import TextData, read_documents
from paperlm.evaluate.stores import StoredModel, cannot_store, counted, load_into_stores
from paperlm.jobs.base import Inputs, Machine
from paperlm.result import Result, Series


class StoredPerplexity(StoredModel):
    """exp of the summed loss by words, over windows of a text that do not overlap.

    The protocol of the paper's program: documents joined by line ends, windows of so many tokens one behind the other,
    the rest dropped; a window counts with its mean loss, over all its tokens but the first, times its tokens. Products
    are in bfloat16, losses in float32, sums in float64.
    """

    kind: ClassVar[str] = "stored_perplexity"
    summary: ClassVar[str] = "perplexity of a model whose weights are stored in fewer bits, and their bytes"

    text: DatasetName
    "a text of the registry, whose validation documents are read"
    documents: int = Field(gt=0)
    "so many of its first"
    window: int = Field(gt=1)
    "tokens of a window"
    cap_gib: float | None = Field(None, gt=0)
    """memory of the card at most, in GiB, from reading the model on: that of a smaller card, which gets one window at a
    time; null: all that it has"""

    def data(self) -> list[DataSettings]:
        return [TextData(dataset=self.text, documents=self.documents)]

    def metrics(self) -> tuple[str, ...]:
        return (
            "perplexity", "word_perplexity", "loss", "losses_hash", "tokens", "words", "windows", "weight_bytes",
            "bits_per_weight", "stored_weights",
        )  # fmt: skip

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"windows": ("window", "mean_loss")}


EXACT = ("losses_hash", "weight_bytes", "bits_per_weight", "stored_weights")
"Metrics that follow from the weights alone."


def run(job: StoredPerplexity, inputs: Inputs, machine: Machine) -> Result:
    """Metrics: perplexity and loss (nats) of a token, word_perplexity, losses_hash (48 bits of the hash of all windows'
    losses), tokens, words, windows, weight_bytes (all parameters), bits_per_weight (of those stored; 16 where none is),
    stored_weights. Series `windows`: the mean loss of each.

    `out_of_memory` where the cap is too small. `blocked` for a store that is not to be had here, for a cap without a
    GPU, and for losses that are no finite numbers. Raises JobError for a text shorter than a window.
    """
    from paperlm.evaluate.cap import under_cap

    device = machine.torch_device()
    if job.cap_gib is not None and device.type != "cuda":
        return Result(outcome="blocked", reason="cap_gib is of a GPU's memory; there is none here")
    if why := cannot_store(job):
        return Result(outcome="blocked", reason=why)
    return under_cap(device, job.cap_gib, lambda: _measured(job, inputs, machine))


def _measured(job: StoredPerplexity, inputs: Inputs, machine: Machine) -> Result:
    import math

    import numpy as np

    from paperlm.evaluate.perplexity import perplexity
    from paperlm.evaluate.windows import mean_losses, windows_of

    folder, text = inputs.models["of"], "\n".join(read_documents(inputs.data[0]))
    windows = windows_of(job.slug(), folder, text, job.window)
    model = load_into_stores(folder, job, machine.torch_device())
    if job.cap_gib is not None:  # as many windows at once as a larger card holds would not fit
        machine = dataclasses.replace(machine, micro_batch=1)
    losses = np.array(mean_losses(model, windows, machine, job.job_id))
    stored = counted(model, machine.torch_device())
    if not np.isfinite(losses).all():
        return Result(outcome="blocked", reason="losses of this model are no finite numbers")
    words, loss = len(text.split()), float(losses.mean())
    metrics = {
        "perplexity": perplexity(loss),
        "word_perplexity": math.exp(min(700.0, float(losses.sum()) * job.window / words)),
        "loss": loss,
        "losses_hash": int(hashlib.sha256(losses.astype(np.float32).tobytes()).hexdigest()[:12], 16),
        "tokens": len(losses) * (job.window - 1),
        "words": words,
        "windows": len(losses),
        **stored,
    }
    rows = [[index, float(value)] for index, value in enumerate(losses.astype(np.float32))]
    return Result(
        outcome="measured",
        metrics=metrics,
        standard_errors=dict.fromkeys(EXACT, 0.0),
        series={"windows": Series(columns=["window", "mean_loss"], rows=rows)},
    )
