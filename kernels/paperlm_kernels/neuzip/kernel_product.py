"""A Triton kernel that multiplies a few tokens with a matrix whose exponents are in four bits, without unpacking it."""

import triton
import triton.language as tl

from paperlm_kernels.neuzip.kernel_decode import bfloat16_of, sign_and_mantissa


@triton.jit
def float_of(pattern):
    """float32 of bfloat16 patterns (the lowest 16 bits of int32)."""
    return (pattern << 16).to(tl.float32, bitcast=True)


@triton.jit
def fix4_product_kernel(
    x, payload, plane, plane8, patches, patch_directory, y, tokens, rows, columns, lowest,
    M: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, PATCHES: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of all tokens a program. x int64 (tokens, columns / 4), four bfloat16 each; y int16 (tokens, rows);
    payload int32 and plane int64 of an octet each. Weights that are patched are 0 in the long sum, and added after."""
    m = tl.arange(0, M)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    octets = columns // 8
    total = tl.zeros([M, ROWS, STEP], dtype=tl.float32)
    for start in range(0, octets, STEP):
        k = start + tl.arange(0, STEP)
        inside = (row < rows)[:, None] & (k < octets)[None, :]
        place = row.to(tl.int64)[:, None] * octets + k[None, :]
        codes = tl.load(payload + place, mask=inside, other=0)
        items = tl.load(plane + place, mask=inside, other=0)
        there = (m < tokens)[:, None] & (k < octets)[None, :]
        where = m[:, None] * (2 * octets) + 2 * k[None, :]
        for half in tl.static_range(2):
            four = tl.load(x + where + half, mask=there, other=0)
            sm = (items >> (32 * half)).to(tl.int32)
            for j in tl.static_range(4):
                code = (codes >> (16 * half + 4 * j)) & 15
                pattern = sign_and_mantissa(sm, j, 7) | ((code + lowest - 1) & 255) << 7
                weight = tl.where(code != 0, float_of(pattern), 0.0)
                value = float_of((four >> (16 * j)).to(tl.int32))
                total += value[:, None, :] * weight[None, :, :]
    out = tl.sum(total, 2)
    # patches are in order: those of some blocks, in which these rows lie
    first = tl.program_id(0).to(tl.int64) * ROWS * columns
    last = tl.minimum(first + ROWS * columns, rows.to(tl.int64) * columns) - 1
    for block in range((first // BLOCK).to(tl.int32), (last // BLOCK).to(tl.int32) + 1):
        end = tl.load(patch_directory + block + 1)
        for i in range(tl.load(patch_directory + block), end, PATCHES):
            index = i + tl.arange(0, PATCHES)
            patch = tl.load(patches + index, mask=index < end, other=0)
            place = tl.cast(block, tl.int64) * BLOCK + (patch & 0xFFFFFF)
            mine = (index < end) & (place >= first) & (place <= last)
            item = tl.load(plane8 + place, mask=mine, other=0).to(tl.int32)
            weight = float_of(sign_and_mantissa(item, 0, 7) | ((patch >> 24) & 0xFF) << 7)
            column = place % columns
            four = tl.load(
                x + m[:, None] * (2 * octets) + (column >> 2)[None, :],
                mask=(m < tokens)[:, None] & mine[None, :], other=0,
            )  # fmt: skip
            value = float_of((four >> (16 * (column & 3))[None, :]).to(tl.int32))
            share = tl.where(mine[None, :], value * weight[None, :], 0.0)
            at = (place // columns).to(tl.int32)
            out += tl.sum(tl.where((at[None, :] == row[:, None])[None, :, :], share[:, None, :], 0.0), 2)
    there = (m < tokens)[:, None] & (row < rows)[None, :]
    tl.store(y + m[:, None] * rows + row[None, :], bfloat16_of(out).to(tl.int16), mask=there)
