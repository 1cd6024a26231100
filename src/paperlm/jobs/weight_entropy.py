"""How many bits sign, exponent and mantissa of a model's weights carry (NeuZip, Figures 1 and 5)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from paperlm.jobs.base import Inputs, LooksAtModel, Machine
from paperlm.result import Result, Series

FIELDS = ("sign", "exponent", "mantissa")
METRICS = (*FIELDS, "joint", "ratio_sum", "ratio_joint", "weights")


class WeightEntropy(LooksAtModel):
    """Entropies and histograms of the fields of all stored weights of a model together, rounded to bfloat16."""

    kind: ClassVar[str] = "weight_entropy"
    summary: ClassVar[str] = "entropies of sign, exponent and mantissa of a model's weights"
    on_card: ClassVar[bool] = False

    policy: Literal["paper", "all_linear", "all"] = "paper"
    "which weights: linear layers but the head; the head too; embeddings too"

    def metrics(self) -> tuple[str, ...]:
        return METRICS

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"histogram": ("field", "value", "share")}

    def slug(self) -> str:
        policy = "" if self.policy == "paper" else f"-{self.policy}"
        return f"entropy{policy}-{self.of_what()}"


def run(job: WeightEntropy, inputs: Inputs, machine: Machine) -> Result:
    """Metrics sign, exponent, mantissa, joint (bits), ratio_sum and ratio_joint (16 bits by the sum of the three, and
    by the joint entropy), weights (how many). Series `histogram`: of each field the share of each value that occurs.

    Exact, so that standard errors are 0.
    """
    import torch
    from paperlm_kernels.neuzip.entropy import pattern_counts
    from paperlm_kernels.stored import chosen_weights

    from paperlm.models.folder import load_model

    model = load_model(inputs.models["of"], head="own", dtype=torch.bfloat16)
    counts = sum(pattern_counts(weight) for weight in chosen_weights(model, job.policy).values())
    return of_shares(counts, int(counts.sum()))


def of_shares(counts: Any, weights: int) -> Result:
    """The result of counts, or shares, of the 65,536 patterns; `weights`: how many they stand for."""
    from paperlm_kernels.neuzip.entropy import report_of_counts

    found = report_of_counts(counts)
    values = {name: float(getattr(found, name)) for name in METRICS[:-1]}
    rows = []
    for name in FIELDS:
        parts = getattr(found, f"{name}_counts")
        shares = parts / parts.sum()
        rows += [[name, int(value), float(f"{share:.6g}")] for value, share in enumerate(shares) if share > 0]
    return Result(
        outcome="measured",
        metrics=values | {"weights": weights},
        standard_errors=dict.fromkeys(METRICS, 0.0),
        series={"histogram": Series(columns=["field", "value", "share"], rows=rows)},
    )
