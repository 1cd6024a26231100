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
    """Move row i of the matrix to row order[i], in place, some columns at a time: as many as fit in `free`, a vector of
    its dtype, or, if that is fewer launches, in `room` bytes beside it. If neither holds a column, 8 bytes a row are
    taken."""
    rows, columns = matrix.shape
    widest = lambda elements: min(64, 1 << max(elements, 1).bit_length() - 1)  # noqa: E731
    column = rows * matrix.element_size()
    if free.numel() < rows and room < column:
        room = 8 * rows
    width, own_width = widest(free.numel() // rows), widest(room // column)
    parts = [free]
    own_parts = 1 + (free.numel() >= rows * own_width)
    if room >= column and (free.numel() < rows or own_parts * own_width > width):
        width = own_width
        own = torch.empty(rows * width, dtype=matrix.dtype, device=matrix.device)
        parts = [own, free][:own_parts]
    arguments = matrix, parts[0], parts[-1], order, rows, columns, WAVE
    out, back = (
        Repeated(
            copy_columns_kernel, triton.cdiv(rows, 256), *arguments, WIDTH=width, PARTS=len(parts), BACK=b, BLOCK=256
        )
        for b in (False, True)
    )
    for piece in range(triton.cdiv(columns, width * len(parts))):
        out(piece)
        back(piece)


@triton.jit
def _places(matrix, part, row, matrix_row, column, n_rows, n_columns, WIDTH: tl.constexpr):
    """Where WIDTH columns of some rows are in the matrix and in a part, and which of them there are."""
    c = column + tl.arange(0, WIDTH)
    mask = (row < n_rows)[:, None] & (c < n_columns)[None, :]
    outside = matrix + matrix_row.to(tl.int64)[:, None] * n_columns + c[None, :]
    return outside, part + row.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], mask


@triton.jit(do_not_specialize=["piece"])
def copy_columns_kernel(
    matrix, first_part, second_part, order, n_rows, n_columns, piece,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A piece of the matrix, WIDTH columns a part, into one part or two; BACK: from them, row i at row order[i]."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    matrix_row = row
    if BACK:
        matrix_row = tl.load(order + row, mask=row < n_rows, other=0)
    column = piece * PARTS * WIDTH
    outside, inside, mask = _places(matrix, first_part, row, matrix_row, column, n_rows, n_columns, WIDTH)
    more_outside, more_inside, more_mask = _places(
        matrix, second_part, row, matrix_row, column + WIDTH, n_rows, n_columns, WIDTH
    )
    # all loads before the first store, which they would wait for
    first = tl.load(inside if BACK else outside, mask=mask)
    if PARTS == 2:
        second = tl.load(more_inside if BACK else more_outside, mask=more_mask)
        tl.store(more_outside if BACK else more_inside, second, mask=more_mask)
    tl.store(outside if BACK else inside, first, mask=mask)
