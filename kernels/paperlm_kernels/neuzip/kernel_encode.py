"""Triton kernels that encode: normalizers, planes and sizes of the lanes, where blocks begin, then streams and patches.

What a lane writes begins and ends on a unit of its own, so that nothing is shared and the bytes are the same each time.
A step asks for the weights of the next one before its own are looked at: memory answers late.
"""

import triton
import triton.language as tl

from paperlm_kernels.neuzip.kernel_codebook import store_decoding
from paperlm_kernels.neuzip.kernel_decode import normed_word, within_block
from paperlm_kernels.neuzip.kernel_octets import as_stored, bit_of_step, either, load_last, load_octet
from paperlm_kernels.neuzip.kernel_pairs import entry_of, window_of
from paperlm_kernels.neuzip.kernel_streams import put_octet, store_bytes


@triton.jit
def block_sum_of(word, index, scale, LOG_NORM: tl.constexpr):
    """What a decoded word adds to the sum of its block, modulo 2^32."""
    if LOG_NORM > 0:
        word = normed_word(word, scale)
    return word.to(tl.uint32, bitcast=True) * (2 * index + 1).to(tl.uint32)


@triton.jit
def octet_sum(w0, w1, w2, w3, octet, scale, LOG_NORM: tl.constexpr):
    """`block_sum_of` of four words."""
    return (
        block_sum_of(w0, octet * 4, scale, LOG_NORM) + block_sum_of(w1, octet * 4 + 1, scale, LOG_NORM)
        + block_sum_of(w2, octet * 4 + 2, scale, LOG_NORM) + block_sum_of(w3, octet * 4 + 3, scale, LOG_NORM)
    )  # fmt: skip


@triton.jit
def items_of(word, K: tl.constexpr):
    """Two items, the first in the lowest bits."""
    if K == 7:  # both at once
        apart = (word & 0x007F007F) | ((word >> 8) & 0x00800080)
        return (apart | (apart >> 8)) & 0xFFFF
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
def padded(word, place, count, pad):
    """A word of two patterns, with `pad` in place of those behind the last."""
    return tl.where(place + 1 < count, word, tl.where(place < count, (word & 0xFFFF) | (pad & (-65536)), pad))


@triton.jit
def padded_octet(w0, w1, w2, w3, octet, count, pad):
    """`padded` of four words."""
    w0, w1 = padded(w0, octet * 8, count, pad), padded(w1, octet * 8 + 2, count, pad)
    w2, w3 = padded(w2, octet * 8 + 4, count, pad), padded(w3, octet * 8 + 6, count, pad)
    return w0, w1, w2, w3


@triton.jit
def padding(stored):
    """Two patterns with the palette's first exponent, of a stored codebook."""
    exponent = tl.load(stored).to(tl.int32)
    return exponent << 7 | exponent << 23


