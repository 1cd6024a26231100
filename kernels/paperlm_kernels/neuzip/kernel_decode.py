"""Triton kernels that decode a block of weights a program.

A lane is a thread: it reads its own stream, so that nothing but the sum of lane sizes at the start crosses lanes. At
each step the 128 lanes read 8 bytes each of the plane and write 16 each, next to each other.
"""

import os

import triton
import triton.language as tl

from paperlm_kernels.overlap import gdc_launch_dependents, gdc_wait

ASM = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"The interpreter has no inline assembly. Whether it interprets, Triton looks up where a kernel is declared."
BOTH_ROUNDED = tl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $2;")


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
    first = (word << 16).to(tl.float32, bitcast=True) * scale
    second = (word & (-65536)).to(tl.float32, bitcast=True) * scale
    if ASM:  # one instruction for what takes a dozen in integers
        return tl.inline_asm_elementwise(BOTH_ROUNDED, "=r,f,f", [second, first], tl.int32, is_pure=True, pack=1)
    return (bfloat16_of(first) & 0xFFFF) | (bfloat16_of(second) << 16)


@triton.jit
def store_octet(out, octet, w0, w1, w2, w3, count, LANES: tl.constexpr, ALIGNED: tl.constexpr):
    """The complete ones of the lanes' octets. ALIGNED: `out` is a multiple of 16 bytes, so that one is stored at once.

    An octet that is not complete is a tensor's last: `store_last` is for it, behind the loop, where it takes no
    registers that the loop needs."""
    rows = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [LANES, 4])
    words = octet[:, None] * 4 + tl.arange(0, 4)[None, :]
    complete = (octet * 8 + 8 <= count)[:, None]
    if ALIGNED:
        tl.store(out.to(tl.pointer_type(tl.int32)) + words, rows, mask=complete)
    else:
        tl.store(out + 2 * words, rows.to(tl.int16), mask=complete)
        tl.store(out + 2 * words + 1, (rows >> 16).to(tl.int16), mask=complete)


