"""Activations in 4-bit floating point, 2 exponent bits and 1 of mantissa, scaled to the largest of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paperlm.quantizers.base import Quantizer, Role, largest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FP4E2M1(Quantizer):
    """Magnitudes max|x| / 12 * {0, 1, 2, 3, 4, 6, 8, 12}; codes are these whole numbers with a sign.

    They are twice the values 0 .. 6 of the format, so that products of them stay whole numbers.
    """

    name: ClassVar[str] = "fp4_e2m1"
    source: ClassVar[str] = "LLM-FP4 (arXiv 2310.16836) with the MinMax bias, in BitNet a4.8 (arXiv 2411.04965)"
    role: ClassVar[Role] = "activations"
    levels: ClassVar[float] = 12.0
    limits: ClassVar[tuple[int, int]] = (-12, 12)

    def statistic(self, x: Tensor) -> Tensor:
        return largest(x)

    def rounded(self, x: Tensor) -> Tensor:
        # The exponent is 1 below 4 units, 2 below 8, else 3: the spacing is 1, 2 and 4.
        magnitude = x.abs()
        spacing = (magnitude >= 4).to(x.dtype).add_(magnitude >= 8, alpha=2).add_(1)
        return x.div_(spacing).round_().mul_(spacing)
