"""Host side of the kernels: grids and buffers. Nothing here waits for the device."""

from __future__ import annotations

import dataclasses
import math
import os

import torch
import triton
from torch import Tensor

from paperlm_kernels.kv_attention import kernel
from paperlm_kernels.kv_attention.layout import KVLayout, levels_of, zero_of
from paperlm_kernels.overlap import launched, overlaps
from paperlm_kernels.ternary_linear.launch import processors

WARPS, STAGES = 1, 3
"""Of the decode kernel, and how many steps it reads ahead: the best of a sweep on an H200 (4 bits, 32 heads of 128,
4096 positions): 13.5 and 105 us with 1 and with 16 sequences, where 4 warps and 2 steps take 16.8 and 141."""
BYTES_WARPS, BYTES_STAGES = 4, 2
"The same where rows are read byte by byte; not measured."
WARPS_AT_ONCE = 32
"Of a multiprocessor, which there should be: in that sweep half as many took up to a twentieth longer."
AT_ONCE, GATHERED = 32, 8
"Numbers of a row that a thread has, of the query and in its sums; where it reads them byte by byte."
MOST_SPLITS = 64
ASM = os.environ.get("TRITON_INTERPRET") != "1"
"The interpreter has no inline assembly."


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Of the decode kernel: positions a step; in what rows are read, how many of it they have, and how many words, or
    single numbers where rows are read in bytes, are a block; warps; and steps that are read ahead."""

    tokens: int
    unit: torch.dtype
    row: int
    block: int
    warps: int
    stages: int


def tiles_of(layout: KVLayout, warps: int | None = None, stages: int | None = None) -> Tiles:
    """A thread has AT_ONCE numbers of a row in words, so that it reads 16 bytes of one with 4 bits."""
    D, size = layout.head_dim, layout.row_bytes
    if layout.bits == 3 and D % 32:
        warps = warps or BYTES_WARPS
        tokens = max(1, 32 * warps * GATHERED // _block(D))
        return Tiles(tokens, torch.uint8, size, _block(D), warps, stages or BYTES_STAGES)
    warps = warps or WARPS
    planes = 8 if layout.bits == 3 else 2
    block = _block(-(-D // (4 * planes)))
    unit = torch.int16 if size % 4 else torch.int32
    tokens = max(1, 32 * warps * AT_ONCE // (block * 4 * planes))
    return Tiles(tokens, unit, size // unit.itemsize, block, warps, stages or STAGES)


def _sizes(layout: KVLayout) -> tuple[int, int]:
    """Bytes of the planes with the low bits and of those with the highest of three."""
    sizes = [planes.size for planes in layout.planes]
    return sizes[0], sizes[1] if layout.bits == 3 else 0


def _block(size: int) -> int:
    return max(1, triton.next_power_of_2(size))


def run_append(
    k: Tensor, v: Tensor, q: Tensor | None, cos: Tensor | None, sin: Tensor | None, k_data: Tensor, v_data: Tensor,
    k_steps: Tensor, v_steps: Tensor, k_first: Tensor | None, v_first: Tensor | None, lengths: Tensor, layout: KVLayout,
) -> Tensor | None:  # fmt: skip
    """k, v (B, T, heads, D) to the positions behind `lengths`; cos, sin (B, T, D / 2) contiguous, or None. The turned
    q (B, T, query heads, D), where there is one."""
    B, T, heads, D = k.shape
    low, high = _sizes(layout)
    first = layout.first
    turned = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    groups = 0 if q is None else q.shape[2] // heads
    if not k.numel():
        return turned
    with torch.cuda.device_of(k):
        kernel.append_kernel[(T, B * heads, 2 + groups)](
            k, v, q, turned, cos, sin, k_data, v_data, k_steps, v_steps, k_first, v_first, lengths, T, heads, D,
            k_data.shape[2], layout.row_bytes, low, high, layout.levels, layout.zero, 2.0**layout.bits - 1,
            first.levels, first.zero, *k.stride()[:3], *v.stride()[:3], *(q.stride()[:3] if groups else (0, 0, 0)),
            THREE=layout.bits == 3, FIRST=layout.has_first, SYMMETRIC=layout.mapping == "symmetric",
            ROTATE=cos is not None, HALF=_block(D // 2), QUARTER=_block(D // 4), EIGHTH=_block(-(-D // 8)),
            GROUPS=groups, num_warps=1, **launched(T == 1 and overlaps(k.device)),
        )  # fmt: skip
    return turned


def splits_of(programs: int, capacity: int, tiles: Tiles, device: torch.device) -> int:
    """In how many parts positions are divided, so that multiprocessors have WARPS_AT_ONCE and no part is short.

    By the capacity, since the length is on the device.
    """
    wanted = processors(device) * WARPS_AT_ONCE // tiles.warps // programs
    return max(1, min(MOST_SPLITS, wanted, capacity // (4 * tiles.tokens)))


def run_decode(
    q: Tensor, k_data: Tensor, v_data: Tensor, k_steps: Tensor, v_steps: Tensor, k_first: Tensor | None,
    v_first: Tensor | None, lengths: Tensor, layout: KVLayout, q_bits: int, scale: float, splits: int | None = None,
    warps: int | None = None, stages: int | None = None,
) -> Tensor:  # fmt: skip
    """q (B, heads, D) contiguous; the result like q. What is given last forces what follows from the shapes else."""
    B, heads, D = q.shape
    kv_heads, capacity = k_data.shape[1:3]
    out = torch.empty_like(q)
    if not q.numel():
        return out
    tiles = tiles_of(layout, warps, stages)
    splits = splits or splits_of(B * heads, capacity, tiles, q.device)
    parts = torch.empty(B * heads, splits, D, dtype=torch.float32, device=q.device)
    stats = torch.empty(B * heads, splits, 2, dtype=torch.float32, device=q.device)
    quantize = q_bits != 16
    q_levels, q_zero = (f(q_bits if quantize else 4, layout.mapping) for f in (levels_of, zero_of))
    of_query = {"QUANTIZE": quantize, "SYMMETRIC": layout.mapping == "symmetric"}
    scale = scale * math.log2(math.e)
    data = [rows.view(tiles.unit) for rows in (k_data, v_data)]
    pdl = launched(overlaps(q.device))
    with torch.cuda.device_of(q):
        kernel.decode_kernel[(B * heads, splits)](
            q, *data, k_steps, v_steps, lengths, parts, stats, heads, heads // kv_heads, D, capacity, tiles.row,
            layout.zero, scale, q_levels, q_zero, splits, THREE=layout.bits == 3, FIRST=layout.has_first,
            TOKENS=tiles.tokens, WIDE=tiles.unit != torch.uint8, HALVES=tiles.unit == torch.int16, BLOCK=tiles.block,
            STAGES=tiles.stages, ASM=ASM, **of_query, num_warps=tiles.warps, **pdl,
        )  # fmt: skip
        kernel.merge_kernel[(B * heads,)](
            q, k_first, v_first, k_steps, v_steps, lengths, parts, stats, out, heads, heads // kv_heads, D, capacity,
            layout.first.zero, scale, q_levels, q_zero, splits, FIRST=layout.has_first, SPLITS=_block(splits),
            BLOCK=_block(D), **of_query, num_warps=4, **pdl,
        )  # fmt: skip
    return out
