"""Many tokens: tiles of codes through the matrix units, int8 x int8 into int32."""

import triton
import triton.language as tl

from paperlm_kernels.ternary_linear.tiles import finish, plane_of_bytes, row_of, scales_of


@triton.jit(do_not_specialize=["M", "splits", "n_tiles", "m_tiles"])
def gemm_kernel(
    x, weight, scale, rowsum, alpha, y, work, arrived, M, N, width, splits, n_tiles, m_tiles,
    BM: tl.constexpr, BN: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, DENSE: tl.constexpr, GATED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """y (M, N) of x int8 (M, 4 * width) and packed weights (rows padded to 128, width bytes).

    A step takes BYTES bytes of a row, a whole number of chunks of 32; plane s of them meets the activations that lie
    128 apart in runs of 32. SWAP: weights are the left operand, which the matrix units read from registers, where they
    are unpacked; else they go through shared memory. DENSE: weight is int8 (rows, 4 * width), for comparison. GATED: y
    is (M, N / 2), up * relu(gate)^2 of weights whose first half of rows is the gate's.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    # GROUP tiles of tokens go through all weights together, which then stay in L2
    group = tile // (GROUP * n_tiles)
    high = tl.minimum(m_tiles - group * GROUP, GROUP)
    rest = tile - group * GROUP * n_tiles
    m = (group * GROUP + rest % high) * BM + tl.arange(0, BM)
    n = (rest // high) * BN + tl.arange(0, BN)
    place = tl.arange(0, BYTES)
    column = (place // 32) * 128 + place % 32
    x_rows = x + tl.minimum(m, M - 1).to(tl.int64)[:, None] * (4 * width) + column[None, :]
    factor: tl.constexpr = 4 if DENSE else 1
    # rows are padded to 128, but a tile may have more
    w_rows = weight + row_of(tl.minimum(n, N - 1), N, GATED).to(tl.int64)[:, None] * (factor * width)
    w_rows += (column if DENSE else place)[None, :]
    if BM <= 32:  # of more, they would take registers from the sums
        times, less, alphas = scales_of(m[:, None], n[None, :], scale, rowsum, alpha, M, N, GATED)
    if SWAP:
        acc = tl.zeros([BN, BM], dtype=tl.int32)
    else:
        acc = tl.zeros([BM, BN], dtype=tl.int32)
    steps = tl.cdiv(width, BYTES)
    share = tl.cdiv(steps, splits)
    for step in range(split * share, tl.minimum((split + 1) * share, steps)):
        start = step * BYTES
        there = (start + place < width)[None, :]
        if not DENSE:
            packed = tl.load(w_rows + start, mask=there, other=0)
        for s in tl.static_range(4):
            if DENSE:
                codes = tl.load(w_rows + (4 * start + 32 * s), mask=there, other=0)
            else:
                codes = plane_of_bytes(packed, s, ASM)
            values = tl.load(x_rows + (4 * start + 32 * s), mask=there, other=0)
            if SWAP:
                acc = tl.dot(codes, tl.trans(values), acc, out_dtype=tl.int32)
            else:
                acc = tl.dot(values, tl.trans(codes), acc, out_dtype=tl.int32)
    if SWAP:
        acc = tl.trans(acc)
    if BM > 32:
        times, less, alphas = scales_of(m[:, None], n[None, :], scale, rowsum, alpha, M, N, GATED)
    inside = (m < M)[:, None] & (n < N)[None, :]
    finish(acc, m[:, None], n[None, :], inside, tile, splits, times, less, alphas, y, work, arrived, N, SPLIT, GATED)
