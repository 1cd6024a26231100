"""Few tokens: rows of packed words against words of activations, four products an instruction."""

import triton
import triton.language as tl

from paperlm_kernels.overlap import fetch, gdc_launch_dependents, gdc_wait
from paperlm_kernels.ternary_linear.tiles import add_dot_of_four, finish, row_of, scales_of


@triton.jit(do_not_specialize=["M", "splits", "listed", "chunks"])
def gemv_kernel(
    x, weight, scale, rowsum, alpha, y, work, arrived, places, counts, M, N, chunks, splits, listed,
    BM: tl.constexpr, BN: tl.constexpr, WORDS: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
    GATHER: tl.constexpr, GATED: tl.constexpr, ASM: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y (M, N) of x and packed weights read as int32: (M, 4 * width) and (rows padded to 128, width) words, where a
    row has width = 8 * chunks words. That factor is written here for the compiler, which reads 16 bytes at a time only
    where it knows a row to begin at a multiple of them: 3200 columns are 200 words, no multiple of 16.

    Word w of a row holds, in plane s, the codes of the four activations in word 32 (w // 8) + 8 s + w % 8. Codes of
    odd planes are multiplied where they stand, four times as large, into a sum of their own: that spares their shift.

    GATHER: of token `program_id(2)` only the rows in its list (places, counts) are computed, y is zeros elsewhere.
    GATED: as in gemm_kernel. PDL: it is started before the kernel in front of it has ended, and waits for that here.
    AHEAD: lets the next kernel in and asks for its weights before it waits.
    """
    width = 8 * chunks
    block = tl.program_id(0)
    split = tl.program_id(1)
    if PDL and AHEAD:
        gdc_launch_dependents()
        # programs that share rows ask for a part of them each
        size = tl.cdiv(BN * 4 * width // (2 if GATED else 1), splits)
        begin = weight.to(tl.int64) + (block * BN // (2 if GATED else 1)).to(tl.int64) * (4 * width) + split * size
        fetch(begin, size)
        if GATED:
            fetch(begin + (N // 2).to(tl.int64) * (4 * width), size)
        gdc_wait()
    elif PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(2) + tl.arange(0, BM)
    n = block * BN + tl.arange(0, BN)
    if GATHER:
        asked = n < tl.load(counts + tl.program_id(2))
        n = tl.load(places + tl.program_id(2).to(tl.int64) * listed + n, mask=asked, other=0)
    else:
        asked = n < N
    word = tl.arange(0, WORDS)
    times, less, alphas = scales_of(token[:, None], n[None, :], scale, rowsum, alpha, M, N, GATED)
    even = tl.zeros([BM, BN, WORDS], dtype=tl.int32)
    odd = tl.zeros([BM, BN, WORDS], dtype=tl.int32)
    steps = tl.cdiv(width, WORDS)
    share = tl.cdiv(steps, splits)
    for step in tl.range(split * share, tl.minimum((split + 1) * share, steps), num_stages=STAGES):
        w = step * WORDS + word
        at = weight + row_of(n, N, GATED).to(tl.int64)[:, None] * width + w[None, :]
        packed = tl.load(at, mask=asked[:, None] & (w < width)[None, :], other=0)[None, :, :]
        column = (w // 8) * 32 + w % 8
        x_rows = x + token.to(tl.int64)[:, None] * (4 * width) + column[None, :]
        there = (token < M)[:, None] & (w < width)[None, :]
        for s in tl.static_range(4):
            values = tl.load(x_rows + 8 * s, mask=there, other=0)[:, None, :]
            if s % 2 == 0:
                even = add_dot_of_four(even, (packed >> (2 * s)) & 0x03030303, values, ASM)
            else:
                odd = add_dot_of_four(odd, (packed >> (2 * s - 2)) & 0x0C0C0C0C, values, ASM)
    inside = (token < M)[:, None] & asked[None, :]
    tile = tl.program_id(2) * tl.num_programs(0) + block
    finish(
        tl.sum(even + (odd >> 2), 2), token[:, None], n[None, :], inside, tile, splits, times, less, alphas, y, work,
        arrived, N, SPLIT, GATED,
    )  # fmt: skip


@triton.jit
def columns_kernel(
    x, weight, scale, rowsum, alpha, y, work, arrived, places, counts, N, width, splits, x_stride, listed,
    BYTES: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """y (M, N) of tokens with few codes that are not 0, from weights packed along N: (K padded to 128, width bytes).

    Only the rows of the listed k are read. Program (block, split, token): every `splits`-th ROWS of the list.
    """
    block = tl.program_id(0)
    split = tl.program_id(1)
    token = tl.program_id(2)
    place = block * BYTES + tl.arange(0, BYTES)
    count = tl.load(counts + token)
    shift = 2 * tl.arange(0, 4)
    n = (place // 32)[None, :] * 128 + 32 * tl.arange(0, 4)[:, None] + (place % 32)[None, :]
    times, less, alphas = scales_of(token, n, scale, rowsum, alpha, tl.num_programs(2), N, False)
    acc = tl.zeros([4, BYTES], dtype=tl.int32)
    for first in range(split * ROWS, count, splits * ROWS):
        index = first + tl.arange(0, ROWS)
        k = tl.load(places + token.to(tl.int64) * listed + index, mask=index < count, other=0)
        value = tl.load(x + token.to(tl.int64) * x_stride + k, mask=index < count, other=0).to(tl.int32)
        at = weight + k.to(tl.int64)[:, None] * width + place[None, :]
        packed = tl.load(at, mask=(index < count)[:, None] & (place < width)[None, :], other=0)
        codes = (packed.to(tl.int32)[:, None, :] >> shift[None, :, None]) & 3
        acc += tl.sum(codes * value[:, None, None], 0)
    tile = token * tl.num_programs(0) + block
    finish(acc, token, n, n < N, tile, splits, times, less, alphas, y, work, arrived, N, SPLIT, False)


@triton.jit
def places_kernel(gate, places, counts, N, stride, BLOCK: tl.constexpr):
    """Where row `program_id(0)` of gate is above 0, ascending, and how often."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(gate + row * stride + column, mask=column < N, other=0.0)
    above = value.to(tl.float32) > 0.0
    # the count is the last sum, for with a second one Triton 3.6 needs more registers than 32 warps have
    so_far = tl.cumsum(above.to(tl.int32), 0)
    tl.store(counts + row, tl.max(so_far, 0))
    tl.store(places + row * N + so_far - 1, column, mask=above)
