"""The record of one model's softmax by rank: what Figure 3 of Cut Cross-Entropy is drawn from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paperlm.record.record import Environment
from paperlm.spec.run import Frozen, RunConfig

State = Literal["trained", "initial"]
"initial: the random weights that the run started from"


class RankCurve(Frozen):
    """Softmax probabilities of one state of a model, sorted in descending order for each token."""

    ranks: list[int]
    "from 1, spaced evenly in the logarithm"
    mean_probability: list[float]
    "mean over the tokens, one a rank"
    share_above: float = Field(ge=0, le=1)
    "share of all probabilities that are at or above the threshold"
    mass_above: float = Field(ge=0, le=1.000001)
    "what those sum to, mean over the tokens"
    first_rank_below: int = Field(gt=0)
    "first rank whose mean probability is below the threshold; vocabulary + 1 if there is none"
    alive_tiles: float = Field(ge=0, le=1)
    "share of tiles of 128 tokens x 128 ids, in natural order, that hold a target or a probability at the threshold"
    loss: float
    "mean next-token loss on these tokens, nats"


class RankRecord(Frozen):
    """Both states of one run's model on the first tokens of its validation split."""

    schema_version: Literal[1] = 1
    run_id: str
    run: RunConfig
    threshold: float
    tokens: int
    states: dict[State, RankCurve]
    environment: Environment
