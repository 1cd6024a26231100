"""Triton kernels that decode a block of weights a program.

A lane is a thread: it reads its own stream, so that nothing but the sum of lane sizes at the start crosses lanes. At
each step the 128 lanes read 8 bytes each of the plane and write 16 each, next to each other.
"""

import triton
import triton.language as tl


@triton.jit
def bfloat16_of(x):
    """Patterns (int32) of float32, rounded to nearest, ties to even, in integers; not for NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int32)


@triton.jit
def scale_of(norm, place, LOG_NORM: tl.constexpr, mask):
    """What weights at these places are multiplied by: a normalizer byte is the top of a float32's fraction."""
    byte = tl.load(norm + (place >> LOG_NORM), mask=mask, other=0).to(tl.int32)
    return (0x3F800000 | (byte << 15)).to(tl.float32, bitcast=True)


@triton.jit
def load_items(plane, octet, inside, K: tl.constexpr):
    """Sign and mantissa of the first and of the last four weights of octets, for `item`."""
    if K == 7:
        both = tl.load(plane + octet, mask=inside, other=0)
        low, high = both.to(tl.int32), (both >> 32).to(tl.int32)
    else:
        both = tl.load(plane + octet, mask=inside, other=0).to(tl.int32)
        low, high = both, both >> (4 * (K + 1))
    return low, high


@triton.jit
def sign_and_mantissa(items, J: tl.constexpr, K: tl.constexpr):
    """Item J of `load_items` where it stands in a pattern."""
    item = items >> ((K + 1) * J)
    return ((item >> K) & 1) << 15 | (item & ((1 << K) - 1)) << (7 - K)


@triton.jit
def pair_word(entry, items, J: tl.constexpr, K: tl.constexpr):
    """Two patterns: exponents from an entry, signs and mantissas from items J and J + 1."""
    if K == 7:  # each byte twice, then one selection of bits
        two = items >> (8 * J)
        apart = (two & 0xFF) | ((two & 0xFF00) << 8)
        return (entry & 0x7F807F80) | ((apart | (apart << 8)) & -0x7F807F81)
    first = sign_and_mantissa(items, J, K)
    second = sign_and_mantissa(items, J + 1, K)
    return (entry & 0x7F807F80) | first | (second << 16)


@triton.jit
def normed_word(word, scale):
    """Two patterns times a scale, each in float32, rounded to bfloat16."""
    first = bfloat16_of((word << 16).to(tl.float32, bitcast=True) * scale)
    second = bfloat16_of((word & (-65536)).to(tl.float32, bitcast=True) * scale)
    return (first & 0xFFFF) | (second << 16)


@triton.jit
def store_octet(out, octet, inside, w0, w1, w2, w3, numel, LANES: tl.constexpr, WHOLE: tl.constexpr):
    """Eight patterns of each lane. WHOLE: their number is a multiple of 8, so that words of 32 bits are stored."""
    rows = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [LANES, 4])
    words = octet[:, None] * 4 + tl.arange(0, 4)[None, :]
    if WHOLE:
        tl.store(out.to(tl.pointer_type(tl.int32)) + words, rows, mask=inside[:, None])
    else:
        tl.store(out + 2 * words, rows.to(tl.int16), mask=2 * words < numel)
        tl.store(out + 2 * words + 1, (rows >> 16).to(tl.int16), mask=2 * words + 1 < numel)