@triton.jit(do_not_specialize=["numel"])
def normalizer_kernel(weights, norm, numel, N: tl.constexpr, FIRST_WARP: tl.constexpr, SCAN: tl.constexpr):
    """The fraction of the largest magnitude of each N weights. FIRST_WARP: of their first 32 but in the first block of
    each SCAN = 1024 weights (`fields.normalizers`, authors_v1)."""
    column = tl.arange(0, N)[None, :]
    block = tl.arange(0, SCAN // N)[:, None]
    place = tl.program_id(0).to(tl.int64) * SCAN + block * N + column
    magnitude = tl.load(weights + place, mask=place < numel, other=0).to(tl.int32) & 0x7FFF
    if FIRST_WARP:
        magnitude = tl.where((block == 0) | (column < 32), magnitude, 0)
    top = tl.max(magnitude, 1)
    where = tl.program_id(0).to(tl.int64) * (SCAN // N) + tl.arange(0, SCAN // N)
    tl.store(norm + where, (top << 1).to(tl.uint8), mask=where * N < numel)


@triton.jit
def lengths_of(w0, w1, w2, w3, pairs, lowest, width):
    """Of eight weights, bits and 2^14 times the escapes; and a number that is 2^30 or more if there are any."""
    e0, e1 = entry_of(w0, pairs, lowest, width), entry_of(w1, pairs, lowest, width)
    e2, e3 = entry_of(w2, pairs, lowest, width), entry_of(w3, pairs, lowest, width)
    return (e0 >> 16) + (e1 >> 16) + (e2 >> 16) + (e3 >> 16), e0 | e1 | e2 | e3


@triton.jit
def last_octet(mine, items, scales, octet, count, LANES: tl.constexpr, K: tl.constexpr, LOG_NORM: tl.constexpr):
    """The incomplete octet behind a block's complete ones, as stored, and its sum; its lane writes its plane."""
    w0, w1, w2, w3 = load_last(mine, octet, count)
    w0, w1, w2, w3, scale = as_stored(w0, w1, w2, w3, scales, octet, count, LANES, K, LOG_NORM)
    store_plane(items, octet, octet == count // 8, w0, w1, w2, w3, K)
    return w0, w1, w2, w3, octet_sum(w0, w1, w2, w3, octet, scale, LOG_NORM)


@triton.jit(do_not_specialize=["numel"])
def size_kernel(
    weights, norm, stored, pairs, units, directory, most, patch_directory, escaping, sums, plane, numel,
    OCTETS: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, PALETTE: tl.constexpr, ALIGNED: tl.constexpr,
    K: tl.constexpr, LOG_NORM: tl.constexpr,
):  # fmt: skip
    """Units of each lane; of each block words and patches, where its beginnings will stand, largest units and sum, and
    which of its steps have patches (`bit_of_step`). And the plane: here memory has time for it, where streams are
    written threads have none."""
    block = tl.program_id(0)
    lane = tl.arange(0, LANES)
    pad = padding(stored)
    lowest, width = window_of(stored, PALETTE)
    both = tl.zeros([LANES], dtype=tl.uint32)  # bits, below 2^14, and 2^14 times the escapes
    total = tl.zeros([LANES], dtype=tl.uint32)
    steps = tl.zeros([LANES], dtype=tl.int32)
    mine, items, scales, count = within_block(weights, plane, norm, block, numel, OCTETS * LANES * 8, LOG_NORM)
    n0, n1, n2, n3 = load_octet(mine, lane, count, LANES, ALIGNED)
    for t in tl.range(0, OCTETS, loop_unroll_factor=2):
        octet = t * LANES + lane
        w0, w1, w2, w3, scale = as_stored(n0, n1, n2, n3, scales, octet, count, LANES, K, LOG_NORM)
        n0, n1, n2, n3 = load_octet(mine, octet + LANES, count, LANES, ALIGNED)
        complete = octet * 8 + 8 <= count
        store_plane(items, octet, complete, w0, w1, w2, w3, K)
        total += octet_sum(w0, w1, w2, w3, octet, scale, LOG_NORM)
        w0, w1, w2, w3 = (
            tl.where(complete, w0, pad), tl.where(complete, w1, pad), tl.where(complete, w2, pad),
            tl.where(complete, w3, pad),
        )  # fmt: skip
        more, flags = lengths_of(w0, w1, w2, w3, pairs, lowest, width)
        both += more
        steps |= (flags >= 1 << 30).to(tl.int32) << bit_of_step(t, OCTETS)
    if count % 8 != 0:  # an octet of padding was counted in place of the last one
        octet = count // (8 * LANES) * LANES + lane
        begun = octet == count // 8
        w0, w1, w2, w3, more = last_octet(mine, items, scales, octet, count, LANES, K, LOG_NORM)
        total += more
        w0, w1, w2, w3 = padded_octet(w0, w1, w2, w3, octet, count, pad)
        length, flags = lengths_of(w0, w1, w2, w3, pairs, lowest, width)
        empty = lane * 0 + pad
        counted, _flags = lengths_of(empty, empty, empty, empty, pairs, lowest, width)
        both += tl.where(begun, length - counted, 0)
        steps |= (begun & (flags >= 1 << 30)).to(tl.int32) << bit_of_step(count // (8 * LANES), OCTETS)
    size = ((both & 0x3FFF).to(tl.int32) + (UNIT - 1)) // UNIT
    tl.store(units + block.to(tl.int64) * LANES + lane, size.to(tl.uint8))
    tl.store(directory + block, (tl.sum(size, 0) * UNIT + 31) // 32)
    tl.store(most + block, tl.max(size, 0))
    tl.store(patch_directory + block, tl.sum((both >> 14).to(tl.int32), 0))
    tl.store(escaping + block, tl.reduce(steps, 0, either))
    tl.store(sums + block, tl.sum(total, 0).to(tl.int32, bitcast=True))


@triton.jit
def directory_of(directory, at, carried, count):
    """Puts exclusive sums of some sizes in their place, and gives the sum of all so far."""
    size = tl.load(directory + at, mask=at < count, other=0)
    tl.store(directory + at, carried + tl.cumsum(size, 0) - size, mask=at < count)
    return carried + tl.sum(size, 0)


@triton.jit(do_not_specialize=["blocks"])
def scan_kernel(
    most, directory, patch_directory, note, host, blocks,
    NOTED: tl.constexpr, STREAMS: tl.constexpr, STEP: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Where blocks begin, and the end (directories, blocks + 1, sizes before), in one program. host: words, patches,
    largest units, and what stands behind these in NOTED words of a note. STREAMS: there are words and units, not
    patches alone. Where a lane has more than MOST units, which the host refuses, the end is -1: there is no room for
    it, wherever `write_kernel` was told to write."""
    all_words = 0
    all_patches = 0
    largest = 0
    for first in range(0, blocks, STEP):
        at = first + tl.arange(0, STEP)
        all_patches = directory_of(patch_directory, at, all_patches, blocks)
        if STREAMS:
            all_words = directory_of(directory, at, all_words, blocks)
            largest = tl.maximum(largest, tl.max(tl.load(most + at, mask=at < blocks, other=0), 0))
    tl.store(patch_directory + blocks, all_patches)
    if STREAMS:
        tl.store(directory + blocks, tl.where(largest > MOST, -1, all_words))
    place = tl.arange(0, NOTED)
    told = tl.where(place == 0, all_words, tl.where(place == 1, all_patches, largest))
    tl.store(host + place, tl.where(place < 3, told, tl.load(note + place)))


@triton.jit
def write_block(
    block, blocks, fits, weights, norm, stored, pairs, units, directory, payload, numel,
    OCTETS: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, GUARD: tl.constexpr, PALETTE: tl.constexpr,
    ALIGNED: tl.constexpr, K: tl.constexpr, LOG_NORM: tl.constexpr,
):  # fmt: skip
    """Streams. A lane writes whole words of 64 bits, the first one too, of which its neighbours own the lowest bytes;
    they write theirs after all of that. A block begins and ends on 32 bits, and writes none of another's. The last
    block writes the guard of zeros behind the payload. Where it does not fit, nothing is written: whether it does is
    asked for together with all else, and a branch around this would wait for it."""
    lane = tl.arange(0, LANES)
    pad = padding(stored)
    lowest, width = window_of(stored, PALETTE)
    size = tl.load(units + block.to(tl.int64) * LANES + lane).to(tl.int32)
    begin = tl.load(directory + block).to(tl.int64)
    stream = payload.to(tl.pointer_type(tl.int64)) + (begin >> 1)
    odd = (begin & 1).to(tl.int32)
    apart = (lane * 0 + odd) != 0
    if block == blocks - 1:
        behind = tl.arange(0, 256)
        end = tl.load(directory + block + 1).to(tl.int64)
        tl.store(payload + end + behind, behind * 0, mask=fits & (behind < GUARD))
    start = (tl.cumsum(size, 0) - size) * UNIT + odd * 32
    head = start >> 6
    word = head
    filled = (start & 63).to(tl.uint32)
    window = tl.zeros([LANES], dtype=tl.uint64)
    mine, _plane, scales, count = within_block(weights, norm, norm, block, numel, OCTETS * LANES * 8, LOG_NORM)
    n0, n1, n2, n3 = load_octet(mine, lane, count, LANES, ALIGNED, pad)
    last = count // (8 * LANES)  # the step of an incomplete octet, if there is one
    steps = tl.where(fits, tl.where(count % 8 != 0, last, OCTETS), 0)
    for t in tl.range(0, steps, loop_unroll_factor=2 if K == 7 else 1):
        octet = t * LANES + lane
        w0, w1, w2, w3, _ = as_stored(n0, n1, n2, n3, scales, octet, count, LANES, K, LOG_NORM)
        n0, n1, n2, n3 = load_octet(mine, octet + LANES, count, LANES, ALIGNED, pad)
        word, window, filled = put_octet(stream, word, window, filled, apart, w0, w1, w2, w3, pairs, lowest, width)
    if fits & (count % 8 != 0):
        octet = last * LANES + lane
        w0, w1, w2, w3 = load_last(mine, octet, count)
        begun = octet == count // 8
        w0, w1 = tl.where(begun, w0, n0), tl.where(begun, w1, n1)
        w2, w3 = tl.where(begun, w2, n2), tl.where(begun, w3, n3)
        w0, w1, w2, w3, _ = as_stored(w0, w1, w2, w3, scales, octet, count, LANES, K, LOG_NORM)
        w0, w1, w2, w3 = padded_octet(w0, w1, w2, w3, octet, count, pad)
        word, window, filled = put_octet(stream, word, window, filled, apart, w0, w1, w2, w3, pairs, lowest, width)
        empty = lane * 0 + pad
        for _ in range(last + 1, OCTETS):
            word, window, filled = put_octet(
                stream, word, window, filled, apart, empty, empty, empty, empty, pairs, lowest, width
            )
    first = tl.where(word == head, (start & 63) >> 3, 0)
    # a block ends on 32 bits: what its last lane leaves of them is zeros
    left = filled.to(tl.int32)
    own_end = (left + (UNIT - 1)) // UNIT * (UNIT // 8)
    end = tl.where(lane == LANES - 1, (left + 31) // 32 * 4, own_end)
    tl.debug_barrier()
    store_bytes(stream.to(tl.pointer_type(tl.uint8)), word, window, first, tl.where(fits, end, first))


@triton.jit
def two_codes(word, offset):
    """Codes of four bits of two patterns in a byte, 0 for exponents that have none; both are computed in one word.
    offset: in both halves, 512 less the exponent before the first that has a code."""
    code = ((word >> 7) & 0x00FF00FF) + offset  # 512 + 0 to 15; others, from 257 to 768, have one of the bits 4 to 8
    other = ((code & 0x01F001F0) + 0x01F001F0) >> 9 & 0x00010001
    code = code & 0x000F000F & ~(other * 15)
    return (code | code >> 12) & 0xFF


@triton.jit
def known_of(codes):
    """How many of eight codes of four bits are not 0."""
    some = codes | (codes >> 1)
    some = (some | (some >> 2)) & 0x11111111
    return (some.to(tl.uint32, bitcast=True) * 0x11111111 >> 28).to(tl.int32)


@triton.jit
def octet_codes(w0, w1, w2, w3, offset):
    """`two_codes` of four words."""
    return (
        two_codes(w0, offset) | two_codes(w1, offset) << 8 | two_codes(w2, offset) << 16 | two_codes(w3, offset) << 24
    )


@triton.jit(do_not_specialize=["numel"])
def fix4_kernel(
    weights, norm, lowest, payload, plane, patch_directory, escaping, sums, numel,
    OCTETS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, K: tl.constexpr, LOG_NORM: tl.constexpr,
):  # fmt: skip
    """Codes of four bits (`fix4.encode`), plane, patches and sum of a block, its steps with some (`bit_of_step`)."""
    block = tl.program_id(0)
    lane = tl.arange(0, LANES)
    offset = (513 - tl.load(lowest).to(tl.int32)) * 0x00010001
    escapes = tl.zeros([LANES], dtype=tl.int32)
    steps = tl.zeros([LANES], dtype=tl.int32)
    total = tl.zeros([LANES], dtype=tl.uint32)
    mine, items, scales, count = within_block(weights, plane, norm, block, numel, OCTETS * LANES * 8, LOG_NORM)
    n0, n1, n2, n3 = load_octet(mine, lane, count, LANES, ALIGNED)
    for t in tl.range(0, OCTETS, loop_unroll_factor=2):
        octet = t * LANES + lane
        complete = octet * 8 + 8 <= count
        w0, w1, w2, w3, scale = as_stored(n0, n1, n2, n3, scales, octet, count, LANES, K, LOG_NORM)
        n0, n1, n2, n3 = load_octet(mine, octet + LANES, count, LANES, ALIGNED)
        store_plane(items, octet, complete, w0, w1, w2, w3, K)
        total += octet_sum(w0, w1, w2, w3, octet, scale, LOG_NORM)
        codes = octet_codes(w0, w1, w2, w3, offset)
        tl.store(payload + block.to(tl.int64) * (OCTETS * LANES) + octet, codes, mask=complete)
        here = tl.where(complete, 8 - known_of(codes), 0)  # behind the last weight, zeros may have a code
        steps |= (here > 0).to(tl.int32) << bit_of_step(t, OCTETS)
        escapes += here
    if count % 8 != 0:
        octet = count // (8 * LANES) * LANES + lane
        begun = octet == count // 8
        w0, w1, w2, w3, more = last_octet(mine, items, scales, octet, count, LANES, K, LOG_NORM)
        total += more
        codes = octet_codes(w0, w1, w2, w3, offset) & ((1 << (4 * (count % 8))) - 1)
        tl.store(payload + block.to(tl.int64) * (OCTETS * LANES) + octet, codes, mask=begun)
        here = tl.where(begun, count % 8 - known_of(codes), 0)
        steps |= (here > 0).to(tl.int32) << bit_of_step(count // (8 * LANES), OCTETS)
        escapes += here
    tl.store(patch_directory + block, tl.sum(escapes, 0))
    tl.store(escaping + block, tl.reduce(steps, 0, either))
    tl.store(sums + block, tl.sum(total, 0).to(tl.int32, bitcast=True))


@triton.jit
def patch_block(
    block, fits, weights, norm, index, escaping, patches, patch_directory, room, numel,
    OCTETS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, K: tl.constexpr, LOG_NORM: tl.constexpr,
):  # fmt: skip
    """Places and exponents of weights of index 15, in order, as far as there is room; other steps are not read."""
    lane = tl.arange(0, LANES)
    done = tl.load(patch_directory + block)
    steps = tl.load(escaping + block)
    if fits & (steps != 0):
        mine, _plane, scales, count = within_block(weights, norm, norm, block, numel, OCTETS * LANES * 8, LOG_NORM)
        for t in range(OCTETS):
            if ((steps >> bit_of_step(t, OCTETS)) & 1) != 0:
                octet = t * LANES + lane
                w0, w1, w2, w3 = load_octet(mine, octet, count, LANES, ALIGNED)
                if count % 8 != 0:  # zeros are what both give elsewhere
                    v0, v1, v2, v3 = load_last(mine, octet, count)
                    w0, w1, w2, w3 = w0 | v0, w1 | v1, w2 | v2, w3 | v3
                w0, w1, w2, w3, _ = as_stored(w0, w1, w2, w3, scales, octet, count, LANES, K, LOG_NORM)
                escapes = tl.zeros([LANES], dtype=tl.int32)  # bit j: the weight j
                number = tl.zeros([LANES], dtype=tl.int32)
                for j in tl.static_range(8):
                    word = w0 if j < 2 else (w1 if j < 4 else (w2 if j < 6 else w3))
                    known = tl.load(index + ((word >> (7 + 16 * (j % 2))) & 0xFF)) != 15
                    escape = ((octet * 8 + j < count) & (known == 0)).to(tl.int32)
                    escapes |= escape << j
                    number += escape
                where = done + tl.cumsum(number, 0) - number
                for j in tl.static_range(8):
                    word = w0 if j < 2 else (w1 if j < 4 else (w2 if j < 6 else w3))
                    escape = (escapes >> j) & 1
                    patch = (octet * 8 + j) | ((word >> (7 + 16 * (j % 2))) & 0xFF) << 24
                    tl.store(patches + where, patch, mask=(escape == 1) & (where < room))
                    where += escape
                done += tl.sum(number, 0)


@triton.jit(do_not_specialize=["room", "numel"])
def patch_kernel(
    weights, norm, index, escaping, patches, patch_directory, room, numel,
    OCTETS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, K: tl.constexpr, LOG_NORM: tl.constexpr,
):  # fmt: skip
    """`patch_block` of all blocks."""
    patch_block(
        tl.program_id(0), True, weights, norm, index, escaping, patches, patch_directory, room, numel, OCTETS, LANES,
        ALIGNED, K, LOG_NORM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["parts", "limit", "each", "fewest", "most_words", "most_patches", "numel"])
def write_kernel(
    weights, norm, stored, pairs, index, units, escaping, directory, patch_directory, payload, patches, decoding, left,
    parts, limit, each, fewest, most_words, most_patches, numel,
    OCTETS: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, GUARD: tl.constexpr, PALETTE: tl.constexpr,
    ALIGNED: tl.constexpr, K: tl.constexpr, LOG_NORM: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """`write_block` of all blocks by one program each; and by another, beside it, `patch_block`, if there are two
    (`each`): that one waits for memory most of the time, and what it reads was just read. The first `parts` programs
    write the table to decode a new codebook with: they are few, and soon make room for others.

    What is told of the room may have been guessed before the host knew what it has to hold: streams are written where
    they have from `fewest` to `most_words` words, and patches as far as there is room."""
    place = tl.program_id(0) - parts
    block = place // each
    blocks = (tl.num_programs(0) - parts) // each
    words = tl.load(directory + blocks)
    fits = (words >= fewest) & (words <= most_words)
    if place < 0:
        store_decoding(decoding, left, tl.program_id(0), limit, CODES)
    elif place % each == 0:
        write_block(
            block, blocks, fits, weights, norm, stored, pairs, units, directory, payload, numel, OCTETS, LANES, UNIT,
            GUARD, PALETTE, ALIGNED, K, LOG_NORM,
        )  # fmt: skip
    else:
        patch_block(
            block, fits, weights, norm, index, escaping, patches, patch_directory, most_patches, numel, OCTETS, LANES,
            ALIGNED, K, LOG_NORM,
        )  # fmt: skip
