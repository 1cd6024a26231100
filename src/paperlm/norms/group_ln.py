"""Group-LN: Pre-LN wiring whose block norms normalize groups of features."""

from dataclasses import dataclass
from typing import Any, ClassVar

from paperlm.errors import SpecError
from paperlm.norms.base import PRE, ModelShape, NormMethod, Wiring, check_choice

PRESETS = ("causal", "authors_sequence")


@dataclass(frozen=True, kw_only=True)
class GroupLN(NormMethod):
    """Mean and variance per group of hidden_size / groups features, gain and bias per feature, eps 1e-5.

    causal: statistics of each token alone. authors_sequence: what the authors ran: statistics over all positions of
    the sequence, so each token sees a scalar of the future; numbers from it carry the label "leaks the future". In
    training padding counts among the positions, as it did for them; a model that is given a mask leaves it out.
    """

    name: ClassVar[str] = "group_ln"
    source: ClassVar[str] = "Wu & He 2018; preset and 8 groups from pixeli99/MixLN-Next at 40d874b (papers are silent)"

    preset: str = "causal"
    groups: int = 8

    def __post_init__(self) -> None:
        check_choice(self.name, "preset", self.preset, PRESETS)
        if type(self.groups) is not int or self.groups < 1:
            raise SpecError(f"group_ln: groups must be a whole number >= 1, got {self.groups!r}")

    def check(self, shape: ModelShape) -> None:
        if shape.hidden_size % self.groups:
            raise SpecError(f"group_ln: hidden_size {shape.hidden_size} does not divide into {self.groups} groups")

    @property
    def leaks_future(self) -> bool:
        return self.preset == "authors_sequence"

    def wiring(self, layer: int, shape: ModelShape) -> Wiring:
        return PRE

    def block_norm(self, hidden_size: int, eps: float) -> Any:
        from paperlm.models.layers import FeatureGroupNorm

        return FeatureGroupNorm(hidden_size, self.groups, over_sequence=self.preset == "authors_sequence")
