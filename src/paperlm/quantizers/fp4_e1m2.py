"""Activations in 4-bit floating point, 1 exponent bit and 2 of mantissa, scaled to the largest of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paperlm.quantizers.base import Quantizer, Role, largest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FP4E1M2(Quantizer):
    """Multiples of max|x| / 7: with one exponent bit the step never changes, so that codes are those of int4_absmax."""

    name: ClassVar[str] = "fp4_e1m2"
    source: ClassVar[str] = (
        "LLM-FP4 (arXiv 2310.16836) with the MinMax bias, in BitNet a4.8 (arXiv 2411.04965) Figure 6"
    )
    role: ClassVar[Role] = "activations"
    levels: ClassVar[float] = 7.0
    limits: ClassVar[tuple[int, int]] = (-7, 7)

    def statistic(self, x: Tensor) -> Tensor:
        return largest(x)
