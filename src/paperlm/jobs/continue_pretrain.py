"""A pre-training that another one is gone on with under other quantizers: the second stage of BitNet a4.8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from paperlm.data.settings import DataSettings
from paperlm.jobs.base import Inputs, Job, Machine, Quantizers, Trunk, parent
from paperlm.jobs.pretrain import Pretrain
from paperlm.kept import kept

if TYPE_CHECKING:
    from paperlm.result import Result


class ContinuePretrain(Job):
    """The rest of a run, from one of its updates to its last, with other quantizers of activations.

    Weights, the optimizer's state, the place in schedule and data are those of the run at that update; every other
    setting is the run's. With the run's own quantizers and schedule it is the run's own rest, to the last bit on a CPU.
    """

    kind: ClassVar[str] = "continue_pretrain"
    summary: ClassVar[str] = "go on with a pre-training from one of its updates, with other quantizers"
    leaves_model: ClassVar[bool] = True
    distributed: ClassVar[bool] = True
    has_curve: ClassVar[bool] = True
    paced_as: ClassVar[str] = "pretrain"

    of: parent("pretrain")
    "the run that is gone on with, the trunk"
    at: int = Field(gt=0)
    "update of it after which this job takes over"
    quantization: Quantizers
    "as of a pretrain job, whole: quantizers of activations take the place of the trunk's, that of weights is the same"

    rate: Literal["trunk", "constant"] = "trunk"
    "trunk: the rest of the trunk's schedule; constant: the rate of the update at which this job takes over"

    @model_validator(mode="before")
    @classmethod
    def takes_over_at_an_update(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("at") in ("init", "end"):
            raise ValueError(f"at: {value['at']}: nothing is gone on with there; give an update, or a share of the run")
        return value

    @model_validator(mode="after")
    def fits_the_trunk(self) -> ContinuePretrain:
        if self.at >= self.of.steps:
            raise ValueError(f"at: {self.at}: the trunk has {self.of.steps} updates; leave it before the last")
        weights = [(q or {}).get("weight") for q in (self.settings().quantization, self.of.quantization)]
        if weights[0] != weights[1]:
            raise ValueError(
                f"quantization: weight is {weights[0]}, the trunk's {weights[1]}: only activations may change"
            )
        return self

    @kept
    def settings(self) -> Pretrain:
        """The run that would have had these quantizers from its start."""
        return Pretrain.model_validate({**self.of.fields(), "quantization": self.quantization})

    @property
    def rate_held_at(self) -> int | None:
        """The update whose rate later ones have, too; None: each has its own."""
        return self.at if self.rate == "constant" else None

    @property
    def begins_at(self) -> int:
        """Updates before its first."""
        return self.at

    def snapshot(self, parent: str) -> Trunk:
        return Trunk(self.at)

    def snapshots(self) -> range:
        return range(self.at, self.of.steps)

    def data(self) -> list[DataSettings]:
        return self.of.data()

    def flops(self) -> float:
        """Of its updates alone."""
        return self.of.flops() * (self.of.steps - self.at) / self.of.steps

    def card_bytes(self) -> int | None:
        return self.of.card_bytes()

    def unshared(self, processes: int) -> str:
        return self.settings().unshared(processes)

    def metrics(self) -> tuple[str, ...]:
        return self.of.metrics()

    def series(self) -> dict[str, tuple[str, ...]]:
        return self.of.series()

    def bounds(self) -> dict[str, tuple[float, float]]:
        return self.of.bounds()

    def slug(self) -> str:
        return f"from_{self.at}{'_constant' if self.rate == 'constant' else ''}-{self.settings().slug()}"

    def derived(self) -> dict[str, tuple[str, str]]:
        run, rest = self.of, self.of.steps - self.at
        return {
            "taken over after": (f"{self.at / run.steps:.4g} of the updates", "at / steps of the trunk"),
            "token slots": (f"{rest * run.global_batch * run.seq_len:,}", "(steps - at) x global_batch x seq_len"),
        }

    def behaviours(self) -> dict[str, int]:
        return {**self.settings().behaviours(), **super().behaviours()}


def run(job: ContinuePretrain, inputs: Inputs, machine: Machine) -> Result | None:
    """Train and evaluate; None on all but the leading process. Raises as a pretrain job does, and CheckpointError for a
    trunk without the state of its optimizer.

    Metrics and series are those of a pretrain job: `updates`, `tokens` and the curve's first column count from the
    trunk's start, the curves begin after `at`.
    """
    from paperlm.train.language_model import pretrain

    return pretrain(job, inputs, machine)
