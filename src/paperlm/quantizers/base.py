"""What a quantizer is: a statistic of each group of numbers, a step that follows from it, and whole-number codes.

    step = statistic / levels        code = clip(round(x / step), lowest, highest)        x_q = step * (code - zero)

Rounding is to the nearest, ties to even. A group is what shares a step: a matrix of weights, a token's row of
activations, a token's row of one head. The statistic is at least EPS, so that a group of zeros has a step. All of it is
computed in float32 whatever the dtype of x, since rounding x to bfloat16 first would move it across ties; float64 stays
float64, for oracles.

Nothing here imports torch: the specification layer loads it to check a paper file. Methods use what tensors can do by
themselves.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from paperlm.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor, dtype

EPS = 1e-5
"Least statistic of a group (BitNet's public code clamps there, the papers' formulas add it)."

Role = Literal["weights", "activations", "heads"]
"What is quantized, and what shares a step: a matrix; a token's row; a token's row of one attention head."


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """Base of every quantizer. A subclass sets the class variables and gives the statistic; fields are its options."""

    name: ClassVar[str]
    source: ClassVar[str]
    "where it is defined: paper and equation"
    role: ClassVar[Role]
    zero: ClassVar[float] = 0.0
    "the code of zero"

    @property
    def levels(self) -> float:
        """The statistic in steps."""
        raise NotImplementedError(f"quantizer {self.name!r}: define levels")

    @property
    def limits(self) -> tuple[int, int]:
        """Lowest and highest code."""
        raise NotImplementedError(f"quantizer {self.name!r}: define limits")

    def statistic(self, x: Tensor) -> Tensor:
        """Of each group of x (..., N): (..., 1), or of one element for weights."""
        raise NotImplementedError(f"quantizer {self.name!r}: define statistic(x)")

    def rounded(self, x: Tensor) -> Tensor:
        """Codes of x, whose unit is the step. May overwrite x."""
        return x.round_().clamp_(*self.limits)

    def codes_and_step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes as floating-point numbers in the shape of x, and the step of each group: float32, or float64 as x."""
        x = x if x.element_size() == 8 else x.float()
        statistic = self.statistic(x).clamp(min=EPS)
        return self.rounded(x * (self.levels / statistic)), statistic / self.levels

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes as int8 in the shape of x, and the step of each group, float32."""
        codes, step = self.codes_and_step(x)
        return codes.char(), step

    def values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The quantized x in its own dtype, and the step of each group. No gradient passes: see models.quantized."""
        codes, step = self.codes_and_step(x)
        if self.zero:
            codes -= self.zero
        return in_dtype(codes * step, x.dtype), step

    def describe(self) -> dict[str, Any]:
        """Name and every option, as plain JSON values."""
        return {"name": self.name} | {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def in_dtype(x: Tensor, wanted: dtype) -> Tensor:
    """x in that dtype, itself where it is so already. What a torch.autograd.Function returns must come neither from a
    cast that has nothing to do nor from an operation in place: PyTorch 2.11 compiles both to a gradient of 0, without
    a word."""
    return x if x.dtype == wanted else x.to(wanted)


def largest(x: Tensor) -> Tensor:
    """max |x| over the last axis, which stays with one element."""
    return x.abs().amax(-1, keepdim=True)


def mean_magnitude(x: Tensor) -> Tensor:
    """mean |x| over the last axis, which stays with one element."""
    return x.abs().mean(-1, keepdim=True)


def check_bits(name: str, bits: object) -> None:
    """Raise SpecError unless keys and values can have so many bits."""
    if type(bits) is not int or bits not in (3, 4, 8):
        raise SpecError(f"{name}: bits is {bits!r}; 3, 4 and, at position 0, 8 are supported")
