"""Scaled Embed: the residual stream starts with standard deviation sqrt(2/5)."""

from dataclasses import dataclass
from typing import ClassVar

from paperlm.norms.base import ModelShape, WrappedMethod, check_choice

PRESETS = ("multiplier", "init_only")


@dataclass(frozen=True, kw_only=True)
class ScaledEmbed(WrappedMethod):
    """Enlarged embeddings on top of `base`.

    multiplier: rows ~ normal(0, sqrt(2/(5d))), times sqrt(d) in the forward pass (Takase et al.). init_only: rows
    ~ normal(0, sqrt(2/5)) and no factor, as the authors did: equal at the start, slower under Adam afterwards.
    """

    name: ClassVar[str] = "scaled_embed"
    source: ClassVar[str] = "Takase et al. (arXiv 2312.16903); pixeli99/MixLN modeling_llama.py:837"

    preset: str = "init_only"

    def __post_init__(self) -> None:
        check_choice(self.name, "preset", self.preset, PRESETS)

    def init_std(self, tensor: str, layer: int, shape: ModelShape) -> float:
        if tensor != "embed":
            return self.base.init_std(tensor, layer, shape)
        return (2 / 5) ** 0.5 if self.preset == "init_only" else (2 / (5 * shape.hidden_size)) ** 0.5

    def embed_multiplier(self, shape: ModelShape) -> float:
        return shape.hidden_size**0.5 if self.preset == "multiplier" else 1.0
