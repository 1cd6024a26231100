"""How far blocks turn the residual stream: angular distances between streams (Mix-LN, section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from paperlm.jobs.base import Inputs, Machine
from paperlm.probe.text import Sequences, TextProbe, flops_to_read, run_probe
from paperlm.result import Result, Series

if TYPE_CHECKING:
    import numpy as np


class AngularDistance(TextProbe):
    """d(l, n) between the streams entering block l and, n blocks later, block l + n or the final norm."""

    kind: ClassVar[str] = "angular_distance"
    summary: ClassVar[str] = "measures the angles between the residual streams entering a model's blocks"

    documents: int = Field(1024, gt=0)
    "validation sequences that are averaged over; 1,024 of the published length are about 200,000 tokens"

    def flops(self) -> float | None:
        each = flops_to_read(self, self.length())
        return each * self.documents * self.length() if each else None

    def metrics(self) -> tuple[str, ...]:
        return ("tokens", "documents")

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"angular": ("block", "n", "raw", "scaled", "raw_last")}

    def sequences(self) -> int:
        return self.documents


def run(job: AngularDistance, inputs: Inputs, machine: Machine) -> Result:
    """Series `angular`, a row per block (from 1) and n: raw, scaled for display, and raw over last tokens alone.

    Raises JobError for a model without blocks, or data with fewer sequences.
    """
    from paperlm.probe.angular import angular_distances, scaled

    def measure(model: Any, text: Sequences) -> Result:
        found = angular_distances(model, text.batches())
        columns = {"raw": found.raw, "scaled": scaled(found.raw), "raw_last": found.raw_last}
        depth = len(found.raw)
        rows = [
            [block, n, *(_number(values[block - 1, n - 1]) for values in columns.values())]
            for block in range(1, depth + 1)
            for n in range(1, depth + 2 - block)
        ]
        return Result(
            outcome="measured",
            metrics={"tokens": found.tokens, "documents": found.sequences},
            series={"angular": Series(columns=["block", "n", *columns], rows=rows)},
        )

    return run_probe(job, inputs, machine, measure)


def _number(value: np.floating) -> float | None:
    """None where no token had a direction."""
    return float(value) if value == value else None
