"""SiameseNorm: a Post-LN and a Pre-LN stream side by side, with the same branches."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from paperlm.errors import SpecError
from paperlm.norms.base import ModelShape, NormMethod, Wiring


@dataclass(frozen=True, kw_only=True)
class SiameseNorm(NormMethod):
    """Streams x and y, both from the embedding. For each sub-layer f of block l, counted from 1:

    u = N1(x), h = f( N3( u + N2(y) ) ), x <- u + h / sqrt(2 l), y <- y + h. The final norm reads N(x) + N(y).
    """

    name: ClassVar[str] = "siamese_norm"
    source: ClassVar[str] = "SiameseNorm (arXiv 2602.08064v2); Qwen-Applications/SiameseNorm, deit-model-siamesenorm.py"

    def wiring(self, layer: int, shape: ModelShape) -> Wiring:
        raise SpecError("siamese_norm has two residual streams: no wiring of one stream describes it")

    def residuals(self, layer: int, shape: ModelShape, norm: Callable[[], Any]) -> tuple[Any, Any]:
        TwoStreams = _modules()[0]
        return TwoStreams((2 * layer) ** -0.5, norm), TwoStreams((2 * layer) ** -0.5, norm)

    def entry(self, shape: ModelShape, norm: Callable[[], Any]) -> Any:
        return _modules()[1]()

    def exit(self, shape: ModelShape, norm: Callable[[], Any]) -> Any:
        return _modules()[2](norm)


@functools.cache
def _modules() -> tuple[type, type, type]:
    """The classes are made where they are first needed: torch is not loaded with the methods."""
    import torch
    from torch import Tensor, nn

    class TwoStreams(nn.Module):
        """Both sums of a sub-layer; the state (B, S, 2D) is x beside y."""

        def __init__(self, scale: float, norm: Callable[[], nn.Module]) -> None:
            super().__init__()
            self.scale = scale
            self.x_norm, self.y_norm, self.in_norm = norm(), norm(), norm()

        def before(self, state: Tensor, real: Tensor | None = None) -> Tensor:
            x, y = state.chunk(2, -1)
            return self.in_norm(self.x_norm(x) + self.y_norm(y))

        def after(self, h: Tensor, real: Tensor | None = None) -> Tensor:
            return h

        def forward(
            self, state: Tensor, branch: Tensor, lent: tuple = (None, None), real: Tensor | None = None
        ) -> tuple[Tensor, tuple]:
            x, y = state.chunk(2, -1)
            return torch.cat((self.x_norm(x) + branch * self.scale, y + branch), -1), (None, None)

    class Doubled(nn.Module):
        """(B, S, D) -> (B, S, 2D)."""

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat((x, x), -1)

    class Joined(nn.Module):
        """(B, S, 2D) -> (B, S, D)."""

        def __init__(self, norm: Callable[[], nn.Module]) -> None:
            super().__init__()
            self.x_norm, self.y_norm = norm(), norm()

        def forward(self, state: Tensor) -> Tensor:
            x, y = state.chunk(2, -1)
            return self.x_norm(x) + self.y_norm(y)

    return TwoStreams, Doubled, Joined
