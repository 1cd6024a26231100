"""How many of the numbers that enter each projection are exactly zero (BitNet a4.8, Table 2)."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from paperlm.jobs.base import Inputs, Machine
from paperlm.probe.text import Sequences, TextProbe, run_probe
from paperlm.result import Result, Series

COLUMNS = ("qkv", "out", "up", "gate", "down", "gate_act")


class ActivationSparsity(TextProbe):
    """Shares of exact zeros among the codes that enter the projections, pooled over tokens and blocks, and by block."""

    kind: ClassVar[str] = "activation_sparsity"
    summary: ClassVar[str] = "counts zeros among what enters each projection of a model"

    documents: int = Field(256, gt=0)
    "validation sequences that are counted in"

    def metrics(self) -> tuple[str, ...]:
        theory = ("theory/qkv", "theory/out", "theory/gate")
        return (*COLUMNS, "overall", "activated", "weights", *theory, "tokens", "documents")

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"zeros": ("block", *COLUMNS)}

    def sequences(self) -> int:
        return self.documents


def run(job: ActivationSparsity, inputs: Inputs, machine: Machine) -> Result:
    """Metrics as shares, 0 to 1: qkv, out, up, gate, down and overall as columns of Table 2, gate_act: zeros that the
    gate's activation leaves; theory/...: what the model's quantizers make of normally distributed numbers. weights: of
    the blocks' projections; activated: (1 - overall) of them. Series `zeros`, a row per block (from 1).

    Standard errors are the jackknife's over sequences. Raises JobError for a model that is no decoder of this project,
    or data with fewer sequences.
    """
    import numpy as np

    from paperlm.probe.jackknife import standard_errors
    from paperlm.probe.sparsity import COUNTED, columns, count_zeros, gaussian_zeros
    from paperlm.quantizers.scheme import quantization_of

    def measure(model: Any, text: Sequences) -> Result:
        found, config = count_zeros(model, text.batches()), model.config
        width, glu, blocks = config.hidden_size, config.intermediate_size, config.num_hidden_layers
        weights = blocks * (4 * width * width + 3 * width * glu)

        def statistics(sums: np.ndarray) -> dict[str, float]:
            zeros, numbers = sums
            shares = columns(dict(zip(COUNTED, (zeros / (blocks * numbers)).tolist(), strict=True)), width, glu)
            return shares | {"activated": (1 - shares["overall"]) * weights}

        parts = np.stack([found.zeros.sum(1), found.numbers], 1)
        scheme = None if config.quantization is None else quantization_of(config.quantization)
        theory = {
            f"theory/{column}": gaussian_zeros(getattr(scheme, place, None), width)
            for column, place in (("qkv", "qkv"), ("out", "o"), ("gate", "gate_up"))
        }
        rows = []
        for block, shares in enumerate(found.shares().tolist(), start=1):
            of_block = columns(dict(zip(COUNTED, shares, strict=True)), width, glu)
            rows.append([block, *(of_block[name] for name in COLUMNS)])
        counts = {"weights": weights, "tokens": found.tokens, "documents": job.documents}
        return Result(
            outcome="measured",
            metrics={**statistics(parts.sum(0)), **theory, **counts},
            standard_errors=standard_errors(statistics, parts) | dict.fromkeys(theory, 0.0),
            series={"zeros": Series(columns=["block", *COLUMNS], rows=rows)},
        )

    return run_probe(job, inputs, machine, measure)
