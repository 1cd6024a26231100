"""The decode kernel of three bits whose planes are no whole words, in heads of 100 for one.

A byte has the low bits of four numbers or the highest of eight, so that a product with a row is one with each kind of
byte: no number is put together.
"""

import triton
import triton.language as tl

from paperlm_kernels.kv_attention.kernel import (
    INFINITY,
    bytes_as_floats,
    digits_of,
    fetch_share,
    products,
    query,
    share_of_program,
    softmax_step,
)
from paperlm_kernels.overlap import gdc_launch_dependents, gdc_wait


@triton.jit
def words_of_bytes(at, rows, there, size, WORDS: tl.constexpr):
    """`size` bytes of rows, which begin anywhere, as (rows, WORDS); zeros behind them."""
    byte = 4 * tl.arange(0, WORDS)
    places, word = at + rows[:, None] + byte[None, :], tl.zeros([rows.shape[0], WORDS], dtype=tl.int32)
    for i in tl.static_range(4):
        here = tl.load(places + i, mask=there[:, None] & (byte + i < size)[None, :], other=0)
        word |= here.to(tl.int32) << (8 * i)
    return word


@triton.jit
def codes_of_rows(at, rows, there, D: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Low bits, (rows, LOW, 4), and highest bits, (rows, HIGH, 8), of rows, four in the bytes of a word."""
    low = words_of_bytes(at, rows, there, D // 4, LOW)
    high = words_of_bytes(at + D // 4, rows, there, (D + 7) // 8, HIGH)
    low = tl.join(tl.join(low, low >> 4), tl.join(low >> 2, low >> 6))
    evens = tl.join(tl.join(high, high >> 4), tl.join(high >> 2, high >> 6))
    high = tl.join(evens, evens >> 1)
    low = tl.reshape(low, [rows.shape[0], LOW, 4]) & 0x03030303
    return low, tl.reshape(high, [rows.shape[0], HIGH, 8]) & 0x01010101


@triton.jit
def numbers_of(D: tl.constexpr, size: tl.constexpr, COUNT: tl.constexpr, WORDS: tl.constexpr):
    """Which numbers of a row COUNT planes of `size` bytes have, (WORDS, COUNT, 4), and whether there are such."""
    byte = 4 * tl.arange(0, WORDS)[:, None, None] + tl.arange(0, 4)[None, None, :]
    d = size * tl.arange(0, COUNT)[None, :, None] + byte
    return d, (byte < size) & (d < D)


@triton.jit(do_not_specialize=["splits"])
def decode_bytes_kernel(
    q, k_data, v_data, k_steps, v_steps, lengths, out, stats, heads, shared_by, D: tl.constexpr, capacity,
    row: tl.constexpr, zero, scale, q_levels, q_zero, splits, FIRST: tl.constexpr, QUANTIZE: tl.constexpr,
    SYMMETRIC: tl.constexpr, TOKENS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `kernel.decode_kernel`, but that the weighted v has two terms (program, 2, D): of the low bits and of the
    highest. LOW, HIGH: powers of two of words that hold the bytes of either."""
    b, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    kv = (b * (heads // shared_by) + head // shared_by).to(tl.int64) * capacity
    if PDL:
        fetch_share(k_data, v_data, lengths, b, head, shared_by, kv, capacity, row, splits, TOKENS)
        gdc_wait()
        gdc_launch_dependents()
    length = tl.minimum(tl.load(lengths + b), capacity)  # `append` does not look whether there was room
    begin, end = share_of_program(length, splits, TOKENS)
    mine = q + tl.program_id(0).to(tl.int64) * D
    d_low, in_low = numbers_of(D, D // 4, 4, LOW)
    d_high, in_high = numbers_of(D, (D + 7) // 8, 8, HIGH)
    x = query(mine, d_low, in_low, q_levels, q_zero, 15.0, QUANTIZE, SYMMETRIC)
    total = tl.sum(x)
    low_a, low_b, low_c, low_unit = digits_of(x)
    x = query(mine, d_high, in_high, q_levels, q_zero, 15.0, QUANTIZE, SYMMETRIC)
    high_a, high_b, high_c, high_unit = digits_of(4.0 * x)
    low = tl.zeros([TOKENS, LOW, 4, 4], dtype=tl.float32)
    high = tl.zeros([TOKENS, HIGH, 8, 4], dtype=tl.float32)
    top = tl.full([TOKENS], -INFINITY, dtype=tl.float32)
    weight = tl.zeros([TOKENS], dtype=tl.float32)
    for start in tl.range(begin, end, TOKENS, num_stages=STAGES):
        position = start + tl.arange(0, TOKENS)
        there = position < end
        if FIRST:
            there = there & (position > 0)
        rows = (kv + position) * row
        step = tl.load(k_steps + kv + position, mask=there, other=0.0).to(tl.float32)
        v_step = tl.load(v_steps + kv + position, mask=there, other=0.0).to(tl.float32)
        k_low, k_high = codes_of_rows(k_data, rows, there, D, LOW, HIGH)
        v_low, v_high = codes_of_rows(v_data, rows, there, D, LOW, HIGH)
        score = products(k_low, low_a, low_b, low_c, low_unit, ASM)
        score += products(k_high, high_a, high_b, high_c, high_unit, ASM)
        score = tl.where(there, scale * step * (score - zero * total), -INFINITY)
        p, rescale, top, weight = softmax_step(top, weight, score)
        p, rescale = (p * v_step)[:, None, None, None], rescale[:, None, None, None]
        low = low * rescale + (bytes_as_floats(v_low, ASM) - (128.0 + zero)) * p
        high = high * rescale + (bytes_as_floats(v_high, ASM) - 128.0) * p
    highest = tl.max(top, 0)
    share_of = tl.exp2(top - tl.where(highest == -INFINITY, 0.0, highest))
    every = share_of[:, None, None, None]
    program = tl.program_id(0).to(tl.int64) * splits + tl.program_id(1)
    part = out + program * (2 * D)
    tl.store(part + d_low, tl.sum(low * every, 0), mask=in_low)
    tl.store(part + D + d_high, 4.0 * tl.sum(high * every, 0), mask=in_high)
    tl.store(stats + program * 2, highest)
    tl.store(stats + program * 2 + 1, tl.sum(weight * share_of, 0))
