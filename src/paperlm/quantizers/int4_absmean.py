"""Activations in 4 bits by the mean magnitude of a token: large ones are clipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paperlm.errors import SpecError
from paperlm.quantizers.base import Quantizer, Role, mean_magnitude

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Int4Absmean(Quantizer):
    """clip(round(sqrt(7) x / beta), -8, 7) * beta / sqrt(7), beta = `multiple` * mean|x|."""

    name: ClassVar[str] = "int4_absmean"
    source: ClassVar[str] = "BitNet a4.8 (arXiv 2411.04965) Section 2; beta = 2 mean|x| before the down projection"
    role: ClassVar[Role] = "activations"
    levels: ClassVar[float] = 7.0**0.5
    limits: ClassVar[tuple[int, int]] = (-8, 7)

    multiple: int = 1

    def __post_init__(self) -> None:
        if type(self.multiple) is not int or self.multiple not in (1, 2):
            raise SpecError(f"int4_absmean: multiple is {self.multiple!r}; the paper has 1, and 2 before down")

    def statistic(self, x: Tensor) -> Tensor:
        return mean_magnitude(x) * self.multiple