@triton.jit
def within_block(weights, plane, norm, block, numel, BLOCK: tl.constexpr, LOG_NORM: tl.constexpr):
    """Pointers to where a block begins, and how many of its weights there are: in a block 32 bits do to count."""
    first = block.to(tl.int64) * BLOCK
    count = tl.minimum(numel - first, BLOCK).to(tl.int32)
    return weights + first, plane + block.to(tl.int64) * (BLOCK // 8), norm + (first >> LOG_NORM), count


@triton.jit
def window_of(stream, position):
    """The next 32 bits of a stream that begins at the word `stream`."""
    word = position >> 5
    low = tl.load(stream + word).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(stream + word + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return ((low | high << 32) >> (position & 31).to(tl.uint64)).to(tl.uint32)


@triton.jit
def apply_patches(
    out, plane8, norm, patches, patch_directory, block, numel, BLOCK: tl.constexpr, K: tl.constexpr,
    LOG_NORM: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Writes the weights of a block whose exponents escape the code, after a barrier."""
    start = tl.load(patch_directory + block)
    end = tl.load(patch_directory + block + 1)
    if end > start:
        tl.debug_barrier()  # the same places were written with another exponent, by other threads
        for i in range(start, end, STEP):
            index = i + tl.arange(0, STEP)
            inside = index < end
            patch = tl.load(patches + index, mask=inside, other=0)
            place = block.to(tl.int64) * BLOCK + (patch & 0xFFFFFF)
            inside &= place < numel
            # K + 1 divides 8: an item lies in one byte
            item = tl.load(plane8 + ((place * (K + 1)) >> 3), mask=inside, other=0).to(tl.int32)
            item = item >> ((place * (K + 1)) & 7).to(tl.int32)
            pattern = sign_and_mantissa(item, 0, K) | ((patch >> 24) & 0xFF) << 7
            if LOG_NORM > 0:
                scale = scale_of(norm, place, LOG_NORM, inside)
                pattern = bfloat16_of((pattern << 16).to(tl.float32, bitcast=True) * scale)
            tl.store(out + place, pattern.to(tl.int16), mask=inside)


@triton.jit
def decode_kernel(
    payload, directory, units, table, plane, plane8, norm, patches, patch_directory, out, found, numel,
    OCTETS: tl.constexpr, LANES: tl.constexpr, LIMIT: tl.constexpr, UNIT: tl.constexpr, K: tl.constexpr,
    LOG_NORM: tl.constexpr, WHOLE: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Prefix codes. payload, directory, patches int32 (bits of uint32); plane in integers of an octet's size."""
    block = tl.program_id(0)
    lane = tl.arange(0, LANES)
    size = tl.load(units + block.to(tl.int64) * LANES + lane).to(tl.int32)
    start = (tl.cumsum(size, 0) - size) * UNIT
    stream = payload + tl.load(directory + block)
    position = start
    mine, items, scales, count = within_block(out, plane, norm, block, numel, OCTETS * LANES * 8, LOG_NORM)
    for t in range(OCTETS):
        octet = t * LANES + lane
        inside = octet * 8 < count
        low, high = load_items(items, octet, inside, K)
        window = window_of(stream, position)
        entry0 = tl.load(table + (window & ((1 << LIMIT) - 1)).to(tl.int32))
        length0 = entry0 & 127
        entry1 = tl.load(table + ((window >> length0.to(tl.uint32)) & ((1 << LIMIT) - 1)).to(tl.int32))
        position += length0 + (entry1 & 127)
        window = window_of(stream, position)
        entry2 = tl.load(table + (window & ((1 << LIMIT) - 1)).to(tl.int32))
        length2 = entry2 & 127
        entry3 = tl.load(table + ((window >> length2.to(tl.uint32)) & ((1 << LIMIT) - 1)).to(tl.int32))
        position += length2 + (entry3 & 127)
        w0, w1 = pair_word(entry0, low, 0, K), pair_word(entry1, low, 2, K)
        w2, w3 = pair_word(entry2, high, 0, K), pair_word(entry3, high, 2, K)
        if LOG_NORM > 0:
            scale = scale_of(scales, octet * 8, LOG_NORM, inside)
            w0, w1 = normed_word(w0, scale), normed_word(w1, scale)
            w2, w3 = normed_word(w2, scale), normed_word(w3, scale)
        store_octet(mine, octet, inside, w0, w1, w2, w3, count, LANES, WHOLE)
    apply_patches(
        out, plane8, norm, patches, patch_directory, block, numel, OCTETS * LANES * 8, K, LOG_NORM, LANES
    )  # fmt: skip
    if CHECK:
        wrong = (position - start + (UNIT - 1)) // UNIT != size
        tl.atomic_or(found + lane * 0, wrong.to(tl.int32), mask=wrong)


@triton.jit
def fix4_entry(codes, lowest):
    """Exponents of two codes where they stand in a word; masked, for code 0 may be one below 0."""
    return (((codes & 15) + lowest - 1) & 255) << 7 | ((((codes >> 4) & 15) + lowest - 1) & 255) << 23


@triton.jit
def decode_fix4_kernel(
    payload, plane, plane8, norm, patches, patch_directory, out, numel, lowest,
    OCTETS: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr, LOG_NORM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Exponents in four bits: lowest + code - 1."""
    block = tl.program_id(0)
    lane = tl.arange(0, LANES)
    mine, items, scales, count = within_block(out, plane, norm, block, numel, OCTETS * LANES * 8, LOG_NORM)
    for t in range(OCTETS):
        octet = t * LANES + lane
        inside = octet * 8 < count
        low, high = load_items(items, octet, inside, K)
        codes = tl.load(payload + block.to(tl.int64) * (OCTETS * LANES) + octet, mask=inside, other=0x11111111)
        w0 = pair_word(fix4_entry(codes, lowest), low, 0, K)
        w1 = pair_word(fix4_entry(codes >> 8, lowest), low, 2, K)
        w2 = pair_word(fix4_entry(codes >> 16, lowest), high, 0, K)
        w3 = pair_word(fix4_entry(codes >> 24, lowest), high, 2, K)
        if LOG_NORM > 0:
            scale = scale_of(scales, octet * 8, LOG_NORM, inside)
            w0, w1 = normed_word(w0, scale), normed_word(w1, scale)
            w2, w3 = normed_word(w2, scale), normed_word(w3, scale)
        store_octet(mine, octet, inside, w0, w1, w2, w3, count, LANES, WHOLE)
    apply_patches(
        out, plane8, norm, patches, patch_directory, block, numel, OCTETS * LANES * 8, K, LOG_NORM, LANES
    )  # fmt: skip
