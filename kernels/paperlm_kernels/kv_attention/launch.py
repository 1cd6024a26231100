"""Host side of the kernels: grids and buffers. Nothing here waits for the device."""

from __future__ import annotations

import dataclasses
import math
import os

import torch
import triton
from torch import Tensor

from paperlm_kernels.kv_attention import kernel, kernel_bytes
from paperlm_kernels.kv_attention.layout import KVLayout, levels_of, zero_of
from paperlm_kernels.overlap import launched, overlaps
from paperlm_kernels.ternary_linear.launch import processors

WARPS, STAGES = 1, 3
"""Of the decode kernel, and how many steps it reads ahead: the best of a sweep on an H200 (4 bits, 32 heads of 128,
4096 positions): 13.5 and 105 us with 1 and with 16 sequences, where 4 warps and 2 steps take 16.8 and 141."""
WARPS_AT_ONCE = 32
"Of a multiprocessor, which there should be: in that sweep half as many took up to a twentieth longer."
AT_ONCE = 32
"Numbers of a row that a thread has, of the query and in its sums; where it reads bytes, twice as many sums."
MOST_SPLITS = 64
ASM = os.environ.get("TRITON_INTERPRET") != "1"
"The interpreter has no inline assembly."


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Of the decode kernel: positions a step; in what rows are read, and how many of it they have; how many words are a
    block, of low bits and of the highest where rows are read in bytes; warps; and steps that are read ahead."""

    tokens: int
    unit: torch.dtype
    row: int
    blocks: tuple[int, ...]
    warps: int
    stages: int


def tiles_of(layout: KVLayout, warps: int | None = None, stages: int | None = None) -> Tiles:
    """A thread has AT_ONCE numbers of a row, so that it reads 16 bytes of one with 4 bits."""
    D, size = layout.head_dim, layout.row_bytes
    warps, stages = warps or WARPS, stages or STAGES
    if layout.bits == 3 and D % 32:
        unit, blocks = torch.uint8, tuple(_block(-(-planes.size // 4)) for planes in layout.planes)
        of_a_row = max(4 * block * planes.count for block, planes in zip(blocks, layout.planes, strict=True))
    else:
        planes = 8 if layout.bits == 3 else 2
        unit, blocks = torch.int16 if size % 4 else torch.int32, (_block(-(-D // (4 * planes))),)
        of_a_row = blocks[0] * 4 * planes
    return Tiles(max(1, 32 * warps * AT_ONCE // of_a_row), unit, size // unit.itemsize, blocks, warps, stages)


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
    terms = len(tiles.blocks)
    parts = torch.empty(B * heads, splits, terms, D, dtype=torch.float32, device=q.device)
    stats = torch.empty(B * heads, splits, 2, dtype=torch.float32, device=q.device)
    quantize = q_bits != 16
    q_levels, q_zero = (f(q_bits if quantize else 4, layout.mapping) for f in (levels_of, zero_of))
    of_query = {"QUANTIZE": quantize, "SYMMETRIC": layout.mapping == "symmetric"}
    scale = scale * math.log2(math.e)
    data = [rows.view(tiles.unit) for rows in (k_data, v_data)]
    pdl = launched(overlaps(q.device))
    of_tiles = {"TOKENS": tiles.tokens, "STAGES": tiles.stages, "num_warps": tiles.warps, "ASM": ASM}
    if tiles.unit == torch.uint8:
        decode = kernel_bytes.decode_bytes_kernel
        of_tiles |= dict(zip(("LOW", "HIGH"), tiles.blocks, strict=True))
    else:
        decode, (block,) = kernel.decode_kernel, tiles.blocks
        of_tiles |= {"BLOCK": block, "THREE": layout.bits == 3, "HALVES": tiles.unit == torch.int16}
    with torch.cuda.device_of(q):
        decode[(B * heads, splits)](
            q, *data, k_steps, v_steps, lengths, parts, stats, heads, heads // kv_heads, D, capacity, tiles.row,
            layout.zero, scale, q_levels, q_zero, splits, FIRST=layout.has_first, **of_tiles, **of_query, **pdl,
        )  # fmt: skip
        kernel.merge_kernel[(B * heads,)](
            q, k_first, v_first, k_steps, v_steps, lengths, parts, stats, out, heads, heads // kv_heads, D, capacity,
            layout.first.zero, scale, q_levels, q_zero, splits, FIRST=layout.has_first, SPLITS=_block(splits),
            TERMS=terms, BLOCK=_block(D), **of_query, num_warps=4, **pdl,
        )  # fmt: skip
    return out
