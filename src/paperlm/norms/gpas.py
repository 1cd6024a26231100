"""GPAS: what leaves each residual sum of `base` is scaled down by a trained gate, its gradient is not."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from paperlm.errors import SpecError
from paperlm.norms.base import ModelShape, WrappedMethod


@dataclass(frozen=True, kw_only=True)
class GPAS(WrappedMethod):
    """out - silu(g) * stop(out) behind both sums of a block, with one gate g a block that starts at 0.

    `stop` cuts the gradient: the scaling is felt forward, and by the gate, and not by what is scaled.
    """

    name: ClassVar[str] = "gpas"
    source: ClassVar[str] = "GPAS (arXiv 2506.22049); dandingsky/GPAS at 3198068, peft_pretraining/modeling_llama.py"

    def __post_init__(self) -> None:
        if not self.base.in_equation:
            raise SpecError(f"gpas: {self.base.name} has residual sums of its own: give a base that has none")

    def residuals(self, layer: int, shape: ModelShape, norm: Callable[[], Any]) -> tuple[Any, Any]:
        from paperlm.models.layers import residual_pair

        attention, mlp = residual_pair(self.base.wiring(layer, shape), shape.hidden_size, norm, _residual())
        mlp.gate = None  # the block's gate is registered once, and lent
        return attention, mlp


@functools.cache
def _residual() -> type:
    """The class is made where it is first needed: torch is not loaded with the methods."""
    import torch
    import torch.nn.functional as F

    from paperlm.models.layers import Residual

    class GatedResidual(Residual):
        """A residual sum with the gate behind it. Further factors than the gate are those of its base."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.gate = torch.nn.Parameter(torch.zeros(1))

        def reset_factors(self) -> None:
            super().reset_factors()
            if self.gate is not None:
                self.gate.zero_()

        def forward(self, x: Any, branch: Any, lent: tuple = (None, None), real: Any = None) -> tuple[Any, tuple]:
            out, factors = super().forward(x, branch, lent[:2], real)
            gate = lent[2] if self.gate is None else self.gate
            return out - F.silu(gate) * out.detach(), (*factors, gate)

    return GatedResidual
