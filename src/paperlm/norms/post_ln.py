"""Post-LN: y = N1(x + A(x)), z = N2(y + F(y))."""

from dataclasses import dataclass
from typing import ClassVar

from paperlm.norms.base import POST, ModelShape, NormMethod, Wiring


@dataclass(frozen=True, kw_only=True)
class PostLN(NormMethod):
    """Norm after each residual sum, as in the original transformer."""

    name: ClassVar[str] = "post_ln"
    source: ClassVar[str] = "Mix-LN (arXiv 2412.13795) Figure 1a"

    def wiring(self, layer: int, shape: ModelShape) -> Wiring:
        return POST
