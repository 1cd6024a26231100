"""Triton kernels that encode: counts, normalizers, sizes of the lanes, then streams, planes and patches.

What a lane writes begins and ends on a unit of its own, so that nothing is shared and the bytes are the same each time.
"""

import triton
import triton.language as tl

from paperlm_kernels.neuzip.kernel_decode import bfloat16_of, normed_word, scale_of, within_block


@triton.jit
def load_octet(weights, octet, numel, LANES: tl.constexpr, WHOLE: tl.constexpr):
    """Eight patterns of each lane in four words, zeros behind the last. WHOLE: words can be loaded."""
    words = octet[:, None] * 4 + tl.arange(0, 4)[None, :]
    if WHOLE:
        rows = tl.load(weights.to(tl.pointer_type(tl.int32)) + words, mask=(octet * 8 < numel)[:, None], other=0)
    else:
        low = tl.load(weights + 2 * words, mask=2 * words < numel, other=0).to(tl.int32)
        high = tl.load(weights + 2 * words + 1, mask=2 * words + 1 < numel, other=0).to(tl.int32)
        rows = (low & 0xFFFF) | (high << 16)
    even, odd = tl.split(tl.reshape(rows, [LANES, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def rounded_pattern(pattern, scale, K: tl.constexpr, NORMED: tl.constexpr):
    """A pattern divided by its scale and rounded to K mantissa bits, as `fields.lossy_split` does."""
    y = pattern
    if NORMED:
        y = bfloat16_of(tl.div_rn((pattern << 16).to(tl.float32, bitcast=True), scale))
    code = ((y & 0x7FFF) >> (7 - K)) + ((y >> (6 - K)) & 1)
    finite = (y & 0x7F80) != 0x7F80
    code = tl.where(finite, tl.minimum(code, (255 << K) - 1), code)
    if NORMED:
        product = bfloat16_of(((code << (7 - K)) << 16).to(tl.float32, bitcast=True) * scale)
        code -= (((product & 0x7F80) == 0x7F80) & ((code >> K) != 255)).to(tl.int32)
    return (y & 0x8000) | code << (7 - K)


@triton.jit
def stored_word(word, scale, K: tl.constexpr, NORMED: tl.constexpr):
    """Two patterns as they are stored, the mantissa's lowest 7 - K bits being zeros."""
    if K == 7:
        return word
    first = rounded_pattern(word & 0xFFFF, scale, K, NORMED)
    return first | rounded_pattern((word >> 16) & 0xFFFF, scale, K, NORMED) << 16


@triton.jit
def load_stored(
    weights, norm, octet, numel, LANES: tl.constexpr, WHOLE: tl.constexpr, K: tl.constexpr, LOG_NORM: tl.constexpr
):
    """`load_octet` as it is stored, and the scale."""
    w0, w1, w2, w3 = load_octet(weights, octet, numel, LANES, WHOLE)
    scale = tl.full([LANES], 1.0, tl.float32)
    if LOG_NORM > 0:
        scale = scale_of(norm, octet * 8, LOG_NORM, octet * 8 < numel)
    w0, w1 = stored_word(w0, scale, K, LOG_NORM > 0), stored_word(w1, scale, K, LOG_NORM > 0)
    w2, w3 = stored_word(w2, scale, K, LOG_NORM > 0), stored_word(w3, scale, K, LOG_NORM > 0)
    return w0, w1, w2, w3, scale


@triton.jit
def block_sum_of(word, index, scale, LOG_NORM: tl.constexpr):
    """What a decoded word adds to the sum of its block, modulo 2^32."""
    if LOG_NORM > 0:
        word = normed_word(word, scale)
    return word.to(tl.uint32, bitcast=True) * (2 * index + 1).to(tl.uint32)


@triton.jit
def items_of(word, K: tl.constexpr):
    """Two items, the first in the lowest bits."""
    first = ((word >> 15) & 1) << K | (word & 0x7F) >> (7 - K)
    second = ((word >> 31) & 1) << K | ((word >> 16) & 0x7F) >> (7 - K)
    return first | second << (K + 1)


@triton.jit
def store_plane(plane, octet, inside, w0, w1, w2, w3, K: tl.constexpr):
    """Eight items of each lane."""
    low = items_of(w0, K) | items_of(w1, K) << (2 * K + 2)
    high = items_of(w2, K) | items_of(w3, K) << (2 * K + 2)
    if K == 7:
        both = (low.to(tl.int64) & 0xFFFFFFFF) | high.to(tl.int64) << 32
    else:
        both = low | high << (4 * K + 4)
    tl.store(plane + octet, both.to(plane.dtype.element_ty), mask=inside)


@triton.jit
def indices_of(word, place, index, numel):
    """Indices of two exponents in the palette, as a pair; behind the last weight, of the palette's first."""
    first = tl.load(index + ((word >> 7) & 0xFF)).to(tl.int32)
    second = tl.load(index + ((word >> 23) & 0xFF)).to(tl.int32)
    return tl.where(place < numel, first, 0) * 16 + tl.where(place + 1 < numel, second, 0)


@triton.jit
def escapes_in(pair):
    """How many of a pair escape."""
    return ((pair >> 4) == 15).to(tl.int32) + ((pair & 15) == 15).to(tl.int32)


@triton.jit
def normalizer_kernel(weights, norm, numel, N: tl.constexpr, FIRST_WARP: tl.constexpr, STEP: tl.constexpr):
    """The fraction of the largest magnitude of each N weights. FIRST_WARP: of their first 32 but in the first block of
    each STEP = 1024 weights (`fields.normalizers`, authors_v1)."""
    column = tl.arange(0, N)[None, :]
    block = tl.arange(0, STEP // N)[:, None]
    place = tl.program_id(0).to(tl.int64) * STEP + block * N + column
    magnitude = tl.load(weights + place, mask=place < numel, other=0).to(tl.int32) & 0x7FFF
    if FIRST_WARP:
        magnitude = tl.where((block == 0) | (column < 32), magnitude, 0)
    top = tl.max(magnitude, 1)
    where = tl.program_id(0).to(tl.int64) * (STEP // N) + tl.arange(0, STEP // N)
    tl.store(norm + where, (top << 1).to(tl.uint8), mask=where * N < numel)


@triton.jit
def count_kernel(
    weights, norm, counts, numel, OCTETS: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr, K: tl.constexpr,
    LOG_NORM: tl.constexpr,
):  # fmt: skip
    """How often each exponent occurs (256, int64); what the last block lacks is counted as zeros."""
    lane = tl.arange(0, LANES)
    total = tl.zeros([256], dtype=tl.int32)
    mine, _plane, scales, count = within_block(
        weights, norm, norm, tl.program_id(0), numel, OCTETS * LANES * 8, LOG_NORM
    )
    for t in range(OCTETS):
        octet = t * LANES + lane
        w0, w1, w2, w3, _ = load_stored(mine, scales, octet, count, LANES, WHOLE, K, LOG_NORM)
        words = tl.reshape(tl.join(tl.join(w0, w1), tl.join(w2, w3)), [LANES * 4])
        total += tl.histogram((words >> 7) & 0xFF, 256) + tl.histogram((words >> 23) & 0xFF, 256)
    tl.atomic_add(counts + tl.arange(0, 256), total.to(tl.int64))


@triton.jit
def size_kernel(
    weights, norm, index, codes, units, words, most, patch_counts, sums, numel,
    OCTETS: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr, K: tl.constexpr,
    LOG_NORM: tl.constexpr,
):  # fmt: skip
    """Units of each lane; words, largest units, patches and sum of each block."""
    block = tl.program_id(0)
    lane = tl.arange(0, LANES)
    bits = tl.zeros([LANES], dtype=tl.int32)
    escapes = tl.zeros([LANES], dtype=tl.int32)
    total = tl.zeros([LANES], dtype=tl.uint32)
    mine, _plane, scales, count = within_block(
        weights, norm, norm, tl.program_id(0), numel, OCTETS * LANES * 8, LOG_NORM
    )
    for t in range(OCTETS):
        octet = t * LANES + lane
        w0, w1, w2, w3, scale = load_stored(mine, scales, octet, count, LANES, WHOLE, K, LOG_NORM)
        for j in tl.static_range(4):
            word = w0 if j == 0 else (w1 if j == 1 else (w2 if j == 2 else w3))
            pair = indices_of(word, octet * 8 + 2 * j, index, count)
            bits += tl.load(codes + pair) >> 16
            escapes += escapes_in(pair)
            total += block_sum_of(word, (t * LANES + lane) * 4 + j, scale, LOG_NORM)
    size = (bits + (UNIT - 1)) // UNIT
    tl.store(units + block.to(tl.int64) * LANES + lane, size.to(tl.uint8))
    tl.store(words + block, (tl.sum(size, 0) * UNIT + 31) // 32)
    tl.store(most + block, tl.max(size, 0))
    tl.store(patch_counts + block, tl.sum(escapes, 0))
    tl.store(sums + block, tl.sum(total, 0).to(tl.int32, bitcast=True))


@triton.jit
def write_kernel(
    weights, norm, index, codes, units, directory, payload, plane, numel,
    OCTETS: tl.constexpr, LANES: tl.constexpr, LIMIT: tl.constexpr, UNIT: tl.constexpr, WHOLE: tl.constexpr,
    K: tl.constexpr, LOG_NORM: tl.constexpr,
):  # fmt: skip
    """Streams (payload in integers of a unit, zeros before) and plane."""
    block = tl.program_id(0)
    lane = tl.arange(0, LANES)
    size = tl.load(units + block.to(tl.int64) * LANES + lane).to(tl.int32)
    begin = tl.load(directory + block).to(tl.int64) * (32 // UNIT)
    place = tl.cumsum(size, 0) - size
    stream = payload + begin
    window = tl.zeros([LANES], dtype=tl.uint64)
    filled = tl.zeros([LANES], dtype=tl.int32)
    mine, items, scales, count = within_block(
        weights, plane, norm, tl.program_id(0), numel, OCTETS * LANES * 8, LOG_NORM
    )
    for t in range(OCTETS):
        octet = t * LANES + lane
        w0, w1, w2, w3, _ = load_stored(mine, scales, octet, count, LANES, WHOLE, K, LOG_NORM)
        store_plane(items, octet, octet * 8 < count, w0, w1, w2, w3, K)
        for half in tl.static_range(2):
            first = indices_of(w0 if half == 0 else w2, octet * 8 + 4 * half, index, count)
            second = indices_of(w1 if half == 0 else w3, octet * 8 + 4 * half + 2, index, count)
            entry0, entry1 = tl.load(codes + first), tl.load(codes + second)
            length0 = entry0 >> 16
            code = (entry0 & 0xFFFF) | (entry1 & 0xFFFF) << length0
            window = window | code.to(tl.uint64) << filled.to(tl.uint64)
            filled += length0 + (entry1 >> 16)
            for _ in tl.static_range((UNIT - 1 + 2 * LIMIT) // UNIT):
                full = filled >= UNIT
                tl.store(stream + place, window.to(payload.dtype.element_ty), mask=full)
                window = tl.where(full, window >> UNIT, window)
                filled = tl.where(full, filled - UNIT, filled)
                place += full.to(tl.int32)
    tl.store(stream + place, window.to(payload.dtype.element_ty), mask=filled > 0)


@triton.jit
def fix4_kernel(
    weights, norm, payload, plane, patch_counts, sums, numel, lowest,
    OCTETS: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr, K: tl.constexpr, LOG_NORM: tl.constexpr,
):  # fmt: skip
    """Codes of four bits (`fix4.encode`), plane, number of patches and sum of each block."""
    block = tl.program_id(0)
    lane = tl.arange(0, LANES)
    escapes = tl.zeros([LANES], dtype=tl.int32)
    total = tl.zeros([LANES], dtype=tl.uint32)
    mine, items, scales, count = within_block(
        weights, plane, norm, tl.program_id(0), numel, OCTETS * LANES * 8, LOG_NORM
    )
    for t in range(OCTETS):
        octet = t * LANES + lane
        inside = octet * 8 < count
        w0, w1, w2, w3, scale = load_stored(mine, scales, octet, count, LANES, WHOLE, K, LOG_NORM)
        store_plane(items, octet, inside, w0, w1, w2, w3, K)
        codes = tl.zeros([LANES], dtype=tl.int32)
        for j in tl.static_range(8):
            word = w0 if j < 2 else (w1 if j < 4 else (w2 if j < 6 else w3))
            exponent = (word >> (7 + 16 * (j % 2))) & 0xFF
            code = exponent - lowest + 1
            there = octet * 8 + j < count
            known = (code > 0) & (code < 16)
            codes = codes | tl.where(known & there, code, 0) << (4 * j)
            escapes += (there & (known == 0)).to(tl.int32)
            if j % 2 == 0:
                total += block_sum_of(word, (t * LANES + lane) * 4 + j // 2, scale, LOG_NORM)
        tl.store(payload + block.to(tl.int64) * (OCTETS * LANES) + octet, codes, mask=inside)
    tl.store(patch_counts + block, tl.sum(escapes, 0))
    tl.store(sums + block, tl.sum(total, 0).to(tl.int32, bitcast=True))


@triton.jit
def patch_kernel(
    weights, norm, index, patches, patch_directory, numel, BLOCK: tl.constexpr, K: tl.constexpr,
    LOG_NORM: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Places and exponents of the weights of a block whose index is 15, in order."""
    block = tl.program_id(0)
    done = tl.load(patch_directory + block)
    end = tl.load(patch_directory + block + 1)
    t = 0
    while done < end:
        inner = t * STEP + tl.arange(0, STEP)
        place = block.to(tl.int64) * BLOCK + inner
        inside = place < numel
        pattern = tl.load(weights + place, mask=inside, other=0).to(tl.int32) & 0xFFFF
        scale = tl.full([STEP], 1.0, tl.float32)
        if LOG_NORM > 0:
            scale = scale_of(norm, place, LOG_NORM, inside)
        if K < 7:
            pattern = rounded_pattern(pattern, scale, K, LOG_NORM > 0)
        exponent = (pattern >> 7) & 0xFF
        escape = (inside & (tl.load(index + exponent) == 15)).to(tl.int32)
        where = done + tl.cumsum(escape, 0) - escape
        tl.store(patches + where, inner | exponent << 24, mask=escape == 1)
        done += tl.sum(escape, 0)
        t += 1
