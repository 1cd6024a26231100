"""Kernels that are started before the one in front of them has ended: programmatic dependent launch, on Hopper.

Such a kernel says first that the next may be started, then waits for the end of the one in front. Before that wait it
may not read what any kernel writes; it may ask for lines to be brought to the L2 cache, where all see the same. As
every one waits, the end of one means the end of all before it.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton; where they are called, PDL is on
    gdc_launch_dependents = gdc_wait = None

LINE = tl.constexpr(128)
"Bytes that memory is read in."
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


@triton.jit
def prefetch(at):
    """Brings the lines at these addresses to the L2 cache; nothing waits for them, and nothing is read."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], tl.int32, False, 1)
