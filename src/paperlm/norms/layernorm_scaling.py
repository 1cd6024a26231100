"""LayerNorm Scaling: y = x + A(N1(x)/sqrt(l)), z = y + F(N2(y)/sqrt(l))."""

from dataclasses import dataclass
from typing import ClassVar

from paperlm.norms.base import ModelShape, NormMethod, Wiring


@dataclass(frozen=True, kw_only=True)
class LayerNormScaling(NormMethod):
    """Pre-LN whose norm outputs, of both sub-layers, are divided by the square root of the block's number, from 1.

    The number is the block's position at training time: deleting another block does not change it. The paper warns
    against combining it with scaled_init.
    """

    name: ClassVar[str] = "layernorm_scaling"
    source: ClassVar[str] = "The Curse of Depth (arXiv 2502.05795) Section 4; lmsdss/LayerNorm-Scaling :432,449"

    def wiring(self, layer: int, shape: ModelShape) -> Wiring:
        return Wiring(pre=True, pre_scale=layer**-0.5)
