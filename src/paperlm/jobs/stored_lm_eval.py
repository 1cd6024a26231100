"""Multiple-choice tasks by a model whose weights are stored in fewer bits (NeuZip, Figure 9)."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import ClassVar

from paperlm.evaluate.questions import AskedModel, ask, check_items
from paperlm.evaluate.stores import StoredModel, cannot_store, counted, load_into_stores
from paperlm.jobs.base import Inputs, Machine
from paperlm.result import Result


class StoredLmEval(AskedModel, StoredModel):
    """Accuracies of a model in bfloat16 whose weights are stored, on tasks of lm-evaluation-harness."""

    kind: ClassVar[str] = "stored_lm_eval"
    summary: ClassVar[str] = "multiple-choice tasks by a model whose weights are stored in fewer bits"

    def metrics(self) -> tuple[str, ...]:
        return (*AskedModel.metrics(self), "likelihoods_hash", "weight_bytes", "bits_per_weight", "stored_weights")

    def slug(self) -> str:
        """stored_lm_eval-packed3_n512-5shot-<parent's>."""
        return StoredModel.slug(self).replace(f"-{self.of.slug()}", f"-{self.few_shot}shot-{self.of.slug()}")


EXACT = ("likelihoods_hash", "weight_bytes", "bits_per_weight", "stored_weights")
"Metrics that follow from the weights alone."


def run(job: StoredLmEval, inputs: Inputs, machine: Machine) -> Result:
    """Metrics: those of an lm_eval job, likelihoods_hash (48 bits of the hash of the likelihoods of all options),
    weight_bytes (all parameters), bits_per_weight (of those stored; 16 where none is), stored_weights.

    `blocked` for a store that is not to be had here. Raises DataError for unusable items, before the model is read,
    and JobError for an unusable model.
    """
    import numpy as np

    if why := cannot_store(job):
        return Result(outcome="blocked", reason=why)
    check_items(job, inputs)
    model = load_into_stores(inputs.models["of"], job, machine.torch_device())
    result, likelihoods = ask(job, model, inputs, machine)
    exact = {
        "likelihoods_hash": int(hashlib.sha256(np.array(likelihoods, dtype=np.float32).tobytes()).hexdigest()[:12], 16),
        **counted(model, machine.torch_device()),
    }
    return dataclasses.replace(
        result,
        metrics=result.metrics | exact,
        standard_errors=result.standard_errors | dict.fromkeys(EXACT, 0.0),
    )
