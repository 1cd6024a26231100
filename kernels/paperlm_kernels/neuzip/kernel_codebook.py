"""Triton kernels that count exponents and make the codes of them: what `codebook` defines, without the host.

A codebook depends on 256 counts. To read them, to compute it in NumPy and to send it takes longer than to pack a layer.
"""

import triton
import triton.language as tl

from paperlm_kernels.neuzip.kernel_decode import within_block
from paperlm_kernels.neuzip.kernel_octets import as_stored, bit_of_step, either, load_last, load_octet
from paperlm_kernels.neuzip.kernel_pairs import store_pairs, window_of
from paperlm_kernels.neuzip.sample import SPREAD as _SPREAD

SPREAD = tl.constexpr(_SPREAD)


@triton.jit
def more_counted(
    mine, scales, counts, t, lowest, count, LANES: tl.constexpr, ALIGNED: tl.constexpr, K: tl.constexpr,
    LOG_NORM: tl.constexpr,
):  # fmt: skip
    """Of a step, adds the exponents that have no counter, where there is more than one among a lane's eight."""
    octet = t * LANES + tl.arange(0, LANES)
    one = tl.full([LANES], 1, tl.int64)
    w0, w1, w2, w3 = load_octet(mine, octet, count, LANES, ALIGNED)
    w0, w1, w2, w3, _ = as_stored(w0, w1, w2, w3, scales, octet, count, LANES, K, LOG_NORM)
    outside = tl.zeros([LANES], dtype=tl.int32)
    for j in tl.static_range(8):
        word = w0 if j < 2 else (w1 if j < 4 else (w2 if j < 6 else w3))
        exponent = (word >> (7 + 16 * (j % 2))) & 0xFF
        outside += ((exponent < lowest) | (exponent >= lowest + 15)).to(tl.int32)
    for j in tl.static_range(8):
        word = w0 if j < 2 else (w1 if j < 4 else (w2 if j < 6 else w3))
        exponent = (word >> (7 + 16 * (j % 2))) & 0xFF
        other = ((exponent < lowest) | (exponent >= lowest + 15)) & (exponent != 0)
        tl.atomic_add(counts + exponent, one, mask=other & (outside > 1), sem="relaxed")


@triton.jit
def last_counted(
    weights, norm, counts, block, numel, BLOCK: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr,
    LOG_NORM: tl.constexpr,
):  # fmt: skip
    """Of a block's incomplete octet, adds the exponents but 0: behind the last weight are zeros."""
    mine, _plane, scales, count = within_block(weights, norm, norm, block, numel, BLOCK, LOG_NORM)
    octet = count // (8 * LANES) * LANES + tl.arange(0, LANES)
    one = tl.full([LANES], 1, tl.int64)
    w0, w1, w2, w3 = load_last(mine, octet, count)
    w0, w1, w2, w3, _ = as_stored(w0, w1, w2, w3, scales, octet, count, LANES, K, LOG_NORM)
    for j in tl.static_range(8):
        word = w0 if j < 2 else (w1 if j < 4 else (w2 if j < 6 else w3))
        exponent = (word >> (7 + 16 * (j % 2))) & 0xFF
        tl.atomic_add(counts + exponent, one, mask=exponent != 0, sem="relaxed")


