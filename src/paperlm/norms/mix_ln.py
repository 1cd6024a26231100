"""Mix-LN: the first m blocks are Post-LN, the others Pre-LN."""

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from paperlm.errors import SpecError
from paperlm.norms.base import POST, PRE, ModelShape, NormMethod, Wiring


@dataclass(frozen=True, kw_only=True)
class MixLN(NormMethod):
    """Post-LN in the first blocks, Pre-LN in the rest; give one of the two options.

    `post_layers` is m itself. `post_fraction` is the paper's alpha, m = alpha * L, and has to name a whole number
    of blocks: a fraction such as "1/3", or a printed percentage as a decimal, which is rounded half to even when it
    lies within 0.1 of a block (Table 5 prints 16.7 % for 4 of 24: write 0.167 or 1/6).
    """

    name: ClassVar[str] = "mix_ln"
    source: ClassVar[str] = "Mix-LN (arXiv 2412.13795) Figure 1c and Section 4; authors' code takes m (POST_NUM)"

    post_layers: int | None = None
    post_fraction: str | float | None = None

    def __post_init__(self) -> None:
        if (self.post_layers is None) == (self.post_fraction is None):
            raise SpecError("norm method 'mix_ln' needs exactly one of post_layers (m) and post_fraction (alpha)")
        if self.post_layers is not None and (type(self.post_layers) is not int or self.post_layers < 0):
            raise SpecError(f"mix_ln: post_layers must be a whole number >= 0, got {self.post_layers!r}")
        if self.post_fraction is not None:
            self._alpha()

    def _alpha(self) -> Fraction:
        try:
            alpha = Fraction(str(self.post_fraction))
        except (ValueError, ZeroDivisionError):
            raise SpecError(f"mix_ln: post_fraction {self.post_fraction!r} is no number; write 1/4 or 0.25") from None
        if not 0 <= alpha <= 1:
            raise SpecError(f"mix_ln: post_fraction must lie between 0 and 1, got {self.post_fraction!r}")
        return alpha

    def post_layers_of(self, n_layers: int) -> int:
        """m for a model of `n_layers` blocks. Raises SpecError if alpha names no whole number of blocks."""
        if self.post_layers is not None:
            m = self.post_layers
        else:
            exact = self._alpha() * n_layers
            m = round(exact)
            if abs(exact - m) >= Fraction(1, 10):
                raise SpecError(
                    f"mix_ln: post_fraction {self.post_fraction} of {n_layers} blocks is {float(exact):.2f}, not a "
                    f"whole number; use post_layers: {m}, or a fraction such as {m}/{n_layers}"
                )
        if m > n_layers:
            raise SpecError(f"mix_ln: post_layers {m} is more than the {n_layers} blocks of the model")
        return m

    def check(self, shape: ModelShape) -> None:
        self.post_layers_of(shape.n_layers)

    def wiring(self, layer: int, shape: ModelShape) -> Wiring:
        return POST if layer <= self.post_layers_of(shape.n_layers) else PRE
