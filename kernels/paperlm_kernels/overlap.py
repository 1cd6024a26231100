"""Kernels that are started before the one in front of them has ended: programmatic dependent launch, on Hopper.

Such a kernel waits for the end of the one in front before it computes with what it reads, or writes (but
`ternary_linear.stream` reads weights that are settled). As every one waits, the end of one means the end of all before
it. Before that wait it may ask for what it will read to be brought into the L2 cache (`fetch`), for memory is idle
while a norm is at work.

When it says that the next may be started decides how long both are there: behind its wait, but for a product of a token
behind a norm, which says so first. Tokens a second of 3B on an H200, 4-bit cache: 828 so, 816 where all say it behind
their wait; 707 where norms say it first, and products do not (two runs, no rows).
"""

from __future__ import annotations

import functools
import os

import torch

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton, or none; where they are called, PDL is on
    gdc_launch_dependents = gdc_wait = fetch = None
else:
    # one thread of the program asks; address and size have to be multiples of 16
    FETCH = tl.constexpr("""{
.reg .pred p;
.reg .b32 t;
.reg .b64 a;
mov.u32 t, %tid.x;
setp.eq.u32 p, t, 0;
and.b64 a, $1, -16;
and.b32 t, $2, -16;
setp.gt.and.s32 p, t, 0, p;
@p cp.async.bulk.prefetch.L2.global [a], t;
mov.b32 $0, 0;
}""")

    @triton.jit
    def fetch(address, size):
        """Asks for `size` bytes at an address to be brought into the L2 cache, where all see the same: they may still
        be written. Nothing waits for them. What is asked for begins and ends at multiples of 16 bytes, so that up to
        30 at the end may be left out."""
        tl.inline_asm_elementwise(FETCH, "=r,l,r", [address.to(tl.int64), size], tl.int32, False, 1)


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
