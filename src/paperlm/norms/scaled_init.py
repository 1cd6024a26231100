"""Scaled Initialization: the output projections of each sub-layer start smaller by sqrt(2L)."""

from dataclasses import dataclass
from typing import ClassVar

from paperlm.norms.base import ModelShape, WrappedMethod, check_choice

BASE_STDS = ("initializer_range", "sqrt(2/(5d))")


@dataclass(frozen=True, kw_only=True)
class ScaledInit(WrappedMethod):
    """Wo and Wd ~ normal(0, base_std / sqrt(2L)) on top of `base`; forward pass unchanged.

    Post-LN blocks of the base (all of Post-LN, the first m of Mix-LN) keep their start, as in the authors' code.
    base_std sqrt(2/(5d)) is the definition of Takase et al.; the authors' code uses initializer_range.
    """

    name: ClassVar[str] = "scaled_init"
    source: ClassVar[str] = "pixeli99/MixLN modeling_llama.py:275-281,820-828 (GPT-2 rule)"

    base_std: str = "initializer_range"

    def __post_init__(self) -> None:
        check_choice(self.name, "base_std", self.base_std, BASE_STDS)

    def init_std(self, tensor: str, layer: int, shape: ModelShape) -> float:
        if tensor not in ("o", "down") or self.wiring(layer, shape).out:
            return self.base.init_std(tensor, layer, shape)
        std = shape.initializer_range if self.base_std == "initializer_range" else (2 / (5 * shape.hidden_size)) ** 0.5
        return std / (2 * shape.n_layers) ** 0.5
