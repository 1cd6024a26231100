"""Bytes that a model of some shape takes when its weights are stored in fewer bits (NeuZip, Tables 3a, 3b and 4)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar

from paperlm.evaluate.drawn import DrawnModel, model_of
from paperlm.evaluate.stores import cannot_store, in_float32, store_factory
from paperlm.jobs.base import Inputs, Machine
from paperlm.result import Result

CODE_LENGTH = 2.0
"""Bits: at most the standard deviation of a code's length. Below the most frequent ones, each exponent of a normal
distribution is half as frequent as the next larger, so that lengths are spread like a geometric distribution of 1/2,
whose standard deviation is 1.41."""


class StoredBytes(DrawnModel):
    """A model with weights from N(0, std^2), one matrix of each shape drawn and counted as often as it occurs.

    No model is made, and matrices lie in memory one at a time. What the draws leave open is in the standard errors.
    """

    kind: ClassVar[str] = "stored_bytes"
    summary: ClassVar[str] = "bytes of a model of some shape, with random weights that are stored in fewer bits"
    on_card: ClassVar[bool] = False

    def metrics(self) -> tuple[str, ...]:
        return ("parameters", "stored_weights", "weight_bytes", "bits_per_weight")

    def series(self) -> dict[str, tuple[str, ...]]:
        return {}


def run(job: StoredBytes, inputs: Inputs, machine: Machine) -> Result:
    """Metrics: parameters, stored_weights (those in stores), weight_bytes (of all parameters, between their uses, with
    the tables of codes that a GPU keeps), bits_per_weight (of those stored; 16 where none is).

    `blocked` for a store that is not to be had here. Raises JobError for a name of `in_float32` that no weight has.
    """
    import torch
    from paperlm_kernels.stored import chosen_weights

    if why := cannot_store(job):
        return Result(outcome="blocked", reason=why)
    model = model_of(job, "meta")
    parameters = dict(model.named_parameters())
    apart, factory = in_float32(job.in_float32, model), store_factory(job)
    stored = chosen_weights(model, job.policy, job.in_float32) if factory else {}
    kept = sum((4 if name in apart else 2) * p.numel() for name, p in parameters.items() if name not in stored)
    found, numbers, variance = 0, 0, 0.0
    for index, (shape, times) in enumerate(sorted(_matrices(model, stored.values()).items())):
        draw = torch.Generator().manual_seed(index)
        weight = torch.randn(shape, generator=draw).mul_(job.std).bfloat16()
        found += times * factory(weight).nbytes
        numbers += times * weight.numel()
        if job.store == "packed":  # other stores take the same for any values
            variance += (times * CODE_LENGTH / 8) ** 2 * weight.numel()
    return Result(
        outcome="measured",
        metrics={
            "parameters": sum(p.numel() for p in parameters.values()),
            "stored_weights": numbers,
            "weight_bytes": found + kept,
            "bits_per_weight": 8 * found / numbers if numbers else 16.0,
        },
        standard_errors={
            "parameters": 0.0,
            "stored_weights": 0.0,
            "weight_bytes": math.sqrt(variance),
            "bits_per_weight": 8 * math.sqrt(variance) / max(1, numbers),
        },
    )


def _matrices(model: Any, weights: Iterable[Any]) -> Counter[tuple[int, ...]]:
    """Shape -> how many stores have it. An embedding is stored in blocks of rows."""
    from paperlm_kernels.stored import RowBlocks

    found: Counter[tuple[int, ...]] = Counter()
    for weight in weights:
        if weight is not model.get_input_embeddings().weight:
            found[tuple(weight.shape)] += 1
            continue
        rows, width = weight.shape
        block = RowBlocks.usual_rows(width)
        found[block, width] += rows // block
        if rows % block:
            found[rows % block, width] += 1
    return found
