"""Triton kernels that multiply a few tokens with a packed matrix without unpacking it."""

import triton
import triton.language as tl

from paperlm_kernels.neuzip.kernel_decode import (
    bfloat16_of,
    load_items,
    next_window,
    pair_word,
    sign_and_mantissa,
    two_entries,
    words_at,
)


@triton.jit
def float_of(pattern):
    """float32 of bfloat16 patterns (the lowest 16 bits of int32)."""
    return (pattern << 16).to(tl.float32, bitcast=True)


@triton.jit
def rounded(x):
    """Patterns of bfloat16 nearest to float32; NaN stays one."""
    return tl.where(x != x, 0x7FFF, bfloat16_of(x)).to(tl.int16)


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
    tl.store(y + m[:, None] * rows + row[None, :], rounded(out), mask=there)


@triton.jit
def both_of(words):
    """float32 of the lower and of the higher bfloat16 in int32."""
    return (words << 16).to(tl.float32, bitcast=True), (words & (-65536)).to(tl.float32, bitcast=True)


@triton.jit
def octet_product(x, w0, w1, w2, w3, inside):
    """Of each lane, the sum of eight weights times eight values, which begin at `x`, int64 with four of them each."""
    first = tl.load(x, mask=inside, other=0)
    second = tl.load(x + 1, mask=inside, other=0)
    a0, a1 = both_of(first.to(tl.int32))
    a2, a3 = both_of((first >> 32).to(tl.int32))
    a4, a5 = both_of(second.to(tl.int32))
    a6, a7 = both_of((second >> 32).to(tl.int32))
    b0, b1 = both_of(w0)
    b2, b3 = both_of(w1)
    b4, b5 = both_of(w2)
    b6, b7 = both_of(w3)
    return a0 * b0 + a1 * b1 + a2 * b2 + a3 * b3 + a4 * b4 + a5 * b5 + a6 * b6 + a7 * b7


