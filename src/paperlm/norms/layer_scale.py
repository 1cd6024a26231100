"""LayerScale: y = x + s1 * A(N1(x)), z = y + s2 * F(N2(y)) with trained per-feature s."""

from dataclasses import dataclass
from typing import ClassVar

from paperlm.errors import SpecError
from paperlm.norms.base import Learned, ModelShape, NormMethod, Wiring, check_choice

PRESETS = ("separate", "authors_shared")


@dataclass(frozen=True, kw_only=True)
class LayerScale(NormMethod):
    """Pre-LN with a trained vector on each branch, started small.

    separate: a vector per sub-layer, 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 beyond. authors_shared: one vector per
    block for both sub-layers, 0.1 at 12 blocks and 1e-5 at 24; other depths are refused, as in the authors' code.
    """

    name: ClassVar[str] = "layer_scale"
    source: ClassVar[str] = "CaiT (arXiv 2103.17239); preset from pixeli99/MixLN-Next at 40d874b"

    preset: str = "separate"

    def __post_init__(self) -> None:
        check_choice(self.name, "preset", self.preset, PRESETS)

    def start(self, n_layers: int) -> float:
        """Start value of the scale for a model of `n_layers` blocks."""
        if self.preset == "authors_shared":
            if n_layers not in (12, 24):
                raise SpecError(
                    f"layer_scale preset authors_shared knows 12 and 24 blocks, not {n_layers}; use separate"
                )
            return 0.1 if n_layers == 12 else 1e-5
        return 0.1 if n_layers <= 18 else 1e-5 if n_layers <= 24 else 1e-6

    def check(self, shape: ModelShape) -> None:
        self.start(shape.n_layers)

    def wiring(self, layer: int, shape: ModelShape) -> Wiring:
        scale = Learned(init=self.start(shape.n_layers), shared=self.preset == "authors_shared")
        return Wiring(pre=True, branch_scale=scale)
