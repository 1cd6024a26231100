"""With an order of the vocabulary: the classifier's rows into that order, and those of its gradient back.

In wave w nothing lies in the rows of dC that it completes, until they are written: the waves' scratch is behind them
(see waves.py). So they hold the wave's rows of C, in the order, while q and dE are computed, whose kernels know of no
order then. (A block of two groups may reach into the scratch. What comes of it is not used.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paperlm_kernels.cross_entropy.repeated import WAVE, Repeated


@triton.jit(do_not_specialize=["wave"])
def sort_kernel(C, order, plan, wave, d_weight, V, D, stride_c, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """d_weight[place] = C[order[place]] for the places of the wave's groups. Grid: any."""
    begin = tl.load(plan + wave) * 128
    end = tl.minimum(tl.load(plan + wave + 1) * 128, V)
    pieces = tl.cdiv(D, BLOCK)
    for unit in range(tl.program_id(0), tl.cdiv(end - begin, ROWS) * pieces, tl.num_programs(0)):
        place = begin + unit // pieces * ROWS + tl.arange(0, ROWS)
        column = unit % pieces * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(order + place, mask=place < end, other=0)
        mask = (place < end)[:, None] & (column < D)[None, :]
        c = tl.load(C + row.to(tl.int64)[:, None] * stride_c + column[None, :], mask=mask)
        tl.store(d_weight + place.to(tl.int64)[:, None] * D + column[None, :], c, mask=mask)


def unsort_rows(matrix: torch.Tensor, order: torch.Tensor, free: torch.Tensor, room: int) -> None:
    """Move row i of a contiguous matrix to row order[i], in place.

    Every program takes a row to its place, the row that was there to the place of that one, and so on along a cycle of
    the permutation, until it comes to a row where another program began: each `stride`-th row is such a start, as many
    as are copied beforehand into `free`, a vector, or, if that holds less than a row or 8 bytes a row, into a buffer of
    `room` bytes or of as much as that. A cycle without a start is for one program, which begins at its lowest row.
    """
    rows, columns = matrix.shape
    size = matrix.element_size()
    least = max(8 * rows, size * columns)
    buffer = free.view(torch.uint8)[-free.data_ptr() % 16 :]
    if buffer.numel() < least:
        buffer = torch.empty(max(room, least), dtype=torch.uint8, device=matrix.device)
    stride = triton.cdiv(rows, buffer.numel() // (size * columns))
    starts = triton.cdiv(rows, stride)
    # one warp a program: its lanes read a row before any of them writes it
    block = min(512 // size, triton.next_power_of_2(columns))
    pieces, one = triton.cdiv(columns, block), {"num_warps": 1}
    if stride > 1:
        lowest = buffer[: 8 * rows].view(torch.int64)
        grid = (triton.cdiv(rows, 512),)
        cycle_kernel[grid](lowest, order, rows, stride, BLOCK=512)
        double = Repeated(double_kernel, *grid, lowest, rows, WAVE, BLOCK=512)
        for step in range((rows - 1).bit_length()):
            double(step)
        walk_cycles_kernel[triton.cdiv(rows, 64), pieces](
            matrix, lowest, order, rows, columns, stride, ROWS=64, BLOCK=block, **one
        )
    saved = buffer[: starts * columns * size].view(matrix.dtype)
    save_kernel[starts, pieces](matrix, saved, columns, stride, BLOCK=block, **one)
    walk_kernel[starts, pieces](matrix, saved, order, columns, stride, BLOCK=block, **one)


@triton.jit
def cycle_kernel(lowest, order, n_rows, stride, BLOCK: tl.constexpr):
    """For each row: the row that it goes to (upper half) and itself, but 0 for a start (lower half)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < n_rows
    to = tl.load(order + row, mask=mask, other=0).to(tl.int64)
    tl.store(lowest + row, (to << 32) | tl.where(row % stride == 0, 0, row), mask=mask)


@triton.jit(do_not_specialize=["step"])
def double_kernel(lowest, n_rows, step, BLOCK: tl.constexpr):
    """Twice as far along its cycle, at least: the row that comes after (upper half) and the lowest until there.

    A row that has been doubled already by another program takes this one further, for both halves are one word.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < n_rows
    mine = tl.load(lowest + row, mask=mask, other=0)
    further = tl.load(lowest + (mine >> 32), mask=mask, other=0)
    least = tl.minimum(mine & 0xFFFFFFFF, further & 0xFFFFFFFF)
    tl.store(lowest + row, ((further >> 32) << 32) | least, mask=mask)


@triton.jit
def walk_cycles_kernel(matrix, lowest, order, n_rows, n_columns, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Along the cycles without a start whose lowest row is one of the program's. Grid: rows, columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    least = tl.load(lowest + row, mask=row < n_rows, other=0) & 0xFFFFFFFF
    to = tl.load(order + row, mask=row < n_rows, other=0)
    left = tl.where((least == row) & (row % stride != 0) & (to != row) & (row < n_rows), row, n_rows)
    first = tl.min(left)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n_columns
    while first < n_rows:
        moved = tl.load(matrix + first.to(tl.int64) * n_columns + column, mask=mask)
        place = tl.load(order + first)
        while place != first:
            there = matrix + place.to(tl.int64) * n_columns + column
            place = tl.load(order + place)
            following = tl.load(there, mask=mask)
            tl.store(there, moved, mask=mask)
            moved = following
        tl.store(matrix + first.to(tl.int64) * n_columns + column, moved, mask=mask)
        left = tl.where(left == first, n_rows, left)
        first = tl.min(left)


@triton.jit
def save_kernel(matrix, saved, n_columns, stride, BLOCK: tl.constexpr):
    """The starts' rows, one after the other. Grid: starts, columns."""
    start = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n_columns
    tl.store(saved + start * n_columns + column, tl.load(matrix + start * stride * n_columns + column, mask=mask), mask)


@triton.jit
def walk_kernel(matrix, saved, order, n_columns, stride, BLOCK: tl.constexpr):
    """From a start to the next. Grid: starts, columns."""
    start = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n_columns
    moved = tl.load(saved + start * n_columns + column, mask=mask)
    place = tl.load(order + start * stride)
    while place % stride != 0:
        there = matrix + place.to(tl.int64) * n_columns + column
        place = tl.load(order + place)
        following = tl.load(there, mask=mask)  # waited for in the next round alone
        tl.store(there, moved, mask=mask)
        moved = following
    tl.store(matrix + place.to(tl.int64) * n_columns + column, moved, mask=mask)
