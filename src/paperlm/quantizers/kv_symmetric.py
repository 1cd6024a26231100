"""Queries, keys and values in few bits, symmetric about zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paperlm.quantizers.base import Quantizer, Role, check_bits, largest

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KVSymmetric(Quantizer):
    """round(x / s) * s with s = max|x| / (2^(bits-1) - 1), a step for each token and head."""

    name: ClassVar[str] = "kv_symmetric"
    source: ClassVar[str] = "BitNet b1.58's training document (March 2024): keys and values are symmetric"
    role: ClassVar[Role] = "heads"

    bits: int

    def __post_init__(self) -> None:
        check_bits(self.name, self.bits)

    @property
    def levels(self) -> float:
        return float(2 ** (self.bits - 1) - 1)

    @property
    def limits(self) -> tuple[int, int]:
        return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1

    def statistic(self, x: Tensor) -> Tensor:
        return largest(x)
