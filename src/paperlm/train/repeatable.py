"""Kernels of PyTorch that give the same bits in every run, where it has such ones."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextlib.contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Within it a GPU runs PyTorch's deterministic kernels (those for which there is none run as they are), as NeuZip
    does for its Table 1; on a CPU nothing changes.

    Attention is computed by its definition: the backward passes of the fast forms add up gradients in any order, also
    where deterministic kernels are asked for, and two runs may differ.
    """
    if device.type != "cuda":
        yield
        return
    modes, fill = torch.utils.deterministic, torch.utils.deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    modes.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings():
            # among them that cuBLAS wants a workspace to be set, which only several streams need
            warnings.filterwarnings("ignore", message=".*deterministic")
            with sdpa_kernel(SDPBackend.MATH):
                yield
    finally:
        modes.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
