"""Moves the rows of the weight gradient from an order of the vocabulary back to their places, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def unsort_rows(matrix: torch.Tensor, order: torch.Tensor, room: int) -> None:
    """Move row i of the matrix to row order[i], in place, a few columns at a time: `room` bytes, at least 8 a row."""
    rows, columns = matrix.shape
    width = max(8, room // max(rows, 1)) // matrix.element_size()
    width = min(64, 1 << (width.bit_length() - 1))
    part = torch.empty(rows, width, dtype=matrix.dtype, device=matrix.device)
    grid = (triton.cdiv(rows, 256),)
    for start in range(0, columns, width):
        copy_columns_kernel[grid](matrix, part, order, rows, columns, start, WIDTH=width, BACK=False, BLOCK=256)
        copy_columns_kernel[grid](matrix, part, order, rows, columns, start, WIDTH=width, BACK=True, BLOCK=256)


@triton.jit
def copy_columns_kernel(
    matrix, part, order, rows, columns, start, WIDTH: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr
):
    """part = columns [start, start + WIDTH) of the matrix; BACK: those columns, row i of the part at row order[i]."""
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
