"""Activations in 8 bits by the largest magnitude of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paperlm.quantizers.base import Quantizer, Role, largest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Int8Absmax(Quantizer):
    """round(127 x / max|x|) * max|x| / 127."""

    name: ClassVar[str] = "int8_absmax"
    source: ClassVar[str] = "BitNet a4.8 (arXiv 2411.04965) Section 2; a token at a time as in BitNet b1.58"
    role: ClassVar[Role] = "activations"
    levels: ClassVar[float] = 127.0
    limits: ClassVar[tuple[int, int]] = (-128, 127)

    def statistic(self, x: Tensor) -> Tensor:
        return largest(x)
