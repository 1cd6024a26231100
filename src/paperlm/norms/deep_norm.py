"""DeepNorm: y = N1(a*x + A(x)), z = N2(a*y + F(y)), with a depth-dependent start."""

from dataclasses import dataclass
from typing import ClassVar

from paperlm.norms.base import ModelShape, NormMethod, Wiring, check_choice, xavier_normal_std

PRESETS = ("correct", "authors_public", "authors_dev")


@dataclass(frozen=True, kw_only=True)
class DeepNorm(NormMethod):
    """Post-LN with an enlarged residual and Xavier-normal weights.

    correct: a = (2L)^(1/4) and gain (8L)^(-1/4) on v, o, gate, up, down (decoder-only constants).
    authors_public: the released Mix-LN code: a = 2.8284271 at every depth (right at L = 32 only) and the reciprocal
    gain (8L)^(+1/4). authors_dev: the authors' later repository, which mends a and keeps the gain.
    """

    name: ClassVar[str] = "deep_norm"
    source: ClassVar[str] = "DeepNet (arXiv 2203.00555); pixeli99/MixLN modeling_llama.py:455,462,824"

    preset: str = "correct"

    def __post_init__(self) -> None:
        check_choice(self.name, "preset", self.preset, PRESETS)

    def residual_scale(self, n_layers: int) -> float:
        """The constant a."""
        return 2.8284271 if self.preset == "authors_public" else (2 * n_layers) ** 0.25

    def gain(self, n_layers: int) -> float:
        """The Xavier gain of v, o, gate, up and down."""
        return (8 * n_layers) ** (-0.25 if self.preset == "correct" else 0.25)

    def wiring(self, layer: int, shape: ModelShape) -> Wiring:
        return Wiring(out=True, residual_scale=self.residual_scale(shape.n_layers))

    def init_std(self, tensor: str, layer: int, shape: ModelShape) -> float:
        if layer == 0:
            return super().init_std(tensor, layer, shape)
        gain = 1.0 if tensor in ("q", "k") else self.gain(shape.n_layers)
        return xavier_normal_std(gain, tensor, shape)
