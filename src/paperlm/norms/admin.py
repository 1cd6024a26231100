"""Admin: y = N1(w1*x + A(x)), z = N2(w2*y + F(y)) with trained w, started from a profiling pass."""

from dataclasses import dataclass
from typing import Any, ClassVar

from paperlm.norms.base import Learned, ModelShape, NormMethod, Wiring, check_choice

PRESETS = ("profiled", "authors_scalar_0p015")


@dataclass(frozen=True, kw_only=True)
class Admin(NormMethod):
    """Post-LN with trained factors on the residual.

    profiled: one vector per sub-layer; one forward pass over a training batch in network order sets it. Starting at
    r = 1: w := r, then r := sqrt(Var(w * x) + Var(f(x))) over all elements of the batch. w grows with depth where the
    stream starts with unit variance; from embeddings of standard deviation 0.02 it first falls (1.0, 0.02, 0.15, ...).
    authors_scalar_0p015: what the Mix-LN authors ran: one scalar per block for both sub-layers, started at 0.015,
    without profiling. It nearly removes the residual.
    """

    name: ClassVar[str] = "admin"
    source: ClassVar[str] = "Liu et al. 2020 (arXiv 2004.08249); pixeli99/MixLN-Next at 40d874b"

    preset: str = "profiled"

    def __post_init__(self) -> None:
        check_choice(self.name, "preset", self.preset, PRESETS)

    def wiring(self, layer: int, shape: ModelShape) -> Wiring:
        if self.preset == "profiled":
            return Wiring(out=True, residual_scale=Learned(init=1.0))
        return Wiring(out=True, residual_scale=Learned(init=0.015, per_feature=False, shared=True))

    def initialize_from_batch(self, model: Any, input_ids: Any) -> None:
        if self.preset != "profiled":
            return
        import torch

        ratio = 1.0

        def profile(residual: Any, x: Any, branch: Any) -> None:
            nonlocal ratio
            residual.residual_scale.fill_(ratio)
            ratio = float((ratio * x.float()).var() + branch.float().var()) ** 0.5

        with torch.no_grad():
            model.observe_residuals(input_ids, profile)
