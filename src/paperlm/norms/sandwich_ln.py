"""Sandwich-LN: y = x + N2(A(N1(x))), z = y + N4(F(N3(y)))."""

from dataclasses import dataclass
from typing import ClassVar

from paperlm.norms.base import ModelShape, NormMethod, Wiring


@dataclass(frozen=True, kw_only=True)
class SandwichLN(NormMethod):
    """Norm before and after each sub-layer: four per block. CogView's PB-relax is not part of it."""

    name: ClassVar[str] = "sandwich_ln"
    source: ClassVar[str] = "CogView (arXiv 2105.13290); pixeli99/MixLN modeling_llama.py:466-485"

    def wiring(self, layer: int, shape: ModelShape) -> Wiring:
        return Wiring(pre=True, post=True)
