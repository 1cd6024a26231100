"""Activations in 4 bits by the largest magnitude of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paperlm.quantizers.base import Quantizer, Role, largest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Int4Absmax(Quantizer):
    """round(7 x / max|x|) * max|x| / 7; the code -8 is never reached."""

    name: ClassVar[str] = "int4_absmax"
    source: ClassVar[str] = "BitNet a4.8 (arXiv 2411.04965) Figure 6, without a formula: as its INT8 absmax"
    role: ClassVar[Role] = "activations"
    levels: ClassVar[float] = 7.0
    limits: ClassVar[tuple[int, int]] = (-8, 7)

    def statistic(self, x: Tensor) -> Tensor:
        return largest(x)
