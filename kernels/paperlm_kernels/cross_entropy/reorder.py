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


def unsort_rows(matrix: torch.Tensor, order: torch.Tensor, room: int, free: torch.Tensor) -> None:
    """Move row i of the matrix to row order[i], in place, up to 64 columns at a time: in `free`, a vector of its dtype,
    or where `room` bytes, at least 8 a row, hold more columns, in so many."""
    rows, columns = matrix.shape
    widest = lambda elements: min(64, 1 << max(elements, 1).bit_length() - 1)  # noqa: E731
    width = widest(max(8, room // max(rows, 1)) // matrix.element_size())
    if free.numel() >= rows * width:
        part, width = free, widest(free.numel() // max(rows, 1))
    else:
        part = torch.empty(rows, width, dtype=matrix.dtype, device=matrix.device)
    arguments = matrix, part, order, rows, columns, WAVE
    out, back = (
        Repeated(copy_columns_kernel, triton.cdiv(rows, 256), *arguments, WIDTH=width, BACK=b, BLOCK=256)
        for b in (False, True)
    )
    for piece in range(triton.cdiv(columns, width)):
        out(piece)
        back(piece)


@triton.jit(do_not_specialize=["piece"])
def copy_columns_kernel(
    matrix, part, order, rows, columns, piece, WIDTH: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr
):
    """part = a piece of WIDTH columns of the matrix; BACK: those columns, row i of the part at row order[i]."""
    start = piece * WIDTH
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    mask = (row < rows)[:, None] & (start + column < columns)[None, :]
    inside = part + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    if BACK:
        target = tl.load(order + row, mask=row < rows, other=0)
        tl.store(
            matrix + target.to(tl.int64)[:, None] * columns + start + column[None, :],
            tl.load(inside, mask=mask),
            mask=mask,
        )
    else:
        tl.store(
            inside,
            tl.load(matrix + row.to(tl.int64)[:, None] * columns + start + column[None, :], mask=mask),
            mask=mask,
        )
