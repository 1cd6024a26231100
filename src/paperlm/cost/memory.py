"""Largest batch that fits a cluster, with the logits kept and without: Figure 1 and Table A3 of Cut Cross-Entropy.

The authors print no formula and no code for these numbers. The model here is the one under which every quoted cell
comes out to its last digit: weights, gradients and two Adam moments in bfloat16, spread over all cards; one bfloat16
checkpoint of the residual stream per block and token; log-probabilities in float32.
"""

from __future__ import annotations

from typing import Protocol

from pydantic import Field

from paperlm.frozen import Frozen

MIB = 2**20
GIB = 2**30


class Model(Protocol):
    """A published model (paperlm.plan.table.ModelSpec)."""

    vocab: int
    width: int
    layers: int
    elements: int | None


class Setup(Frozen):
    """The cluster and what is stored on it."""

    gpus: int = Field(gt=0)
    usable_gib: float = Field(gt=0)
    "memory of a card less what libraries take"
    state_bytes: int = Field(gt=0)
    "bytes an element of the checkpoint takes for weight, gradient and optimizer"
    activation_bytes: int = Field(gt=0)
    "bytes of one element of a block's checkpoint"
    logit_bytes: int = Field(gt=0)
    "bytes of one log-probability"
    tokens: int = Field(gt=0)
    "batch at which the table's terms are given"

    @property
    def available(self) -> float:
        """Bytes of all cards together."""
        return self.gpus * self.usable_gib * GIB


QUANTITIES = (
    "logits", "activations", "state", "total", "before", "after", "increase", "vocab", "width", "layers", "elements",
)  # fmt: skip


def logits_per_token(model: Model, setup: Setup) -> int:
    """Bytes of the log-probabilities of one token."""
    return model.vocab * setup.logit_bytes


def activations_per_token(model: Model, setup: Setup) -> int:
    """Bytes of the blocks' checkpoints of one token."""
    return model.layers * model.width * setup.activation_bytes


def quantities(model: Model, setup: Setup) -> dict[str, float | None]:
    """Everything the table prints about a model, by the names in QUANTITIES.

    logits, activations, state (weights, gradients, optimizer) and total are bytes at `setup.tokens`; before and after
    are tokens: the largest batch with the logits kept and without; increase is their ratio. None where the number of
    the model's elements is not known. Batches are 0 if the state alone does not fit.
    """
    logit, activation = logits_per_token(model, setup), activations_per_token(model, setup)
    state = None if model.elements is None else model.elements * setup.state_bytes
    terms = {"logits": logit * setup.tokens, "activations": activation * setup.tokens, "state": state}
    free = None if state is None else max(0.0, setup.available - state)
    before, after = (None, None) if free is None else (free / (logit + activation), free / activation)
    return {
        **terms,
        "total": None if state is None else sum(terms.values()),
        "before": before,
        "after": after,
        "increase": after / before if before else None,
        "vocab": model.vocab,
        "width": model.width,
        "layers": model.layers,
        "elements": model.elements,
    }
