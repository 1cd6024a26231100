"""Triton kernels: rotate, quantize and pack new keys and values; attend over the cache; merge what parts of it gave.

Codes stay in their planes: a plane's codes meet the part of the query that they belong to, and of the three bits the
lower two and the highest are summed apart. No number is put together from two bytes.
"""

import triton
import triton.language as tl

MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: see rmsnorm_quantize.kernel
EPS = tl.constexpr(1e-5)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def codes_and_step(x, levels, zero, most, SYMMETRIC: tl.constexpr):
    """Unsigned codes (float32, whole) of a row x in any shape, zeros outside of it, and its step."""
    top = tl.max(tl.max(tl.abs(x), 1), 0)
    finite = tl.sum(tl.sum(tl.abs(x), 1), 0) < INFINITY
    top = tl.maximum(top, EPS)
    # clipped first, so that neither product nor sum becomes one operation with the next
    v = tl.minimum(tl.maximum(x * (tl.div_rn(1.0, top) * levels), -zero), zero)
    if SYMMETRIC:
        u = ((v + MAGIC) - MAGIC) + zero
    else:
        u = ((v + zero) + MAGIC) - MAGIC
    u = tl.minimum(tl.maximum(u, 0.0), most)
    return tl.where(finite, u, 0.0), tl.where(finite, tl.div_rn(top, levels), float("nan"))


