"""How fast a model of some shape runs, its weights drawn and stored in fewer bits (NeuZip, columns Speed of Tables 3a
and 3b, whose checkpoints are gated or large: but for the lengths of their
codes, a pass takes as long whatever its weights say)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field, model_validator

from paperlm.evaluate.drawn import DrawnModel, drawn_into_stores
from paperlm.evaluate.stores import cannot_store
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.stored_speed import speed_of
from paperlm.result import Result


class DrawnSpeed(DrawnModel):
    """Forward passes a second of a model with weights from N(0, std^2), on a GPU."""

    kind: ClassVar[str] = "drawn_speed"
    summary: ClassVar[str] = "iterations a second of a model of some shape, with random weights, on a GPU"

    batch: int = Field(gt=0)
    "sequences of an iteration"
    window: int = Field(gt=1)
    "tokens of a sequence; of t5, those that the encoder reads"
    answer: int | None = Field(None, gt=1)
    "of t5: tokens of a sequence that the decoder reads"
    repeats: int = Field(20, gt=1)
    "iterations that are timed, each alone, behind three that are not"

    @model_validator(mode="after")
    def answer_is_of_t5(self) -> DrawnSpeed:
        if (self.architecture == "t5") != (self.answer is not None):
            raise ValueError("answer: of t5 say how many tokens its decoder reads; llama has none: leave it out")
        return self

    def metrics(self) -> tuple[str, ...]:
        return ("iterations_per_second", "peak_bytes", "weight_bytes")

    def series(self) -> dict[str, tuple[str, ...]]:
        return {}


def run(job: DrawnSpeed, inputs: Inputs, machine: Machine) -> Result:
    """Metrics: iterations_per_second, by the median pass, with how much one varies as its standard error
    (`stored_speed.rate_of`); peak_bytes of the device meanwhile; weight_bytes, of all parameters between their uses.

    `blocked` without a GPU, where the time would be that of a reference, and for a store that is not to be had here.
    Raises JobError for a name of `in_float32` that no weight has.
    """
    from paperlm_kernels.stored import weight_bytes

    device = machine.torch_device()
    if device.type != "cuda":
        return Result(outcome="blocked", reason="speed is of the kernels, which run on a GPU; there is none here")
    if why := cannot_store(job):
        return Result(outcome="blocked", reason=why)
    model = drawn_into_stores(job, device)
    stored = weight_bytes(model).total
    found = speed_of(forward_of(job, model, device), job.repeats, device)
    return replace(found, metrics={**found.metrics, "weight_bytes": stored})


def forward_of(job: DrawnSpeed, model: Any, device: Any) -> Callable[[], Any]:
    """A pass of the model over ids drawn at random, without gradients and without keys and values kept."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> Any:
        return torch.randint(job.vocab_size, (job.batch, length), generator=generator).to(device)

    given = {"input_ids": ids(job.window)}
    if job.answer is not None:
        given["decoder_input_ids"] = ids(job.answer)

    @torch.no_grad()
    def forward() -> Any:
        return model(**given, use_cache=False).logits

    return forward
