"""Host side of the kernels: grids and buffers. Nothing here waits for the device."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from paperlm_kernels.kv_attention import kernel
from paperlm_kernels.kv_attention.layout import KVLayout, levels_of, zero_of

TOKENS = 32
"Positions of a step of the decode kernel."
DECODE_WARPS = {3: 8, 4: 4}
"Two groups of planes and their sums need the registers of more threads."
MOST_SPLITS = 64


def _sizes(layout: KVLayout) -> tuple[int, int]:
    """Bytes of the planes with the low bits and of those with the highest of three."""
    sizes = [planes.size for planes in layout.planes]
    return sizes[0], sizes[1] if layout.bits == 3 else 0


def _block(size: int) -> int:
    return max(1, triton.next_power_of_2(size))


def run_append(
    k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, k_data: Tensor, v_data: Tensor, k_steps: Tensor,
    v_steps: Tensor, k_first: Tensor | None, v_first: Tensor | None, lengths: Tensor, layout: KVLayout,
) -> None:  # fmt: skip
    """k, v (B, T, heads, D) to the positions behind `lengths`; cos, sin (B, T, D / 2) contiguous, or None."""
    B, T, heads, D = k.shape
    low, high = _sizes(layout)
    first = layout.first
    if not k.numel():
        return
    with torch.cuda.device_of(k):
        kernel.append_kernel[(T, B * heads, 2)](
            k, v, cos, sin, k_data, v_data, k_steps, v_steps, k_first, v_first, lengths, T, heads, D, k_data.shape[2],
            layout.row_bytes, low, high, layout.levels, layout.zero, 2.0**layout.bits - 1, first.levels, first.zero,
            *k.stride()[:3], *v.stride()[:3], THREE=layout.bits == 3, FIRST=layout.has_first,
            SYMMETRIC=layout.mapping == "symmetric", ROTATE=cos is not None, HALF=_block(D // 2),
            QUARTER=_block(D // 4), EIGHTH=_block(-(-D // 8)), num_warps=1,
        )  # fmt: skip


def splits_of(programs: int, capacity: int, device: torch.device) -> int:
    """In how many parts positions are divided, so that every multiprocessor has several programs and no part is short.

    By the capacity, since the length is on the device.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    wanted = max(1, -(-4 * processors // programs))
    return min(MOST_SPLITS, wanted, max(1, capacity // (4 * TOKENS)))


def run_decode(
    q: Tensor, k_data: Tensor, v_data: Tensor, k_steps: Tensor, v_steps: Tensor, k_first: Tensor | None,
    v_first: Tensor | None, lengths: Tensor, layout: KVLayout, q_bits: int, scale: float, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """q (B, heads, D) contiguous; the result like q."""
    B, heads, D = q.shape
    kv_heads, capacity = k_data.shape[1:3]
    low, high = _sizes(layout)
    splits = splits or splits_of(B * heads, capacity, q.device)
    three = layout.bits == 3
    parts = torch.empty(B * heads, splits, 2 if three else 1, D, dtype=torch.float32, device=q.device)
    stats = torch.empty(B * heads, splits, 3, dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    if not q.numel():
        return out
    quantize = q_bits != 16
    q_levels, q_zero = (f(q_bits if quantize else 4, layout.mapping) for f in (levels_of, zero_of))
    of_query = {"QUANTIZE": quantize, "SYMMETRIC": layout.mapping == "symmetric"}
    scale = scale * math.log2(math.e)
    count, bits = (4, 2) if three else (2, 4)
    with torch.cuda.device_of(q):
        kernel.decode_kernel[(B * heads, splits)](
            q, k_data, v_data, k_steps, v_steps, lengths, parts, stats, heads, heads // kv_heads, D, capacity,
            layout.row_bytes, low, high, layout.zero, scale, q_levels, q_zero, splits,
            THREE=three, FIRST=layout.has_first, TOKENS=TOKENS, COUNT=count, BITS=bits, LOW=_block(low),
            HIGH=_block(high), **of_query, num_warps=DECODE_WARPS[layout.bits],
        )  # fmt: skip
        kernel.merge_kernel[(B * heads,)](
            q, k_first, v_first, k_steps, v_steps, lengths, parts, stats, out, heads, heads // kv_heads, D, capacity,
            layout.zero, layout.first.zero, scale, q_levels, q_zero, splits, THREE=three, FIRST=layout.has_first,
            SPLITS=_block(splits), BLOCK=_block(D), **of_query, num_warps=4,
        )  # fmt: skip
    return out
