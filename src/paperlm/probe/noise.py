"""Noise on weights, for as long as it is wanted (NeuZip, Figure 7)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def disturbed(
    weights: Mapping[str, torch.Tensor], absolute: int | None, relative: int | None, seed: int
) -> Iterator[None]:
    """Within, each weight w is w + u max(2^absolute, 2^relative |w|), u uniform in [-1, 1]; None is a part of zero.

    u depends on the seed alone (one stream on the CPU, weights in their order), so that two sizes of noise differ in
    nothing else. Behind it the weights are what they were, bit for bit.
    """
    import torch

    kept = {name: weight.clone() for name, weight in weights.items()}
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for weight in weights.values():
                u = torch.rand(weight.shape, generator=generator).mul_(2).sub_(1).to(weight.device)
                size = torch.full_like(weight, 0.0 if absolute is None else 2.0**absolute)
                if relative is not None:
                    size = torch.maximum(size, 2.0**relative * weight.abs())
                weight += u * size
        yield
    finally:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(kept[name])
