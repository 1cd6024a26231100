"""Queries, keys and values in few bits, unsigned, with every code in use and none for zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paperlm.quantizers.base import Quantizer, Role, check_bits, largest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KVMinMax(Quantizer):
    """u = round((x + max|x|) / s) in 0 .. 2^bits - 1, x_q = s u - max|x|, s = 2 max|x| / (2^bits - 1)."""

    name: ClassVar[str] = "kv_minmax"
    source: ClassVar[str] = "BitNet a4.8 (arXiv 2411.04965) Section 3.3: unsigned integers with the absmax function"
    role: ClassVar[Role] = "heads"

    bits: int

    def __post_init__(self) -> None:
        check_bits(self.name, self.bits)

    @property
    def levels(self) -> float:
        return (2**self.bits - 1) / 2

    @property
    def zero(self) -> float:
        return self.levels

    @property
    def limits(self) -> tuple[int, int]:
        return 0, 2**self.bits - 1

    def statistic(self, x: Tensor) -> Tensor:
        return largest(x)

    def rounded(self, x: Tensor) -> Tensor:
        return super().rounded(x.add_(self.zero))
