"""The entropies of weights that follow a normal distribution, computed and not drawn (NeuZip, Figure 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from paperlm.jobs.base import Inputs, Job, Machine
from paperlm.jobs.weight_entropy import METRICS, of_shares
from paperlm.result import Result

if TYPE_CHECKING:
    import numpy as np


class NormalEntropy(Job):
    """Entropies of the fields of N(0, std^2), rounded to bfloat16: what endlessly many fresh weights would have."""

    kind: ClassVar[str] = "normal_entropy"
    summary: ClassVar[str] = "entropies of sign, exponent and mantissa of normally distributed weights"
    on_card: ClassVar[bool] = False

    std: float = Field(gt=1e-30, lt=1e30)
    "standard deviation"

    def metrics(self) -> tuple[str, ...]:
        return METRICS

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"histogram": ("field", "value", "share")}

    def slug(self) -> str:
        return f"normal_entropy-{self.std:g}".replace("+", "")


def run(job: NormalEntropy, inputs: Inputs, machine: Machine) -> Result:
    """Metrics and series as of weight_entropy, of shares in place of counts; weights is 0."""
    return of_shares(normal_shares(job.std), 0)


def normal_shares(std: float) -> np.ndarray:
    """Probability of each of the 65,536 bfloat16 patterns under N(0, std^2), float64 (65536,): of what rounds to it, to
    nearest, between the halves of its distances to its neighbours."""
    import math

    import numpy as np
    import torch

    # finite magnitudes, ascending as their patterns are
    magnitudes = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).double().numpy()
    halves = (magnitudes[1:] + magnitudes[:-1]) / 2
    # of |x|: above each half
    above = np.array([math.erfc(x / (std * math.sqrt(2))) for x in halves])
    shares = -np.diff(np.concatenate(([1.0], above, [0.0])))
    found = np.zeros(2**16)
    found[: len(shares)] = found[2**15 : 2**15 + len(shares)] = shares / 2
    return found
