"""How activations grow with depth: the variance of the stream leaving each block (LayerNorm Scaling, Figures 1, 6)."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from paperlm.jobs.base import Inputs, Machine
from paperlm.probe.text import Sequences, TextProbe, run_probe
from paperlm.result import Result, Series


class OutputVariance(TextProbe):
    """Variance of the residual stream that leaves each block, at one state of training; a curve takes a job a state."""

    kind: ClassVar[str] = "output_variance"
    summary: ClassVar[str] = "measures the variance of the stream that leaves each block of a model"

    documents: int = Field(64, gt=0)
    "validation sequences that are averaged over"

    def metrics(self) -> tuple[str, ...]:
        return ("tokens", "documents")

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"variance": ("block", "var_tok", "var_all")}

    def sequences(self) -> int:
        return self.documents


def run(job: OutputVariance, inputs: Inputs, machine: Machine) -> Result:
    """Series `variance`, a row per block (from 1): var_tok within tokens, var_all over all elements.

    Raises JobError for a model without blocks, or data with fewer sequences.
    """
    from paperlm.probe.variance import output_variances

    def measure(model: Any, text: Sequences) -> Result:
        found = output_variances(model, text.batches())
        rows = [
            [block, *pair]
            for block, pair in enumerate(zip(found.per_token.tolist(), found.overall.tolist(), strict=True), start=1)
        ]
        return Result(
            outcome="measured",
            metrics={"tokens": found.tokens, "documents": job.documents},
            series={"variance": Series(columns=["block", "var_tok", "var_all"], rows=rows)},
        )

    return run_probe(job, inputs, machine, measure)
