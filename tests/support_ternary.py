"""Helpers of the tests of the kernels for models in few bits: where they run, and their data."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from support_cross_entropy import KERNELS


class Spot(NamedTuple):
    """A backend on a device."""

    backend: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}"


# With TRITON_INTERPRET=1, or on a GPU, the kernels go through the same tests as the reference.
SPOTS = [Spot("reference", "cpu"), *dict.fromkeys(Spot(place.backend, place.device) for place in KERNELS)]
everywhere = pytest.mark.parametrize("spot", SPOTS, ids=str)
compiled_or_interpreted = pytest.mark.parametrize("spot", SPOTS[1:], ids=str)


def normal(*shape, seed=0, dtype=torch.float32, device="cpu"):
    """Gaussian numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def ternary(rows, width, seed=0):
    """A matrix of -1, 0 and 1, int8."""
    return torch.randint(-1, 2, (rows, width), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def activations(rows, width, seed=0):
    """Codes over the whole of int8, -128 in each row, and scales."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (rows, width), generator=g, dtype=torch.int16).to(torch.int8)
    codes[:, 0] = -128
    return codes, torch.rand(rows, generator=g) + 0.5
