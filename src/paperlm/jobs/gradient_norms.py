"""Gradient norms, block by block (Mix-LN, Figures 3e and 6a)."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from paperlm.jobs.base import Head, Inputs, Machine
from paperlm.probe.text import Sequences, TextProbe, run_probe
from paperlm.result import Result, Series


class GradientNorms(TextProbe):
    """L2 norms of the gradients of one batch's mean next-token loss, without clipping, averaged over batches."""

    kind: ClassVar[str] = "gradient_norms"
    summary: ClassVar[str] = "measures the norm of the gradient in each block of a model"

    batches: int = Field(gt=0)
    "batches that are averaged over; they follow each other in the validation tokens"
    batch: int = Field(gt=0)
    "sequences of a batch: a larger one has less of the gradient's noise in its norm"

    def needs_head(self) -> Head:
        return "tokens"

    def metrics(self) -> tuple[str, ...]:
        return ("loss", "tokens")

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"gradient_norms": ("block", "norm", "input_norm"), "tensors": ("block", "tensor", "norm")}

    def sequences(self) -> int:
        return self.batches * self.batch


def run(job: GradientNorms, inputs: Inputs, machine: Machine) -> Result:
    """Series `gradient_norms` and `tensors`; blocks count from 1.

    `gradient_norms`: per block the norm over its matrices together, and that of the gradient by the stream entering it.
    Raises JobError for a model without blocks or next-token loss, or data with fewer sequences.
    """
    from paperlm.probe.gradients import gradient_norms

    def measure(model: Any, text: Sequences) -> Result:
        starts = range(0, job.sequences(), job.batch)
        found = gradient_norms(model, (text.batches(start, start + job.batch) for start in starts))
        pairs = zip(found.blocks.tolist(), found.inputs.tolist(), strict=True)
        tensors = [
            [block, name, norm] for block, norms in enumerate(found.tensors, start=1) for name, norm in norms.items()
        ]
        return Result(
            outcome="measured",
            metrics={"loss": found.loss, "tokens": int(text.mask.sum())},
            series={
                "gradient_norms": Series(
                    columns=["block", "norm", "input_norm"],
                    rows=[[block, *pair] for block, pair in enumerate(pairs, start=1)],
                ),
                "tensors": Series(columns=["block", "tensor", "norm"], rows=tensors),
            },
        )

    return run_probe(job, inputs, machine, measure)
