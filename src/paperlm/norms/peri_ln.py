"""Peri-LN: y = x + N2(A(N1(x))), z = y + N4(F(N3(y))), and a norm on the embedding's output."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from paperlm.norms.base import ModelShape, NormMethod, Wiring


@dataclass(frozen=True, kw_only=True)
class PeriLN(NormMethod):
    """Norm before and after each sub-layer as in Sandwich-LN, and on the embedding; the final norm is every model's."""

    name: ClassVar[str] = "peri_ln"
    source: ClassVar[str] = "Peri-LN (arXiv 2502.02732), Section 3: input, output and initial-embedding norms"

    def wiring(self, layer: int, shape: ModelShape) -> Wiring:
        return Wiring(pre=True, post=True)

    def entry(self, shape: ModelShape, norm: Callable[[], Any]) -> Any:
        return norm()
