"""How fast a model's softmax probabilities fall with their rank: Figure 3 of Cut Cross-Entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from paperlm.data.settings import DataSettings
from paperlm.jobs.base import Inputs, LooksAtModel, Machine, parent

if TYPE_CHECKING:
    from paperlm.result import Result


class RankProbability(LooksAtModel):
    """Softmax of each validation token sorted in descending order, averaged over tokens at each rank."""

    kind: ClassVar[str] = "rank_probability"
    summary: ClassVar[str] = "softmax probabilities of a model by rank"

    of: parent("pretrain")
    tokens: int = Field(gt=0)
    "at most so many validation tokens, the first"

    def data(self) -> list[DataSettings]:
        return self.of.data()

    def metrics(self) -> tuple[str, ...]:
        found = ("share_above", "mass_above", "first_rank_below", "alive_tiles", "loss")
        return (*found, "threshold", "tokens")

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"ranks": ("rank", "mean_probability")}

    def slug(self) -> str:
        return f"ranks-{self.of_what()}"


def run(job: RankProbability, inputs: Inputs, machine: Machine) -> Result:
    """Measure the model of the parent. Raises JobError for a folder that holds no model."""
    from paperlm.probe.ranks import rank_probability

    return rank_probability(job, inputs, machine)