@triton.jit(do_not_specialize=["numel", "columns", "tokens"])
def stream_product_kernel(
    payload, directory, units, table, plane, plane8, norm, patches, patch_directory, found, x, partial, numel, columns,
    tokens, OCTETS: tl.constexpr, LANES: tl.constexpr, LIMIT: tl.constexpr, UNIT: tl.constexpr, RUN: tl.constexpr,
    M: tl.constexpr, PATCHES: tl.constexpr,
):  # fmt: skip
    """Prefix codes without loss; a program decodes a block as `decode_kernel` does, and keeps nothing but sums.

    A run is RUN steps of all lanes, 1,024 weights each; RUN divides OCTETS, and its weights divide the columns. x int64
    (tokens, columns / 4); partial float32 (tokens, numel / weights of a run). M (1, 2, 4 or 8) is at least `tokens`.
    An escaped exponent is decoded as 0: so its weight is less than 2^-126, and the rest is added after.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, LANES)
    BLOCK: tl.constexpr = OCTETS * LANES * 8
    RUNS: tl.constexpr = OCTETS // RUN
    begin = tl.cast(block, tl.int64) * BLOCK
    count = tl.minimum(numel - begin, BLOCK).to(tl.int32)
    runs = numel // (RUN * LANES * 8)
    mine = partial + begin // (RUN * LANES * 8)
    items = plane + begin // 8
    size = tl.load(units + tl.cast(block, tl.int64) * LANES + lane).to(tl.int32)
    stream = payload + tl.load(directory + block)
    start = (tl.cumsum(size, 0) - size) * UNIT
    position, word, ending = start, start >> 5, start + size * UNIT
    w_low, w_high, w_ahead = words_at(stream, word)
    low, high = load_items(items, lane, lane * 8 < count, 7)
    token = columns // 4  # integers of one
    for run in range(RUNS):
        sum0 = tl.zeros([LANES], tl.float32)
        sum1, sum2, sum3, sum4, sum5, sum6, sum7 = sum0, sum0, sum0, sum0, sum0, sum0, sum0
        column = ((begin + run * (RUN * LANES * 8)) % columns).to(tl.int32)
        for step in range(RUN):
            after = (run * RUN + step + 1) * LANES + lane
            low_after, high_after = load_items(items, after, after * 8 < count, 7)
            window, word, w_low, w_high, w_ahead = next_window(stream, position, word, w_low, w_high, w_ahead)
            entry0, entry1, bits = two_entries(table, window, LIMIT)
            position += bits
            window, word, w_low, w_high, w_ahead = next_window(stream, position, word, w_low, w_high, w_ahead)
            entry2, entry3, bits = two_entries(table, window, LIMIT)
            position += bits
            w0, w1 = pair_word(entry0, low, 0, 7), pair_word(entry1, low, 2, 7)
            w2, w3 = pair_word(entry2, high, 0, 7), pair_word(entry3, high, 2, 7)
            inside = (after - LANES) * 8 < count  # zeros of x where there are no weights
            at = x + (column // 4 + (step * LANES + lane) * 2)
            sum0 += octet_product(at, w0, w1, w2, w3, inside)
            if M > 1:
                sum1 += octet_product(at + token, w0, w1, w2, w3, inside & (tokens > 1))
            if M > 2:
                sum2 += octet_product(at + 2 * token, w0, w1, w2, w3, inside & (tokens > 2))
                sum3 += octet_product(at + 3 * token, w0, w1, w2, w3, inside & (tokens > 3))
            if M > 4:
                sum4 += octet_product(at + 4 * token, w0, w1, w2, w3, inside & (tokens > 4))
                sum5 += octet_product(at + 5 * token, w0, w1, w2, w3, inside & (tokens > 5))
                sum6 += octet_product(at + 6 * token, w0, w1, w2, w3, inside & (tokens > 6))
                sum7 += octet_product(at + 7 * token, w0, w1, w2, w3, inside & (tokens > 7))
            low, high = low_after, high_after
        there = run * (RUN * LANES * 8) < count
        tl.store(mine + run, tl.sum(sum0, 0), mask=there)
        if M > 1:
            tl.store(mine + runs + run, tl.sum(sum1, 0), mask=there & (tokens > 1))
        if M > 2:
            tl.store(mine + 2 * runs + run, tl.sum(sum2, 0), mask=there & (tokens > 2))
            tl.store(mine + 3 * runs + run, tl.sum(sum3, 0), mask=there & (tokens > 3))
        if M > 4:
            tl.store(mine + 4 * runs + run, tl.sum(sum4, 0), mask=there & (tokens > 4))
            tl.store(mine + 5 * runs + run, tl.sum(sum5, 0), mask=there & (tokens > 5))
            tl.store(mine + 6 * runs + run, tl.sum(sum6, 0), mask=there & (tokens > 6))
            tl.store(mine + 7 * runs + run, tl.sum(sum7, 0), mask=there & (tokens > 7))
    wrong = ((ending - position) & (-UNIT)) != 0  # of the last unit there may be bits left
    tl.atomic_or(found + lane * 0, wrong.to(tl.int32), mask=wrong)
    first, last = tl.load(patch_directory + block), tl.load(patch_directory + block + 1)
    which = tl.arange(0, RUNS)
    for i in range(first, last, PATCHES):
        tl.debug_barrier()  # what other threads have stored is read
        index = i + tl.arange(0, PATCHES)
        patch = tl.load(patches + index, mask=index < last, other=0)
        place = patch & 0xFFFFFF
        patched = (index < last) & (place < count)
        item = tl.load(plane8 + begin + place, mask=patched, other=0).to(tl.int32)
        pattern = sign_and_mantissa(item, 0, 7)
        weight = float_of(pattern | ((patch >> 24) & 0xFF) << 7) - float_of(pattern)
        column = ((begin + place) % columns).to(tl.int32)
        for m in tl.static_range(M):
            here = patched & (m < tokens)
            four = tl.load(x + m * token + (column >> 2), mask=here, other=0)
            value = float_of((four >> (16 * (column & 3))).to(tl.int32))
            share = tl.where(here, value * weight, 0.0)
            runs_of = place // (RUN * LANES * 8)
            more = tl.sum(tl.where(runs_of[None, :] == which[:, None], share[None, :], 0.0), 1)
            there = (which * (RUN * LANES * 8) < count) & (m < tokens)
            to = mine + m * runs + which
            tl.store(to, tl.load(to, mask=there, other=0.0) + more, mask=there)
