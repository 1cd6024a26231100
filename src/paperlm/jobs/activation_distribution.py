"""Distributions of what enters a model's projections, and of the same quantized (BitNet a4.8, Figures 2 and 3)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from paperlm.errors import SpecError
from paperlm.jobs.base import Inputs, Machine
from paperlm.probe.text import Sequences, TextProbe, root, run_probe
from paperlm.quantizers.scheme import INPUTS, InputQuantizer, input_quantizer
from paperlm.result import Result, Series

OF_INPUTS = ("rms", "kurtosis", "near_zero")
OF_QUANTIZED = ("zeros", "relative_error", "square_kept")


class ActivationDistribution(TextProbe):
    """Histograms and moments of the inputs of the projections, behind the norm and in front of the quantizer, of all
    blocks together and of the middle one; and of quantizers that are tried on the input of one of them."""

    kind: ClassVar[str] = "activation_distribution"
    summary: ClassVar[str] = "makes histograms of what enters each projection of a model, and of that quantized"

    documents: int = Field(64, gt=0)
    "validation sequences that are read"
    bins: int = Field(257, gt=1)
    "equal bins from -q to q; of an odd number the middle one holds what is quantized to zero"
    within: float = Field(0.9995, gt=0, le=1)
    "q is the magnitude that this share of the numbers does not exceed"
    quantizers: dict[str, Any] = {}
    "title -> quantizer of inputs, as in a model's `quantization`; each is tried on the model's own input"
    tried_on: Literal["qkv", "o", "gate_up", "down"] = "o"
    "of which projections the input is quantized"

    @field_validator("quantizers")
    @classmethod
    def quantizers_exist(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Options are written out in full, so that a changed default makes a new job."""
        found = {}
        for title, described in value.items():
            if title in INPUTS:
                raise ValueError(f"{title!r} is the name of an input: call the quantizer otherwise")
            try:
                found[title] = input_quantizer(described, title).describe()
            except SpecError as error:
                raise ValueError(str(error)) from None
        return found

    @model_validator(mode="after")
    def shares_fit_the_model(self) -> ActivationDistribution:
        """Of a model of ours, whose widths are known before it is trained."""
        width = getattr(root(self), "intermediate_size" if self.tried_on == "down" else "hidden_size", None)
        for title, quantizer in self.tried().items() if width else ():
            try:
                quantizer.kept(width, title)
            except SpecError as error:
                raise ValueError(str(error)) from None
        return self

    def tried(self) -> dict[str, InputQuantizer]:
        """Title -> quantizer."""
        return {title: input_quantizer(described, title) for title, described in self.quantizers.items()}

    def metrics(self) -> tuple[str, ...]:
        of_inputs = [f"{place}/{name}" for place in INPUTS for name in OF_INPUTS]
        of_quantized = [f"{title}/{name}" for title in self.quantizers for name in OF_QUANTIZED]
        return (*of_inputs, *of_quantized, "tokens", "documents")

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"histogram": ("tensor", "block", "left", "right", "count", "density")}

    def sequences(self) -> int:
        return self.documents


def run(job: ActivationDistribution, inputs: Inputs, machine: Machine) -> Result:
    """Metrics <input>/rms, kurtosis (excess), near_zero (below a tenth of the root mean square) of qkv, o, gate_up and
    down; <quantizer>/zeros (share), relative_error (squared error over square), square_kept (over all).

    Series `histogram`: tensor (an input or a quantizer), block (0: all), edges of the bin, count, and density over all
    numbers, those beyond the bins too. Standard errors are the jackknife's over sequences. Raises JobError for a model
    that is no decoder of this project, or data with fewer sequences.
    """
    from paperlm.probe.distribution import distributions, moment_statistics, quantized_statistics
    from paperlm.probe.jackknife import standard_errors

    def measure(model: Any, text: Sequences) -> Result:
        middle = (model.config.num_hidden_layers + 1) // 2
        options = {"bins": job.bins, "within": job.within, "block": middle}
        found = distributions(model, text.batches, tried=job.tried(), at=job.tried_on, **options)
        metrics: dict[str, float | int] = {"tokens": found.tokens, "documents": job.documents}
        errors: dict[str, float] = {}
        for sums, statistics in ((found.moments, moment_statistics), (found.quantized, quantized_statistics)):
            for name, parts in sums.items():
                metrics |= {f"{name}/{key}": value for key, value in statistics(parts.sum(0)).items()}
                errors |= {f"{name}/{key}": value for key, value in standard_errors(statistics, parts).items()}
        rows = []
        for (name, block), histogram in found.histograms.items():
            density = histogram.counts / (histogram.numbers * (2 * histogram.edge / job.bins))
            edges = [float(f"{edge:.6g}") for edge in histogram.edges]
            for left, right, count, height in zip(edges, edges[1:], histogram.counts, density, strict=False):
                rows.append([name, block, left, right, int(count), float(f"{height:.5g}")])
        columns = ["tensor", "block", "left", "right", "count", "density"]
        return Result(
            outcome="measured",
            metrics=metrics,
            standard_errors=errors,
            series={"histogram": Series(columns=columns, rows=rows)},
        )

    return run_probe(job, inputs, machine, measure)