@triton.jit(do_not_specialize=["numel", "runs", "run", "programs"])
def count_kernel(
    weights, norm, counts, numel, runs, run, programs,
    OCTETS: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr, K: tl.constexpr, LOG_NORM: tl.constexpr,
):  # fmt: skip
    """How often each exponent but 0 occurs (256, int64, zeros before) in a block of each run: 0 is what remains.

    Nearly all exponents of a tensor are among 15 neighbours: these have counters in a thread's registers, of four bits
    for a step of eight weights, added up in eight bits, then in sixteen; so a program counts at most 8,184 steps. A
    single other among eight is added to `counts` at once; where there are more, the step is read once more.
    """
    lane = tl.arange(0, LANES)
    BLOCK: tl.constexpr = OCTETS * LANES * 8
    one = tl.full([LANES], 1, tl.int64)
    if (tl.program_id(0) == 0) & (run == 1) & (numel % 8 != 0):  # in the last block, if that is counted
        last_counted(weights, norm, counts, runs - 1, numel, BLOCK, LANES, K, LOG_NORM)
    # where the neighbours begin is guessed from a few weights; a bad guess costs time alone
    mine, _plane, scales, count = within_block(weights, norm, norm, tl.program_id(0), numel, BLOCK, LOG_NORM)
    n0, n1, n2, n3 = load_octet(mine, lane, count, LANES, ALIGNED)
    w0, _w1, _w2, _w3, _ = as_stored(n0, n1, n2, n3, scales, lane, count, LANES, K, LOG_NORM)
    some = (w0 >> 7) & 0xFF
    lowest = tl.sum(some, 0) // tl.maximum(tl.sum((some > 0).to(tl.int32), 0), 1) - 11
    lowest = tl.minimum(tl.maximum(lowest, 1), 241)
    a0 = tl.zeros([LANES], dtype=tl.int64)
    a1, a2, a3 = a0, a0, a0
    for number in range(tl.program_id(0), runs, programs):
        block = number * run + (((number * SPREAD) & 0xFFFF) * run >> 16)
        mine, _plane, scales, count = within_block(weights, norm, norm, block, numel, BLOCK, LOG_NORM)
        n0, n1, n2, n3 = load_octet(mine, lane, count, LANES, ALIGNED)
        others = tl.zeros([LANES], dtype=tl.int32)  # steps that have several exponents without a counter
        for part in range(OCTETS // 8):
            even = tl.zeros([LANES], dtype=tl.int64)
            odd = tl.zeros([LANES], dtype=tl.int64)
            for t in tl.range(0, 8, loop_unroll_factor=4 if K == 7 else 1):
                octet = (part * 8 + t) * LANES + lane
                w0, w1, w2, w3, _ = as_stored(n0, n1, n2, n3, scales, octet, count, LANES, K, LOG_NORM)
                n0, n1, n2, n3 = load_octet(mine, octet + LANES, count, LANES, ALIGNED)
                low = tl.zeros([LANES], dtype=tl.int32)  # halves of what no sum carries from one to the other
                high = tl.zeros([LANES], dtype=tl.int32)
                most = tl.zeros([LANES], dtype=tl.uint32)
                for j in tl.static_range(8):
                    word = w0 if j < 2 else (w1 if j < 4 else (w2 if j < 6 else w3))
                    above = ((word >> (5 + 16 * (j % 2))) & 0x3FC) - 4 * lowest
                    above = above.to(tl.uint32, bitcast=True)  # so that what is below is far above
                    counter = one << tl.minimum(above, 60).to(tl.int64)
                    low += counter.to(tl.int32)
                    high += (counter >> 32).to(tl.int32)
                    most = tl.maximum(most, above)
                nibbles = (low.to(tl.int64) & 0xFFFFFFFF) | high.to(tl.int64) << 32
                outside = (high >> 28) & 15
                exponent = lowest + (most.to(tl.int32, bitcast=True) >> 2)
                single = (outside == 1) & (exponent > 0)
                tl.atomic_add(counts + exponent, one, mask=single, sem="relaxed")
                others |= (outside > 1).to(tl.int32) << bit_of_step(part * 8 + t, OCTETS)
                even += nibbles & 0x0F0F0F0F0F0F0F0F
                odd += (nibbles >> 4) & 0x0F0F0F0F0F0F0F0F
            a0 += even & 0x00FF00FF00FF00FF
            a1 += odd & 0x00FF00FF00FF00FF
            a2 += (even >> 8) & 0x00FF00FF00FF00FF
            a3 += (odd >> 8) & 0x00FF00FF00FF00FF
        steps = tl.reduce(others, 0, either)
        if steps != 0:
            for t in range(OCTETS):
                if ((steps >> bit_of_step(t, OCTETS)) & 1) != 0:
                    more_counted(mine, scales, counts, t, lowest, count, LANES, ALIGNED, K, LOG_NORM)
    bins = tl.arange(0, 16)
    found = tl.zeros([16], dtype=tl.int64)
    for b in tl.static_range(15):
        counters16 = a0 if b % 4 == 0 else (a1 if b % 4 == 1 else (a2 if b % 4 == 2 else a3))
        found = tl.where(bins == b, tl.sum((counters16 >> (16 * (b // 4))) & 0xFFFF, 0), found)
    tl.atomic_add(counts + lowest + bins, found, mask=bins < 15, sem="relaxed")


@triton.jit
def all_counts(counts, numel):
    """What `count_kernel` left, and how often 0 occurs among so many (256, int64)."""
    place = tl.arange(0, 256)
    count = tl.load(counts + place)
    return tl.where(place == 0, numel - tl.sum(count, 0), count)


@triton.jit
def exchanged(key, place, stride, ascending):
    """Keys (unique) after those at a distance of `stride` were put in order."""
    other = tl.gather(key, place ^ stride, 0)
    return tl.where(((place & stride) == 0) == ascending, tl.minimum(key, other), tl.maximum(key, other))


@triton.jit
def in_order(key, log):
    """256 unique keys in ascending order (a bitonic network). log: 8, in a variable."""
    place = tl.arange(0, 256)
    for i in range(1, log + 1):
        ascending = ((place >> i) & 1) == 0
        for j in range(i):
            key = exchanged(key, place, 1 << (i - 1 - j), ascending)
    return key


@triton.jit
def package_merge(weights, limit):
    """Lengths (256) of codes for ascending weights (256, int64, below 2^41), as `codebook.package_merge` has them."""
    place = tl.arange(0, 512)
    NONE: tl.constexpr = 1 << 50  # heavier than everything; with the place in nine bits behind, within 63
    ascending = place >= 0
    single = tl.where(place < 256, tl.gather(weights, place & 255, 0), NONE)
    merged = single
    packaged = tl.zeros([512], dtype=tl.int32)  # bit i: of level i, whether it is a package of the level before
    for level in range(1, limit):
        # singles ascend, packages behind them descend: a sequence that one half of a network puts in order
        pair = (511 - place) & 255
        package = tl.gather(merged, 2 * pair, 0) + tl.gather(merged, 2 * pair + 1, 0)
        both = tl.where(place < 256, single, tl.minimum(package, NONE))
        key = both << 9 | tl.where(place < 256, place, 256 + pair)
        for j in range(9):
            key = exchanged(key, place, 256 >> j, ascending)
        merged = key >> 9
        packaged = packaged | ((key >> 8) & 1).to(tl.int32) << level
    lengths = tl.zeros([512], dtype=tl.int32)
    take = 510
    for j in range(limit):
        used = tl.sum(tl.where(place < take, (packaged >> (limit - 1 - j)) & 1, 0), 0)
        lengths += (place < take - used).to(tl.int32)
        take = 2 * used
    return tl.gather(lengths, tl.arange(0, 256), 0)


@triton.jit
def reversed_bits(code, length, limit):
    """The lowest `length` bits of a code in the other order."""
    turned = code * 0
    for bit in range(limit):
        turned = tl.where(bit < length, turned << 1 | ((code >> bit) & 1), turned)
    return turned


@triton.jit(do_not_specialize=["numel", "limit", "log"])
def codebook_kernel(
    counts, stored, index, packing, left, note, pairs, numel, limit, log, PALETTE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """`Codebook.of_counts` of `all_counts` in one program, as `stored`, `index`, `packing`, and `pairs` of `window_of`.

    Word 3 of `note` becomes how many of the counted have no index. left: 1,024 int32, of which `store_decoding` makes
    the last table: packing need not wait for it. limit, and log, which is 8, are no constants: with all loops unrolled,
    it would take longer to fetch the instructions than to execute them.
    """
    place = tl.arange(0, 256)
    count = all_counts(counts, numel)
    total = tl.maximum(tl.sum(count, 0), 1)
    # most frequent first, of equals the lower exponent
    key = in_order(((1 << 42) - count) << 8 | place, log)
    ranked, exponent = (1 << 42) - (key >> 8), (key & 255).to(tl.int32)
    tl.store(index + exponent, tl.minimum(place, 15).to(tl.uint8))
    tl.store(stored + place, exponent.to(tl.uint8), mask=place < 15)
    tl.store(left + place, tl.where(place < 15, exponent, 0))
    known = tl.where(place < 15, ranked, 0)
    escaped = tl.sum(count, 0) - tl.sum(known, 0)
    tl.store(note + 3, tl.minimum(escaped, 0x7FFFFFFF).to(tl.int32))
    ranked = tl.where(place == 15, escaped, known)
    share = tl.maximum((ranked << 20) // total, 1)
    weight = tl.gather(share, place >> 4, 0) * tl.gather(share, place & 15, 0)
    # lightest first, of equals the higher pair
    key = in_order(weight << 8 | (255 - place), log)
    tl.store(left + 256 + 255 - (key & 255), package_merge(key >> 8, limit))
    tl.debug_barrier()
    length = tl.load(left + 256 + place)
    even = tl.load(left + 256 + 2 * place, mask=place < 128, other=0)
    odd = tl.load(left + 256 + 2 * place + 1, mask=place < 128, other=0)
    tl.store(stored + 15 + place, (even | odd << 4).to(tl.uint8), mask=place < 128)
    # canonical: ascending by length, then by pair
    code = tl.zeros([256], dtype=tl.int32)
    rank = tl.zeros([256], dtype=tl.int32)
    first = 0
    before = 0
    for n in range(1, limit + 1):
        this = (length == n).to(tl.int32)
        within = tl.cumsum(this, 0) - this
        number = tl.sum(this, 0)
        code = tl.where(length == n, first + within, code)
        rank = tl.where(length == n, before + within, rank)
        tl.store(left + 768 + n, first)
        tl.store(left + 784 + n, number)
        first = (first + number) << 1
        before += number
    escapes = ((place >> 4) == 15).to(tl.int32) + ((place & 15) == 15).to(tl.int32)
    tl.store(packing + place, reversed_bits(code, length, limit) | length << 16 | escapes << 30)
    one, two = tl.load(left + (place >> 4)), tl.load(left + (place & 15))
    tl.store(left + 512 + rank, length | one << 7 | two << 23)
    tl.debug_barrier()
    lowest, width = window_of(stored, PALETTE)
    for part in range(width * width // PART):  # one, of nearly all codebooks
        store_pairs(index, packing, pairs, part, lowest, width, PART)


@triton.jit
def store_decoding(decoding, left, part, limit, CODES: tl.constexpr):
    """A part of `Codebook.decoding`, CODES entries, of what `codebook_kernel` left."""
    entry = part * CODES + tl.arange(0, CODES)
    ahead = reversed_bits(entry, tl.full([CODES], limit, tl.int32), limit)
    found = tl.full([CODES], -1, tl.int32)  # the rank of the code that it begins with
    before = 0
    for n in range(1, limit + 1):
        number = tl.load(left + 784 + n)
        inner = (ahead >> (limit - n)) - tl.load(left + 768 + n)
        found = tl.where((found < 0) & (inner >= 0) & (inner < number), before + inner, found)
        before += number
    tl.store(decoding + entry, tl.load(left + 512 + found, mask=found >= 0, other=limit))


@triton.jit(do_not_specialize=["numel"])
def lowest_kernel(counts, lowest, index, note, numel):
    """`fix4.lowest_exponent` of `all_counts`, and an index that says 15 of all other exponents than its 15. note: its
    word 3 becomes how many of the counted have none of these."""
    place = tl.arange(0, 256)
    count = all_counts(counts, numel)
    upto = tl.cumsum(count, 0)
    covered = tl.gather(upto, tl.minimum(place + 14, 255), 0) - upto + count
    key = tl.where(place <= 241, covered << 8 | (255 - place), 0)
    most = tl.max(key, 0)
    best = 255 - (most & 255).to(tl.int32)
    tl.store(note + 3, tl.minimum(tl.sum(count, 0) - (most >> 8), 0x7FFFFFFF).to(tl.int32))
    tl.store(lowest, best.to(tl.uint8))
    tl.store(index + place, tl.where((place >= best) & (place < best + 15), 0, 15).to(tl.uint8))
