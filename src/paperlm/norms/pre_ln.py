"""Pre-LN: y = x + A(N1(x)), z = y + F(N2(y))."""

from dataclasses import dataclass
from typing import ClassVar

from paperlm.norms.base import PRE, ModelShape, NormMethod, Wiring


@dataclass(frozen=True, kw_only=True)
class PreLN(NormMethod):
    """Norm before each sub-layer; the residual stream itself is never normalized."""

    name: ClassVar[str] = "pre_ln"
    source: ClassVar[str] = "Mix-LN (arXiv 2412.13795) Figure 1b"

    def wiring(self, layer: int, shape: ModelShape) -> Wiring:
        return PRE
