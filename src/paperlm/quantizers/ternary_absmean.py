"""Weights of -1, 0 and 1 times their mean magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paperlm.quantizers.base import Quantizer, Role

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TernaryAbsmean(Quantizer):
    """clip(round(W / mean|W|), -1, 1) * mean|W|, one mean for a matrix."""

    name: ClassVar[str] = "ternary_absmean"
    source: ClassVar[str] = "BitNet a4.8 (arXiv 2411.04965) Section 2, as in BitNet b1.58 (arXiv 2402.17764) Section 2"
    role: ClassVar[Role] = "weights"
    levels: ClassVar[float] = 1.0
    limits: ClassVar[tuple[int, int]] = (-1, 1)

    def statistic(self, x: Tensor) -> Tensor:
        return x.abs().mean()
