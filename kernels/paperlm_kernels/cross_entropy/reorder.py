"""With an order of the vocabulary: the classifier's rows into that order, and those of its gradient back.

In wave w nothing lies in the rows of dC that it completes, until they are written: the waves' scratch is behind them
(see waves.py). So they hold the wave's rows of C, in the order, while q and dE are computed, whose kernels know of no
order then. (A block of two groups may reach into the scratch. What comes of it is not used.)
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from paperlm_kernels.cross_entropy.repeated import WAVE, Repeated

MOST_STARTS = 2**14  # of walks: more than any card runs at once
ROWS_AT_ONCE = 512  # of a program that looks at the order alone
CYCLES_AT_ONCE = 64  # rows of a program that looks for cycles among them


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

    A program takes a row to its place, the row that was there to the place of that one, and so on along a cycle of the
    permutation, until it comes to a row where another program began. The rows at such starts are copied beforehand into
    `free`, a vector, or, if that does not hold two rows and 8 bytes a row, into a buffer of `room` bytes or of as much
    as that. Half of the starts are each `stride`-th row, the others lie where it would be more than `stride` steps to
    the next one. Cycles that none of them meets are for one program each. An order that is no permutation leaves wrong
    rows, but ends, and nothing is written beyond the matrix and the buffer.
    """
    rows, columns = matrix.shape
    size = columns * matrix.element_size()
    least = max(8 * rows, 2 * size)
    buffer = free.view(torch.uint8)[-free.data_ptr() % 16 :]
    if buffer.numel() < least:
        buffer = torch.empty(max(room, least), dtype=torch.uint8, device=matrix.device)
    held = buffer.numel() // size
    stride = 1 if held >= rows else triton.cdiv(rows, min(held, MOST_STARTS) // 2)
    while math.gcd(stride, rows * (rows - 1)) > 1 < stride:
        stride += 1  # else shifts and transpositions have long cycles without a regular start
    regular = triton.cdiv(rows, stride)
    starts = regular if stride == 1 else 2 * regular
    # one warp a program: all its lanes read a row before any of them writes it
    options = {"BLOCK": min(512 // matrix.element_size(), triton.next_power_of_2(columns)), "num_warps": 1}
    pieces = triton.cdiv(columns, options["BLOCK"])
    walks = torch.zeros((2, starts if stride > 1 else 0), dtype=torch.int32, device=matrix.device)
    if stride > 1:
        ahead = buffer[: 8 * rows].view(torch.int64)
        grid = triton.cdiv(rows, ROWS_AT_ONCE)
        ahead_kernel[grid,](ahead, order, rows, stride, BLOCK=ROWS_AT_ONCE)
        double = Repeated(double_kernel, grid, ahead, rows, WAVE, BLOCK=ROWS_AT_ONCE)
        for step in range((rows - 1).bit_length()):
            double(step)
        extra = torch.empty(regular, dtype=torch.int32, device=matrix.device)
        regular_kernel[triton.cdiv(regular, ROWS_AT_ONCE),](
            ahead, order, walks, extra, regular, stride, BLOCK=ROWS_AT_ONCE
        )
        extra_kernel[grid,](ahead, walks, extra.cumsum(0, dtype=torch.int32), rows, regular, stride, BLOCK=ROWS_AT_ONCE)
        walk_cycles_kernel[triton.cdiv(rows, CYCLES_AT_ONCE), pieces](
            matrix, ahead, order, rows, columns, stride, ROWS=CYCLES_AT_ONCE, **options
        )
    saved = buffer[: starts * size].view(matrix.dtype)
    options["EVERY"] = stride == 1
    save_kernel[starts, pieces](matrix, saved, walks, columns, starts, **options)
    walk_kernel[starts, pieces](matrix, saved, order, walks, columns, starts, **options)


@triton.jit(do_not_specialize=["stride"])
def ahead_kernel(ahead, order, n_rows, stride, BLOCK: tl.constexpr):
    """Of each row: a row ahead of it (upper half) and the steps to that one (lower half). Regular starts stay where
    they are."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < n_rows
    to = tl.load(order + row, mask=mask, other=0).to(tl.int64)
    start = row % stride == 0
    tl.store(ahead + row, tl.where(start, row.to(tl.int64) << 32, (to << 32) + 1), mask=mask)


@triton.jit(do_not_specialize=["step"])
def double_kernel(ahead, n_rows, step, BLOCK: tl.constexpr):
    """Twice as far ahead at least: as far as the row ahead is from there.

    That one may have been doubled already by another program. Its two halves are one word, so they belong together.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < n_rows
    mine = tl.load(ahead + row, mask=mask, other=0)
    further = tl.load(ahead + (mine >> 32), mask=mask, other=0)
    # steps around a cycle without a start have no bound
    steps = (mine + further) & 0xFFFFFFFF
    tl.store(ahead + row, ((further >> 32) << 32) | steps, mask=mask)


@triton.jit(do_not_specialize=["stride"])
def regular_kernel(ahead, order, walks, extra, n_starts, stride, BLOCK: tl.constexpr):
    """For each regular start: its row and steps to the next start of any kind; and how many others lie before the
    regular one at the end."""
    start = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = start < n_starts
    first = tl.load(order + start * stride, mask=mask, other=0)
    word = tl.load(ahead + first, mask=mask, other=0)
    steps = (word & 0xFFFFFFFF).to(tl.int32)
    tl.store(walks + start, start * stride, mask=mask)
    tl.store(walks + 2 * n_starts + start, steps % stride + 1, mask=mask)
    tl.store(extra + (word >> 32) // stride, steps // stride, mask=mask)


@triton.jit(do_not_specialize=["stride"])
def extra_kernel(ahead, walks, extra_until, n_rows, n_starts, stride, BLOCK: tl.constexpr):
    """The other starts, each a multiple of `stride` steps before a regular one: row and steps. extra_until: how many
    there are before that regular start and those of lower rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(ahead + row, mask=row < n_rows, other=0)
    end, steps = (word >> 32).to(tl.int32), (word & 0xFFFFFFFF).to(tl.int32)
    found = (row < n_rows) & (end % stride == 0) & (steps > 0) & (steps % stride == 0)
    until = tl.load(extra_until + end // stride, mask=found, other=0)
    place = n_starts + until - steps // stride
    found = found & (place >= n_starts) & (place < 2 * n_starts)  # as in a permutation
    tl.store(walks + place, row, mask=found)
    tl.store(walks + 2 * n_starts + place, tl.zeros_like(row) + stride, mask=found)


@triton.jit
def _exchange(there, moved, mask):
    """Store `moved`, return what was there.

    The choice between the two, which the mask has made already, lets the store wait for the load. Else it would reach
    L1 while the line is on its way there, and hold up the accesses of all programs on the multiprocessor.
    """
    found = tl.load(there, mask=mask)
    tl.store(there, tl.where(mask, moved, found), mask=mask)
    return found


@triton.jit(do_not_specialize=["stride"])
def walk_cycles_kernel(matrix, ahead, order, n_rows, n_columns, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Along the cycles without a start whose lowest row is one of the program's. Grid: rows, columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    end = tl.load(ahead + row, mask=row < n_rows, other=0) >> 32
    to = tl.load(order + row, mask=row < n_rows, other=0)  # from now on the row that a search upwards has come to
    alone = (row < n_rows) & (end % stride != 0) & (to != row)
    steps = 0
    while (tl.max((alone & (to > row)).to(tl.int32), 0) > 0) & (steps < n_rows):
        to = tl.where(alone & (to > row), tl.load(order + to), to)
        steps += 1
    left = tl.where(alone & (to == row), row, n_rows)
    first = tl.min(left, 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n_columns
    while first < n_rows:
        moved = tl.load(matrix + first.to(tl.int64) * n_columns + column, mask=mask)
        place = tl.load(order + first)
        while place != first:  # which the search has come back to
            there = matrix + place.to(tl.int64) * n_columns + column
            place = tl.load(order + place)
            moved = _exchange(there, moved, mask)
        tl.store(matrix + first.to(tl.int64) * n_columns + column, moved, mask=mask)
        left = tl.where(left == first, n_rows, left)
        first = tl.min(left, 0)


@triton.jit
def _walk(walks, n_starts, EVERY: tl.constexpr):
    """Row of the program's start, and steps to the next."""
    start = tl.program_id(0)
    if EVERY:
        return start, 1
    else:
        return tl.load(walks + start), tl.load(walks + n_starts + start)


@triton.jit
def save_kernel(matrix, saved, walks, n_columns, n_starts, EVERY: tl.constexpr, BLOCK: tl.constexpr):
    """The rows at starts, one after the other. Grid: starts, columns."""
    row, steps = _walk(walks, n_starts, EVERY)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (column < n_columns) & (steps > 0)
    moved = tl.load(matrix + row.to(tl.int64) * n_columns + column, mask=mask)
    tl.store(saved + tl.program_id(0).to(tl.int64) * n_columns + column, moved, mask=mask)


@triton.jit
def walk_kernel(matrix, saved, order, walks, n_columns, n_starts, EVERY: tl.constexpr, BLOCK: tl.constexpr):
    """From a start to the next. Grid: starts, columns."""
    row, steps = _walk(walks, n_starts, EVERY)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (column < n_columns) & (steps > 0)
    moved = tl.load(saved + tl.program_id(0).to(tl.int64) * n_columns + column, mask=mask)
    place = tl.load(order + row)
    for _ in range(1, steps):
        there = matrix + place.to(tl.int64) * n_columns + column
        place = tl.load(order + place)
        moved = _exchange(there, moved, mask)
    tl.store(matrix + place.to(tl.int64) * n_columns + column, moved, mask=mask)