@triton.jit
def places_of(D, size, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Which numbers of a row planes of `size` bytes have, (COUNT, BLOCK), and whether there are such."""
    byte = tl.arange(0, BLOCK)[None, :]
    d = tl.arange(0, COUNT)[:, None] * size + byte
    return d, (byte < size) & (d < D)


@triton.jit
def rotated_row(x, cos, sin, angles, d, inside, D, ROTATE: tl.constexpr):
    """Numbers d of a row, behind the rotary embedding, float32; zeros outside."""
    mine = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    if ROTATE:
        half = D // 2
        late = d >= half
        other = tl.load(x + tl.where(late, d - half, d + half), mask=inside, other=0.0).to(tl.float32)
        angle = tl.where(late, d - half, d)
        c = tl.load(cos + angles + angle, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + angles + angle, mask=inside, other=0.0).to(tl.float32)
        mine = mine * c + tl.where(late, other, -other) * s
    return mine


@triton.jit
def pack_planes(
    x, cos, sin, angles, out, D, size, levels, zero, most, LOW: tl.constexpr, BITS: tl.constexpr, COUNT: tl.constexpr,
    BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Writes BITS bits from LOW on of the codes of a row, in COUNT planes; returns its step."""
    d, inside = places_of(D, size, COUNT, BLOCK)
    u, step = codes_and_step(rotated_row(x, cos, sin, angles, d, inside, D, ROTATE), levels, zero, most, SYMMETRIC)
    bits = tl.where(inside, (u.to(tl.int32) >> LOW) & ((1 << BITS) - 1), 0)
    byte = tl.sum(bits << (BITS * tl.arange(0, COUNT)[:, None]), 0)
    place = tl.arange(0, BLOCK)
    tl.store(out + place, byte.to(tl.uint8), mask=place < size)
    return step


@triton.jit
def append_kernel(
    k, v, cos, sin, k_data, v_data, k_steps, v_steps, k_first, v_first, lengths, T, heads, D: tl.constexpr, capacity,
    row_bytes: tl.constexpr, low_bytes: tl.constexpr, high_bytes: tl.constexpr, levels, zero, most, first_levels,
    first_zero, k_batch, k_token, k_head, v_batch, v_token, v_head, THREE: tl.constexpr, FIRST: tl.constexpr,
    SYMMETRIC: tl.constexpr, ROTATE: tl.constexpr, HALF: tl.constexpr, QUARTER: tl.constexpr, EIGHTH: tl.constexpr,
):  # fmt: skip
    """Program (new token, batch and head, 0 for the key or 1 for the value)."""
    t = tl.program_id(0)
    b, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    position = tl.load(lengths + b) + t
    angles = (b * T + t).to(tl.int64) * (D // 2)
    row = tl.program_id(1).to(tl.int64) * capacity + position
    if position < capacity:
        if tl.program_id(2) == 0:
            append_row(
                k + b.to(tl.int64) * k_batch + t.to(tl.int64) * k_token + head * k_head, cos, sin, angles,
                k_data + row * row_bytes, k_steps + row, k_first, D, low_bytes, high_bytes, levels, zero, most,
                first_levels, first_zero, position, THREE, FIRST, SYMMETRIC, ROTATE, HALF, QUARTER, EIGHTH,
            )  # fmt: skip
        else:
            append_row(
                v + b.to(tl.int64) * v_batch + t.to(tl.int64) * v_token + head * v_head, cos, sin, angles,
                v_data + row * row_bytes, v_steps + row, v_first, D, low_bytes, high_bytes, levels, zero, most,
                first_levels, first_zero, position, THREE, FIRST, SYMMETRIC, False, HALF, QUARTER, EIGHTH,
            )  # fmt: skip


@triton.jit
def append_row(
    x, cos, sin, angles, data, step_at, first, D, low_bytes, high_bytes, levels, zero, most, first_levels, first_zero,
    position, THREE: tl.constexpr, FIRST: tl.constexpr, SYMMETRIC: tl.constexpr, ROTATE: tl.constexpr,
    HALF: tl.constexpr, QUARTER: tl.constexpr, EIGHTH: tl.constexpr,
):  # fmt: skip
    """One row of keys or values."""
    if THREE:
        step = pack_planes(
            x, cos, sin, angles, data, D, low_bytes, levels, zero, most, 0, 2, 4, QUARTER, SYMMETRIC, ROTATE
        )  # fmt: skip
        pack_planes(
            x, cos, sin, angles, data + low_bytes, D, high_bytes, levels, zero, most, 2, 1, 8, EIGHTH, SYMMETRIC, ROTATE
        )
        if FIRST:  # noqa: SIM102 - this is known when it is compiled, the other when it runs
            if position == 0:
                row = first + tl.program_id(1).to(tl.int64) * (D // 2)
                step = pack_planes(
                    x, cos, sin, angles, row, D, D // 2, first_levels, first_zero, 15.0, 0, 4, 2, HALF, SYMMETRIC,
                    ROTATE,
                )  # fmt: skip
    else:
        step = pack_planes(
            x, cos, sin, angles, data, D, low_bytes, levels, zero, most, 0, 4, 2, HALF, SYMMETRIC, ROTATE
        )
    tl.store(step_at, step.to(step_at.dtype.element_ty))


@triton.jit
def query(q, d, inside, levels, zero, most, QUANTIZE: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Numbers d of the query as float32, in its planes; QUANTIZE: rounded to the values of its codes."""
    x = tl.load(q + d, mask=inside, other=0.0).to(tl.float32)
    if QUANTIZE:
        u, step = codes_and_step(x, levels, zero, most, SYMMETRIC)
        x = tl.where(inside, (u - zero) * step, 0.0)
    return x


@triton.jit
def load_planes(data, rows, there, size, BLOCK: tl.constexpr):
    """Bytes of some rows, (rows, BLOCK); data points to the planes of the first row."""
    byte = tl.arange(0, BLOCK)
    return tl.load(data + rows[:, None] + byte[None, :], mask=there[:, None] & (byte < size)[None, :], other=0)


@triton.jit
def plane_codes(packed, BITS: tl.constexpr, COUNT: tl.constexpr):
    """Codes of bytes as float32 (rows, COUNT, BLOCK)."""
    shift = BITS * tl.arange(0, COUNT)
    return ((packed.to(tl.int32)[:, None, :] >> shift[None, :, None]) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def decode_kernel(
    q, k_data, v_data, k_steps, v_steps, lengths, out, stats, heads, shared_by, D: tl.constexpr, capacity,
    row_bytes: tl.constexpr, low_bytes: tl.constexpr, high_bytes: tl.constexpr, zero, scale, q_levels, q_zero, splits,
    THREE: tl.constexpr, FIRST: tl.constexpr, QUANTIZE: tl.constexpr, SYMMETRIC: tl.constexpr, TOKENS: tl.constexpr,
    COUNT: tl.constexpr, BITS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Program (batch and query head, split). Writes, of its positions, the weighted codes of v, unnormalized, to `out`
    (program, 1 or 2 groups of planes, D), and the largest score, the sum of weights and that of weights times steps to
    `stats` (program, 3).

    scale: of the scores, times log2 e. FIRST: position 0 is left to `merge_kernel`.
    """
    b, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    kv = (b * (heads // shared_by) + head // shared_by).to(tl.int64) * capacity
    length = tl.load(lengths + b)
    share = tl.cdiv(tl.cdiv(length, splits), TOKENS) * TOKENS
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, length)
    row = q + tl.program_id(0).to(tl.int64) * D
    d, inside = places_of(D, low_bytes, COUNT, LOW)
    x = query(row, d, inside, q_levels, q_zero, 15.0, QUANTIZE, SYMMETRIC)
    total = tl.sum(tl.sum(x, 1), 0)
    acc = tl.zeros([COUNT, LOW], dtype=tl.float32)
    if THREE:
        d_high, inside_high = places_of(D, high_bytes, 8, HIGH)
        x_high = query(row, d_high, inside_high, q_levels, q_zero, 15.0, QUANTIZE, SYMMETRIC) * 4.0
        acc_high = tl.zeros([8, HIGH], dtype=tl.float32)
    top = -INFINITY
    weight = 0.0
    stepped = 0.0
    for start in tl.range(begin, end, TOKENS, num_stages=2):
        position = start + tl.arange(0, TOKENS)
        there = position < end
        if FIRST:
            there = there & (position > 0)
        rows = (kv + position) * row_bytes
        keys = load_planes(k_data, rows, there, low_bytes, LOW)
        values = load_planes(v_data, rows, there, low_bytes, LOW)
        step = tl.load(k_steps + kv + position, mask=there, other=0.0).to(tl.float32)
        v_step = tl.load(v_steps + kv + position, mask=there, other=0.0).to(tl.float32)
        score = tl.sum(tl.sum(plane_codes(keys, BITS, COUNT) * x[None, :, :], 2), 1)
        if THREE:
            keys = load_planes(k_data + low_bytes, rows, there, high_bytes, HIGH)
            values_high = load_planes(v_data + low_bytes, rows, there, high_bytes, HIGH)
            score += tl.sum(tl.sum(plane_codes(keys, 1, 8) * x_high[None, :, :], 2), 1)
        score = tl.where(there, scale * step * (score - zero * total), -INFINITY)
        highest = tl.maximum(top, tl.max(score, 0))
        # nothing seen yet is -inf, and -inf less itself no number
        base = tl.where(highest == -INFINITY, 0.0, highest)
        p = tl.exp2(score - base)
        rescale = tl.exp2(top - base)
        top = highest
        ps = p * v_step
        weight = weight * rescale + tl.sum(p, 0)
        stepped = stepped * rescale + tl.sum(ps, 0)
        acc = acc * rescale + tl.sum(plane_codes(values, BITS, COUNT) * ps[:, None, None], 0)
        if THREE:
            acc_high = acc_high * rescale + tl.sum(plane_codes(values_high, 1, 8) * ps[:, None, None], 0)
    program = tl.program_id(0).to(tl.int64) * splits + tl.program_id(1)
    groups: tl.constexpr = 2 if THREE else 1
    tl.store(out + program * groups * D + d, acc, mask=inside)
    if THREE:
        tl.store(out + (program * 2 + 1) * D + d_high, acc_high, mask=inside_high)
    tl.store(stats + program * 3, top)
    tl.store(stats + program * 3 + 1, weight)
    tl.store(stats + program * 3 + 2, stepped)


@triton.jit
def first_row(data, step, D, zero, BLOCK: tl.constexpr):
    """A row of 4 bits in its natural order, (1, BLOCK) float32."""
    d = tl.arange(0, BLOCK)[None, :]
    half = D // 2
    byte = tl.load(data + d % half, mask=d < D, other=0).to(tl.int32)
    return tl.where(d < D, (((byte >> (4 * (d // half))) & 15).to(tl.float32) - zero) * step, 0.0)


@triton.jit
def merge_kernel(
    q, k_first, v_first, k_steps, v_steps, lengths, parts, stats, out, heads, shared_by, D: tl.constexpr, capacity,
    zero, first_zero, scale, q_levels, q_zero, splits,
    THREE: tl.constexpr, FIRST: tl.constexpr, QUANTIZE: tl.constexpr, SYMMETRIC: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (batch and query head): the parts of `decode_kernel`, and position 0 where it lies apart, as one."""
    b, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    kv = (b * (heads // shared_by) + head // shared_by).to(tl.int64)
    split = tl.arange(0, SPLITS)
    part = tl.program_id(0).to(tl.int64) * splits + split
    top = tl.load(stats + part * 3, mask=split < splits, other=-INFINITY)
    weight = tl.load(stats + part * 3 + 1, mask=split < splits, other=0.0)
    stepped = tl.load(stats + part * 3 + 2, mask=split < splits, other=0.0)
    highest = tl.max(top, 0)
    d = tl.arange(0, BLOCK)
    if FIRST:
        seen = tl.load(lengths + b) > 0
        x = query(
            q + tl.program_id(0).to(tl.int64) * D, d[None, :], (d < D)[None, :], q_levels, q_zero, 15.0, QUANTIZE,
            SYMMETRIC,
        )  # fmt: skip
        step = tl.load(k_steps + kv * capacity).to(tl.float32)
        key = first_row(k_first + kv * (D // 2), step, D, first_zero, BLOCK)
        score = tl.where(seen, scale * tl.sum(tl.sum(x * key, 1), 0), -INFINITY)
        highest = tl.maximum(highest, score)
    base = tl.where(highest == -INFINITY, 0.0, highest)
    p = tl.exp2(top - base)
    groups: tl.constexpr = 2 if THREE else 1
    at = parts + (part * groups * D)[:, None] + d[None, :]
    inside = (split < splits)[:, None] & (d < D)[None, :]
    total = tl.load(at, mask=inside, other=0.0)
    if THREE:
        total += 4.0 * tl.load(at + D, mask=inside, other=0.0)
    value = tl.sum(total * p[:, None], 0) - zero * tl.sum(stepped * p, 0)
    whole = tl.sum(weight * p, 0)
    if FIRST:
        own = tl.exp2(score - base)
        step = tl.load(v_steps + kv * capacity).to(tl.float32)
        first = first_row(v_first + kv * (D // 2), step, D, first_zero, BLOCK)
        value += tl.where(seen, own * tl.sum(first, 0), 0.0)
        whole += own
    value = value / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + tl.program_id(0).to(tl.int64) * D + d, value.to(out.dtype.element_ty), mask=d < D)
