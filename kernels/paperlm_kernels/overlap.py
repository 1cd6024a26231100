"""Kernels that are started before the one in front of them has ended: programmatic dependent launch, on Hopper.

Such a kernel waits for the end of the one in front before it touches memory (but `ternary_linear.stream` reads
weights that are settled), and says then that the next may be started. As every one waits, the end of one means the
end of all before it. What it says first of all starts kernels too early: with a 4-bit cache a token of 3B took 1.69
ms where norms, cache and attention did so, 1.46 in this order, and 1.53 where they are started one after the other
(an H200, in turns).
"""

from __future__ import annotations

import functools
import os

import torch

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton; where they are called, PDL is on
    gdc_launch_dependents = gdc_wait = None

FEW_ROWS = 16
"With more rows than this a kernel takes so long that its start does not count."


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether kernels may be compiled for the matrix units and the copy engine of Hopper there."""
    if device.type != "cuda" or torch.version.hip is not None or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def overlaps(device: torch.device) -> bool:
    """Whether kernels are started there before the one in front of them has ended."""
    return gdc_wait is not None and is_hopper(device)


def launched(pdl: bool) -> dict[str, bool]:
    """Keywords of a launch, and the constant PDL of its kernel."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
