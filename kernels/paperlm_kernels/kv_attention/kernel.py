"""Triton kernels: rotate, quantize and pack new keys and values; attend over the cache; merge what parts of it gave.

Attention takes four codes of a plane at once, as the bytes of a word. Keys are multiplied as integers, with the query
in three digits of seven bits; values become floats without a conversion. Three bits whose planes are no whole words are
`kernel_bytes`'s.
"""

import triton
import triton.language as tl

from paperlm_kernels.overlap import fetch, gdc_launch_dependents, gdc_wait
from paperlm_kernels.ternary_linear.tiles import add_dot_of_four

MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: see rmsnorm_quantize.kernel
EPS = tl.constexpr(1e-5)
INFINITY = tl.constexpr(float("inf"))
FOUR_FLOATS = tl.constexpr(
    "prmt.b32 $0, $4, 0x43000000, 0x7044; prmt.b32 $1, $4, 0x43000000, 0x7144; "
    "prmt.b32 $2, $4, 0x43000000, 0x7244; prmt.b32 $3, $4, 0x43000000, 0x7344;"
)


@triton.jit
def codes_and_step(x, levels, zero, most, SYMMETRIC: tl.constexpr):
    """Unsigned codes (float32, whole) of a row x in any shape, zeros outside of it, and its step."""
    top = tl.max(tl.abs(x))
    finite = tl.sum(tl.abs(x)) < INFINITY
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
    k, v, q, turned, cos, sin, k_data, v_data, k_steps, v_steps, k_first, v_first, lengths, T, heads, D: tl.constexpr,
    capacity, row_bytes: tl.constexpr, low_bytes: tl.constexpr, high_bytes: tl.constexpr, levels, zero, most,
    first_levels, first_zero, k_batch, k_token, k_head, v_batch, v_token, v_head, q_batch, q_token, q_head,
    THREE: tl.constexpr, FIRST: tl.constexpr, SYMMETRIC: tl.constexpr, ROTATE: tl.constexpr, HALF: tl.constexpr,
    QUARTER: tl.constexpr, EIGHTH: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (new token, batch and head, part): part 0 is the key, 1 the value, the next ones are the GROUPS queries
    that attend to the head, which are turned by the same angles into `turned` (B, T, query heads, D)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0)
    b, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    position = tl.load(lengths + b) + t
    angles = (b * T + t).to(tl.int64) * (D // 2)
    row = tl.program_id(1).to(tl.int64) * capacity + position
    part = tl.program_id(2)
    if GROUPS:  # noqa: SIM102 - this is known when it is compiled, the other when it runs
        if part >= 2:
            d = tl.arange(0, 2 * HALF)
            at = head * GROUPS + part - 2
            source = q + b.to(tl.int64) * q_batch + t.to(tl.int64) * q_token + at * q_head
            value = rotated_row(source, cos, sin, angles, d, d < D, D, ROTATE)
            out = turned + (((b * T + t).to(tl.int64) * heads * GROUPS) + at) * D
            tl.store(out + d, value.to(turned.dtype.element_ty), mask=d < D)
    if position < capacity:
        if part == 0:
            append_row(
                k + b.to(tl.int64) * k_batch + t.to(tl.int64) * k_token + head * k_head, cos, sin, angles,
                k_data + row * row_bytes, k_steps + row, k_first, D, low_bytes, high_bytes, levels, zero, most,
                first_levels, first_zero, position, THREE, FIRST, SYMMETRIC, ROTATE, HALF, QUARTER, EIGHTH,
            )  # fmt: skip
        elif part == 1:
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
    """Numbers d of the query as float32, in the shape of d; QUANTIZE: rounded to the values of its codes."""
    x = tl.load(q + d, mask=inside, other=0.0).to(tl.float32)
    if QUANTIZE:
        u, step = codes_and_step(x, levels, zero, most, SYMMETRIC)
        x = tl.where(inside, (u - zero) * step, 0.0)
    return x


@triton.jit
def digit_words(x):
    """Whole numbers from -127 to 127, four in the bytes of a word: (.., .., 4) -> (.., ..)."""
    return tl.sum((x.to(tl.int32) & 255) << (8 * tl.arange(0, 4))[None, None, :], 2)


@triton.jit
def digits_of(x):
    """x (BLOCK, planes, 4) as unit * (a + b / 254 + c / 254^2): words of a, b and c, (1, BLOCK, planes), and unit."""
    unit = tl.maximum(tl.max(tl.abs(x)), 1e-30) / 127.0
    x = x / unit
    a = (x + MAGIC) - MAGIC
    x = (x - a) * 254.0
    b = (x + MAGIC) - MAGIC
    x = (x - b) * 254.0
    c = (x + MAGIC) - MAGIC
    return digit_words(a)[None], digit_words(b)[None], digit_words(c)[None], unit


@triton.jit
def codes_in_words(data, rows, there, D: tl.constexpr, THREE: tl.constexpr, HALVES: tl.constexpr, WORDS: tl.constexpr):
    """The codes of rows, four in the bytes of a word: (rows, WORDS, planes). HALVES: rows begin at even bytes."""
    word = tl.arange(0, WORDS)
    if THREE:
        # planes 2s and 2s + 1 have their low bits at 2s, in two words, and their high bits side by side in a third
        size: tl.constexpr = D // 32
        at, mask = data + rows[:, None] + word[None, :], there[:, None] & (word < size)[None, :]
        even = tl.load(at, mask=mask, other=0)
        odd = tl.load(at + size, mask=mask, other=0)
        high = tl.load(at + 2 * size, mask=mask, other=0)
        p0 = (even & 0x03030303) | ((high << 2) & 0x04040404)
        p1 = (odd & 0x03030303) | ((high << 1) & 0x04040404)
        p2 = ((even >> 2) & 0x03030303) | (high & 0x04040404)
        p3 = ((odd >> 2) & 0x03030303) | ((high >> 1) & 0x04040404)
        p4 = ((even >> 4) & 0x03030303) | ((high >> 2) & 0x04040404)
        p5 = ((odd >> 4) & 0x03030303) | ((high >> 3) & 0x04040404)
        p6 = ((even >> 6) & 0x03030303) | ((high >> 4) & 0x04040404)
        p7 = ((odd >> 6) & 0x03030303) | ((high >> 5) & 0x04040404)
        evens = tl.join(tl.join(p0, p4), tl.join(p2, p6))
        odds = tl.join(tl.join(p1, p5), tl.join(p3, p7))
        return tl.reshape(tl.join(evens, odds), [even.shape[0], even.shape[1], 8])
    else:
        if HALVES:
            at, half = data + rows[:, None] + 2 * word[None, :], 2 * word
            packed = tl.load(at, mask=there[:, None] & (half < D // 4)[None, :], other=0).to(tl.int32) & 65535
            above = tl.load(at + 1, mask=there[:, None] & (half + 1 < D // 4)[None, :], other=0).to(tl.int32)
            packed |= above << 16
        else:
            packed = tl.load(
                data + rows[:, None] + word[None, :], mask=there[:, None] & (word < D // 8)[None, :], other=0
            )
        return tl.join(packed & 0x0F0F0F0F, (packed >> 4) & 0x0F0F0F0F)


@triton.jit
def bytes_as_floats(words, ASM: tl.constexpr):
    """128 + the bytes, below 16, of words (.., .., ..), as (.., .., .., 4) floats. A byte is put among the bits of 128,
    where a conversion would take four times as long."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            FOUR_FLOATS, "=r,=r,=r,=r,r", [words], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
        )
    else:
        a, b = ((words & 255) << 16) | 0x43000000, ((words & 65280) << 8) | 0x43000000
        c, d = (words & 16711680) | 0x43000000, ((words >> 8) & 16711680) | 0x43000000
    four = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(four, [a.shape[0], a.shape[1], a.shape[2], 4]).to(tl.float32, bitcast=True)


@triton.jit
def numbers(D: tl.constexpr, THREE: tl.constexpr, BLOCK: tl.constexpr):
    """Which numbers of a row there are at (BLOCK, planes, 4), and whether there is such a one."""
    planes: tl.constexpr = 8 if THREE else 2
    byte = 4 * tl.arange(0, BLOCK)[:, None, None] + tl.arange(0, 4)[None, None, :]
    return D // planes * tl.arange(0, planes)[None, :, None] + byte, byte < D // planes


@triton.jit
def share_of_program(length, splits, TOKENS: tl.constexpr):
    """The positions, from the first on and up to the second, of this program among `splits` of a sequence."""
    share = tl.cdiv(tl.cdiv(length, splits), TOKENS) * TOKENS
    begin = tl.program_id(1) * share
    return begin, tl.minimum(begin + share, length)


@triton.jit
def products(codes, x_a, x_b, x_c, unit, ASM: tl.constexpr):
    """Of codes (rows, words, planes) with numbers as `digits_of` gives them: (rows)."""
    none = tl.zeros_like(codes)
    score = tl.sum(tl.sum(add_dot_of_four(none, codes, x_c, ASM), 2), 1).to(tl.float32)
    score = score / 254.0 + tl.sum(tl.sum(add_dot_of_four(none, codes, x_b, ASM), 2), 1).to(tl.float32)
    score = score / 254.0 + tl.sum(tl.sum(add_dot_of_four(none, codes, x_a, ASM), 2), 1).to(tl.float32)
    return score * unit


@triton.jit
def softmax_step(top, weight, score):
    """With one more score each: exp2 of it and what the sums before shrink by, relative to the largest score from now
    on, which is third, and the sum of weights."""
    highest = tl.maximum(top, score)
    # nothing seen yet is -inf, and -inf less itself no number
    base = tl.where(highest == -INFINITY, 0.0, highest)
    p = tl.exp2(score - base)
    rescale = tl.exp2(top - base)
    return p, rescale, highest, weight * rescale + p


MOST_AHEAD = tl.constexpr(20_000_000)
"""Bytes of keys and values. Microseconds of 7B's 4096 positions in four bits, H200, with and without asking ahead: of
one sequence, 17 MB, 12.6 and 13.2; of 16, 128 and 105. With 3B's rows of 50 bytes 151 and 167 of 16 sequences. Two
runs; of what is left out there are no rows."""


@triton.jit
def fetch_share(
    k_data, v_data, lengths, b, head, shared_by, kv, capacity, row: tl.constexpr, splits, TOKENS: tl.constexpr
):  # fmt: skip
    """Asks for the rows that a program of `decode_kernel` will read, by the length as it stands now: where all of them
    find room in the L2 cache, and where rows begin anywhere, which the kernel reads in small pieces. Of query heads
    that share keys and values one asks."""
    bytes_of_row: tl.constexpr = row * (k_data.dtype.element_ty.primitive_bitwidth // 8)
    length = tl.minimum(tl.load(lengths + b, cache_modifier=".cg"), capacity)
    begin, end = share_of_program(length, splits, TOKENS)
    size = tl.where(head % shared_by == 0, (end - begin) * bytes_of_row, 0)
    if bytes_of_row % 16 == 0:
        every = (tl.num_programs(0) // shared_by).to(tl.int64) * length * (2 * bytes_of_row)
        size = tl.where(every <= MOST_AHEAD, size, 0)
    fetch(k_data + (kv + begin) * row, size)
    fetch(v_data + (kv + begin) * row, size)


@triton.jit(do_not_specialize=["splits"])
def decode_kernel(
    q, k_data, v_data, k_steps, v_steps, lengths, out, stats, heads, shared_by, D: tl.constexpr, capacity,
    row: tl.constexpr, zero, scale, q_levels, q_zero, splits, THREE: tl.constexpr, FIRST: tl.constexpr,
    QUANTIZE: tl.constexpr, SYMMETRIC: tl.constexpr, TOKENS: tl.constexpr, HALVES: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (batch and query head, split). Writes, of its positions, the weighted v, unnormalized, to `out` (program,
    D), and the largest score and the sum of weights to `stats` (program, 2).

    Each of TOKENS positions a step has sums of its own, which meet at the end: within the loop only the numbers of a
    row are summed across threads. row: its size in what k_data and v_data point to: words, or halves of them (HALVES).
    scale: of the scores, times log2 e. FIRST: position 0 is left to `merge_kernel`.
    """
    b, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    kv = (b * (heads // shared_by) + head // shared_by).to(tl.int64) * capacity
    if PDL:
        fetch_share(k_data, v_data, lengths, b, head, shared_by, kv, capacity, row, splits, TOKENS)
        gdc_wait()
        gdc_launch_dependents()
    length = tl.minimum(tl.load(lengths + b), capacity)  # `append` does not look whether there was room
    begin, end = share_of_program(length, splits, TOKENS)
    d, inside = numbers(D, THREE, BLOCK)
    x = query(q + tl.program_id(0).to(tl.int64) * D, d, inside, q_levels, q_zero, 15.0, QUANTIZE, SYMMETRIC)
    total = tl.sum(x)
    x_a, x_b, x_c, unit = digits_of(x)
    acc = tl.zeros([TOKENS, d.shape[0], d.shape[1], d.shape[2]], dtype=tl.float32)
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
        keys = codes_in_words(k_data, rows, there, D, THREE, HALVES, BLOCK)
        values = codes_in_words(v_data, rows, there, D, THREE, HALVES, BLOCK)
        score = products(keys, x_a, x_b, x_c, unit, ASM)
        values = bytes_as_floats(values, ASM) - (128.0 + zero)
        score = tl.where(there, scale * step * (score - zero * total), -INFINITY)
        p, rescale, top, weight = softmax_step(top, weight, score)
        acc = acc * rescale[:, None, None, None] + values * (p * v_step)[:, None, None, None]
    highest = tl.max(top, 0)
    share_of = tl.exp2(top - tl.where(highest == -INFINITY, 0.0, highest))
    program = tl.program_id(0).to(tl.int64) * splits + tl.program_id(1)
    tl.store(out + program * D + d, tl.sum(acc * share_of[:, None, None, None], 0), mask=inside)
    tl.store(stats + program * 2, highest)
    tl.store(stats + program * 2 + 1, tl.sum(weight * share_of, 0))


@triton.jit
def first_row(data, step, D, zero, BLOCK: tl.constexpr):
    """A row of 4 bits in its natural order, (1, BLOCK) float32."""
    d = tl.arange(0, BLOCK)[None, :]
    half = D // 2
    byte = tl.load(data + d % half, mask=d < D, other=0).to(tl.int32)
    return tl.where(d < D, (((byte >> (4 * (d // half))) & 15).to(tl.float32) - zero) * step, 0.0)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    q, k_first, v_first, k_steps, v_steps, lengths, parts, stats, out, heads, shared_by, D: tl.constexpr, capacity,
    first_zero, scale, q_levels, q_zero, splits, FIRST: tl.constexpr, QUANTIZE: tl.constexpr, SYMMETRIC: tl.constexpr,
    SPLITS: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (batch and query head): the parts of `decode_kernel`, each of TERMS rows that are added, and position 0
    where it lies apart, as one."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    b, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    kv = (b * (heads // shared_by) + head // shared_by).to(tl.int64)
    split = tl.arange(0, SPLITS)
    part = tl.program_id(0).to(tl.int64) * splits + split
    top = tl.load(stats + part * 2, mask=split < splits, other=-INFINITY)
    weight = tl.load(stats + part * 2 + 1, mask=split < splits, other=0.0)
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
    at = parts + (part * (TERMS * D))[:, None] + d[None, :]
    inside = (split < splits)[:, None] & (d < D)[None, :]
    total = tl.load(at, mask=inside, other=0.0)
    for term in tl.static_range(1, TERMS):
        total += tl.load(at + term * D, mask=inside, other=0.0)
    value = tl.sum(total * p[:, None], 0)
    whole = tl.sum(weight * p, 0)
    if FIRST:
        own = tl.exp2(score - base)
        step = tl.load(v_steps + kv * capacity).to(tl.float32)
        first = first_row(v_first + kv * (D // 2), step, D, first_zero, BLOCK)
        value += tl.where(seen, own * tl.sum(first, 0), 0.0)
        whole += own
    value = value / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + tl.program_id(0).to(tl.int64) * D + d, value.to(out.dtype.element_ty), mask=d < D)