@triton.jit
def store_last(out, octet, w0, w1, w2, w3, count):
    """Of an incomplete octet among these, if there is one, what is there: one by one, which is little code."""
    for j in range(count % 8):
        word = tl.where(j < 4, tl.where(j < 2, w0, w1), tl.where(j < 6, w2, w3))
        tl.store(out + octet * 8 + j, (word >> (16 * (j % 2))).to(tl.int16), mask=octet == count // 8)


@triton.jit
def decoded(
    octet, inside, entries0, entries1, entries2, entries3, low, high, scales, K: tl.constexpr, LOG_NORM: tl.constexpr
):
    """Eight weights of each lane in four words, of which the exponents stand in entries and the rest in items."""
    w0, w1 = pair_word(entries0, low, 0, K), pair_word(entries1, low, 2, K)
    w2, w3 = pair_word(entries2, high, 0, K), pair_word(entries3, high, 2, K)
    if LOG_NORM > 0:
        scale = scale_of(scales, octet * 8, LOG_NORM, inside)
        w0, w1 = normed_word(w0, scale), normed_word(w1, scale)
        w2, w3 = normed_word(w2, scale), normed_word(w3, scale)
    return w0, w1, w2, w3


@triton.jit
def within_block(weights, plane, norm, block, numel, BLOCK: tl.constexpr, LOG_NORM: tl.constexpr):
    """Pointers to where a block begins, and how many of its weights there are: in a block 32 bits do to count."""
    number = tl.cast(block, tl.int64)
    count = tl.minimum(numel - number * BLOCK, BLOCK).to(tl.int32)
    return weights + number * BLOCK, plane + number * (BLOCK // 8), norm + (number * BLOCK >> LOG_NORM), count


@triton.jit
def words_at(stream, word):
    """The word of a stream and the two behind it."""
    return tl.load(stream + word), tl.load(stream + word + 1), tl.load(stream + word + 2)


@triton.jit
def next_window(stream, position, word, low, high, ahead):
    """The next 32 bits of a stream, which begin in the word `word` or in the one behind it; and the words that hold
    them, and the one behind, which is read long before it is needed. So each word is read once."""
    now = position >> 5
    moved = now != word
    low = tl.where(moved, high, low)
    high = tl.where(moved, ahead, high)
    ahead = tl.load(stream + now + 2, mask=moved, other=ahead)
    both = low.to(tl.uint32, bitcast=True).to(tl.uint64) | high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    return (both >> (position & 31).to(tl.uint64)).to(tl.uint32), now, low, high, ahead


@triton.jit
def two_entries(table, window, LIMIT: tl.constexpr):
    """Of the two code words that a window begins with, and their bits."""
    first = tl.load(table + (window & ((1 << LIMIT) - 1)).to(tl.int32))
    length = first & 127
    second = tl.load(table + ((window >> length.to(tl.uint32)) & ((1 << LIMIT) - 1)).to(tl.int32))
    return first, second, length + (second & 127)


@triton.jit
def decoded_entries(stream, table, position, word, w_low, w_high, w_ahead, LIMIT: tl.constexpr):
    """Of the next four code words: entries, and what `next_window` goes on with."""
    window, word, w_low, w_high, w_ahead = next_window(stream, position, word, w_low, w_high, w_ahead)
    entry0, entry1, bits = two_entries(table, window, LIMIT)
    position += bits
    window, word, w_low, w_high, w_ahead = next_window(stream, position, word, w_low, w_high, w_ahead)
    entry2, entry3, bits = two_entries(table, window, LIMIT)
    return entry0, entry1, entry2, entry3, position + bits, word, w_low, w_high, w_ahead


@triton.jit
def patches_of(items, scales, patches, index, inner, end, count, K: tl.constexpr, LOG_NORM: tl.constexpr):
    """Places and patterns of some of a block's patches, and which of them there are, in the part of the block that
    begins at `inner`."""
    inside = index < end
    patch = tl.load(patches + index, mask=inside, other=0)
    place = (patch & 0xFFFFFF) - inner
    inside &= (place >= 0) & (place < count)
    # K + 1 divides 8: an item lies in one byte
    item = tl.load(items + ((place * (K + 1)) >> 3), mask=inside, other=0).to(tl.int32)
    item = item >> ((place * (K + 1)) & 7)
    pattern = sign_and_mantissa(item, 0, K) | ((patch >> 24) & 0xFF) << 7
    if LOG_NORM > 0:
        scale = scale_of(scales, place, LOG_NORM, inside)
        pattern = bfloat16_of((pattern << 16).to(tl.float32, bitcast=True) * scale)
    return place, pattern.to(tl.int16), inside


@triton.jit
def store_patches(
    mine, items, scales, patches, place, pattern, inside, begin, end, count, K: tl.constexpr, LOG_NORM: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Writes the weights of a block whose exponents escape the code: the first STEP, already read, and the rest."""
    if end > begin:
        tl.debug_barrier()  # the same places were written with another exponent, by other threads
        tl.store(mine + place, pattern, mask=inside)
        for i in range(begin + STEP, end, STEP):
            index = i + tl.arange(0, STEP)
            place, pattern, inside = patches_of(items, scales, patches, index, 0, end, count, K, LOG_NORM)
            tl.store(mine + place, pattern, mask=inside)


@triton.jit(do_not_specialize=["numel"])
def decode_kernel(
    payload, directory, units, table, plane, plane8, norm, patches, patch_directory, found, out, numel,
    OCTETS: tl.constexpr, LANES: tl.constexpr, LIMIT: tl.constexpr, UNIT: tl.constexpr, K: tl.constexpr,
    LOG_NORM: tl.constexpr, ALIGNED: tl.constexpr, CHECK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Prefix codes. payload, directory, patches int32 (bits of uint32); plane in integers of an octet's size. PDL: see
    `overlap`."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(0)
    lane = tl.arange(0, LANES)
    BLOCK: tl.constexpr = OCTETS * LANES * 8
    size = tl.load(units + block.to(tl.int64) * LANES + lane).to(tl.int32)
    begin, end = tl.load(patch_directory + block), tl.load(patch_directory + block + 1)
    stream = payload + tl.load(directory + block)
    mine, items, scales, count = within_block(out, plane, norm, block, numel, BLOCK, LOG_NORM)
    items8 = plane8 + block.to(tl.int64) * (BLOCK // 8 * (K + 1))
    # what is needed last is asked for first, and so is what the next step needs: memory answers late
    place, pattern, patched = patches_of(items8, scales, patches, begin + lane, 0, end, count, K, LOG_NORM)
    low, high = load_items(items, lane, lane * 8 < count, K)
    start = (tl.cumsum(size, 0) - size) * UNIT
    position, word = start, start >> 5
    w_low, w_high, w_ahead = words_at(stream, word)
    w0, w1, w2, w3 = lane, lane, lane, lane
    steps = tl.cdiv(count, LANES * 8)
    for t in range(steps):
        octet = t * LANES + lane
        after = octet + LANES
        low_after, high_after = load_items(items, after, after * 8 < count, K)
        entry0, entry1, entry2, entry3, position, word, w_low, w_high, w_ahead = decoded_entries(
            stream, table, position, word, w_low, w_high, w_ahead, LIMIT
        )
        w0, w1, w2, w3 = decoded(
            octet, octet * 8 < count, entry0, entry1, entry2, entry3, low, high, scales, K, LOG_NORM
        )  # fmt: skip
        store_octet(mine, octet, w0, w1, w2, w3, count, LANES, ALIGNED)
        low, high = low_after, high_after
    if count % 8 != 0:  # it is in the last step
        store_last(mine, (steps - 1) * LANES + lane, w0, w1, w2, w3, count)
    if CHECK:  # behind the last weight, streams go on
        for _ in range(steps, OCTETS):
            _e0, _e1, _e2, _e3, position, word, w_low, w_high, w_ahead = decoded_entries(
                stream, table, position, word, w_low, w_high, w_ahead, LIMIT
            )
    store_patches(
        mine, items8, scales, patches, place, pattern, patched, begin, end, count, K, LOG_NORM, LANES
    )  # fmt: skip
    if CHECK:
        wrong = (position - start + (UNIT - 1)) // UNIT != size
        tl.atomic_or(found + lane * 0, wrong.to(tl.int32), mask=wrong)


@triton.jit
def fix4_entry(codes, lowest):
    """Exponents of two codes where they stand in a word; masked, for code 0 may be one below 0."""
    return (((codes & 15) + lowest - 1) & 255) << 7 | ((((codes >> 4) & 15) + lowest - 1) & 255) << 23


@triton.jit
def decoded_fix4(octet, inside, codes, low, high, lowest, scales, K: tl.constexpr, LOG_NORM: tl.constexpr):
    """Eight weights of each lane in four words."""
    return decoded(
        octet, inside, fix4_entry(codes, lowest), fix4_entry(codes >> 8, lowest), fix4_entry(codes >> 16, lowest),
        fix4_entry(codes >> 24, lowest), low, high, scales, K, LOG_NORM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["numel", "lowest"])
def decode_fix4_kernel(
    payload, plane, plane8, norm, patches, patch_directory, out, numel, lowest,
    OCTETS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, LOG_NORM: tl.constexpr,
    ALIGNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Exponents in four bits: lowest + code - 1. A program decodes 2 * WIDTH octets, a part of a block: many that have
    all they read asked for at once use memory better than few that go on. PDL: see `overlap`."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    part = tl.program_id(0)
    PARTS: tl.constexpr = OCTETS * LANES // (2 * WIDTH)
    lane = tl.arange(0, WIDTH)
    block = part // PARTS
    begin, end = tl.load(patch_directory + block), tl.load(patch_directory + block + 1)
    mine, items, scales, count = within_block(out, plane, norm, part, numel, WIDTH * 16, LOG_NORM)
    words = payload + part.to(tl.int64) * (2 * WIDTH)
    inside, then = lane * 8 < count, (lane + WIDTH) * 8 < count
    low, high = load_items(items, lane, inside, K)
    codes = tl.load(words + lane, mask=inside, other=0)
    low_then, high_then = load_items(items, lane + WIDTH, then, K)
    codes_then = tl.load(words + lane + WIDTH, mask=then, other=0)
    w0, w1, w2, w3 = decoded_fix4(lane, inside, codes, low, high, lowest, scales, K, LOG_NORM)
    store_octet(mine, lane, w0, w1, w2, w3, count, WIDTH, ALIGNED)
    v0, v1, v2, v3 = decoded_fix4(lane + WIDTH, then, codes_then, low_then, high_then, lowest, scales, K, LOG_NORM)
    store_octet(mine, lane + WIDTH, v0, v1, v2, v3, count, WIDTH, ALIGNED)
    if count % 8 != 0:
        store_last(mine, lane, w0, w1, w2, w3, count)
        store_last(mine, lane + WIDTH, v0, v1, v2, v3, count)
    if end > begin:
        tl.debug_barrier()  # the same places were written with another exponent, by other threads
        items8 = plane8 + part.to(tl.int64) * (2 * WIDTH * (K + 1))
        inner = (part % PARTS) * (WIDTH * 16)
        for i in range(begin, end, WIDTH):
            place, pattern, patched = patches_of(items8, scales, patches, i + lane, inner, end, count, K, LOG_NORM)
            tl.store(mine + place, pattern, mask=patched)
