"""Forward kernels: log-sum-exp over the vocabulary and the target's logit of every counting token.

Paper section 4.1-4.2, without its locks: a program owns a row block and a strip of the vocabulary, keeps a running
maximum and sum in registers, and writes one pair a row; a second kernel combines the strips in a fixed order. While a
tile of logits is in registers its largest entry per row and group of 128 ids is kept as a byte, so that the backward
pass knows which tiles the gradient filter drops before it recomputes anything.

The byte is ceil(STEPS * octaves(1 + x)) + LOWEST. `octaves` is the logarithm to base 2, but straight between the powers
of two; x = maximum - base - ln eps in nats, with base the log-sum-exp over the row's target and the first 128 ids, less
a 2048th of it. log-sum-exp of all ids, which the filter compares with, is not known yet, but it is never below the base
and mostly little above it, where the steps are the finest: a 68th of a nat up to one nat above the base, twice that up
to three, and so on. 127, from 12.65 nats above (the logarithm of 311,000 ids), stands for "always kept", -127 for
"below the base", which is dropped unless rounding puts log-sum-exp there too, and -128 for rows and groups outside the
matrix.
"""

import triton
import triton.language as tl

from paperlm_kernels.cross_entropy.tiles import LN2, LOG2E, finish_logits, gather_block, load_block, load_rows, place_of

ALWAYS = tl.constexpr(127)
NEVER = tl.constexpr(-128)
STEPS = tl.constexpr(68.0)
LOWEST = tl.constexpr(-126.0)
# what log-sum-exp may be below the base for rounding: in nats, and as a share, which TF32 with its 11 bits needs
SLACK = tl.constexpr(0.001)
SHARE = tl.constexpr(2.0**-11)
IGNORED = tl.constexpr(-2)  # local id of a token that does not count; -1 is an id of another rank


@triton.jit
def steps_above(x):
    """Place of x nats above the base on the scale of the byte maxima, not rounded; -127 for what is below it."""
    # exponent and significand of a float, read as one number, are its octaves
    bits = (1.0 + tl.maximum(x + SLACK, 0.0)).to(tl.float32).to(tl.int32, bitcast=True)
    place = STEPS * ((bits - 0x3F800000).to(tl.float32) * 2.0**-23) + LOWEST
    return tl.where(x < -SLACK, -127.0, place)


@triton.jit
def base_of(base, packed, N_PAD):
    """Log-sum-exp over target and first ids of some rows, from the two parts that `base_kernel` stored, less SHARE."""
    first = tl.load(base + packed)
    own = tl.load(base + N_PAD + packed)
    top = tl.maximum(first, own)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = shift + tl.log(tl.exp(first - shift) + tl.exp(own - shift))
    return total - SHARE * tl.abs(total)


@triton.jit
def compact_kernel(
    target, target_stride, rows, targets, control, N, N_PAD, V, vocab_start, tiles, programs, most_together,
    EVERY_ROW: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Index of the counting tokens (target >= 0), their local ids (-1: another rank's), and the shape of the forward
    grid.

    EVERY_ROW: ignored tokens count too, with the local id IGNORED.

    control: [counting tokens, row blocks, strips a row block, 1 if every token counts, row blocks done together]. The
    last are at most `most_together`, so that their embeddings stay in L2 while all programs work on them.
    """
    count = 0
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        t = tl.load(target + i.to(tl.int64) * target_stride, mask=i < N, other=-1)
        ok = (t >= 0) | (EVERY_ROW & (i < N))
        position = count + tl.cumsum(ok.to(tl.int32), 0) - 1
        local = t - vocab_start
        local = tl.where(t < 0, IGNORED, tl.where((local >= 0) & (local < V), local, -1)).to(tl.int32)
        tl.store(rows + position, i, mask=ok)
        tl.store(targets + position, local, mask=ok)
        count += tl.sum(ok.to(tl.int32), 0)
    for start in range(0, N_PAD, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(rows + i, -1, mask=(i >= count) & (i < N_PAD))
        tl.store(targets + i, -1, mask=(i >= count) & (i < N_PAD))
    row_blocks = tl.cdiv(count, 128)
    together = tl.maximum(tl.cdiv(row_blocks, tl.maximum(tl.cdiv(row_blocks, most_together), 1)), 1)
    splits = 1
    best = 1e30
    for s in range(tl.minimum(tl.maximum(programs // together, 1), MAX_SPLITS), MAX_SPLITS + 1):
        # rounds of programs times the length of a strip; a strip costs about one tile to start
        cost = tl.cdiv(row_blocks * s, programs) * (tl.cdiv(tiles, s) + 1.0)
        if cost < best:
            best = cost
            splits = s
    tl.store(control, count)
    tl.store(control + 1, row_blocks)
    tl.store(control + 2, splits)
    tl.store(control + 3, (count == N).to(tl.int32))
    tl.store(control + 4, together)


@triton.jit
def base_kernel(
    E, C, bias, rows, targets, control, base, N_PAD, V, D, stride_e, stride_c, scale, cap,
    BK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """base (2, N_PAD) of every counting token: log-sum-exp over the first 128 ids, and the target's logit where it is
    not among them, else -inf. Grid: row blocks x 2.
    """
    block = tl.program_id(0)
    if block < tl.load(control + 1):
        packed = block * 128 + tl.arange(0, 128)
        row = tl.load(rows + packed)
        # Two programs, because they take as long as each other. Not one loop either: for a block that a product and
        # registers read, Triton 3.6 and 3.7 keep too few buffers, and the next block overwrites what wgmma still reads.
        if tl.program_id(1) == 0:
            ids = tl.arange(0, 128)
            z = tl.zeros([128, 128], tl.float32)
            for k in range(0, D, BK):
                e = gather_block(E, row, k, D, stride_e, BK)
                c = load_block(C, 0, k, V, D, stride_c, 128, BK, False)
                z = tl.dot(e, c.T, z, input_precision=PRECISION)
            z = finish_logits(z, bias, ids, V, scale, cap, HAS_BIAS, HAS_CAP)
            z = tl.where((ids < V)[None, :], z, float("-inf"))
            largest = tl.max(z, 1)
            shift = tl.where(largest == float("-inf"), 0.0, largest)
            total = shift + tl.log2(tl.sum(tl.exp2(z - shift[:, None]), 1))
            tl.store(base + packed, total * LN2)
        else:
            target = tl.load(targets + packed)
            own = tl.zeros([128], tl.float32)
            for k in range(0, D, BK):
                e = gather_block(E, row, k, D, stride_e, BK).to(tl.float32)
                own += tl.sum(e * gather_block(C, target, k, D, stride_c, BK).to(tl.float32), 1)
            own = tl.max(finish_logits(own[None, :], bias, target, V, scale, cap, HAS_BIAS, HAS_CAP), 0)
            tl.store(base + N_PAD + packed, tl.where(target >= 128, own * LN2, float("-inf")))


@triton.jit
def _sum_up(
    z, m, s, due, tile, block, row, target, packed, origin, bias, target_logit, maxima, kept, N_PAD, V, scale, cap,
    BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, MAXIMA: tl.constexpr,
    KEEP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Running (maximum, sum) with one more tile, given its product; stores its target logits, maxima and logits.

    due: the smallest target that no tile so far held. To look for targets in every tile would stop all warps for it.
    """
    ids = tile * BN + tl.arange(0, BN)
    z = finish_logits(z, bias, ids, V, scale, cap, HAS_BIAS, HAS_CAP)
    if KEEP:
        # as in every loss that holds its logits: the backward pass must not see others than the log-sum-exp did
        rounded = (z * LN2).to(DTYPE)
        kept.store([block * 128, tile * BN], rounded)
        z = rounded.to(tl.float32) * LOG2E
    if (tile + 1) * BN > V:
        z = tl.where((ids < V)[None, :], z, float("-inf"))
    if due < (tile + 1) * BN:
        own = tl.sum(tl.where(ids[None, :] == target[:, None], z, 0.0), 1)
        tl.store(target_logit + row, own * LN2, mask=(target >= tile * BN) & (target < (tile + 1) * BN))
        due = _least_target(target, (tile + 1) * BN)
    by_group = tl.reshape(z, [128, BN // 128, 128])
    group_max = tl.max(by_group, 2)
    if MAXIMA:
        byte = tl.minimum(tl.ceil(steps_above(group_max * LN2 - origin[:, None])), 127.0)
        byte = tl.where((group_max == float("-inf")) | (row < 0)[:, None], -128.0, byte)
        group = tile * (BN // 128) + tl.arange(0, BN // 128)
        tl.store(maxima + group.to(tl.int64)[None, :] * N_PAD + packed[:, None], byte.to(tl.int8))
    new_m = tl.maximum(m, tl.max(group_max, 1))
    # a row whose logits are all -inf so far has no maximum to subtract
    shift = tl.where(new_m == float("-inf"), 0.0, new_m)
    s = s * tl.exp2(m - shift) + tl.sum(tl.sum(tl.exp2(by_group - shift[:, None, None]), 2), 1)
    return new_m, s, due


@triton.jit
def _least_target(target, first_id):
    return tl.min(tl.where(target >= first_id, target, 2147483647), 0)


@triton.jit
def _strips(
    E, E_rows, C, bias, rows, targets, control, part_max, part_sum, target_logit, maxima, base, kept, N_PAD, V, D,
    stride_e, stride_c, scale, cap, log_eps,
    BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, GATHER: tl.constexpr, FLAT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, MAXIMA: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.load(control + 1)
    splits = tl.load(control + 2)
    together = tl.load(control + 4)
    tiles = tl.cdiv(V, BN)
    steps = tl.cdiv(D, BK)
    for unit in range(tl.program_id(0), row_blocks * splits, tl.num_programs(0)):
        # the row blocks done together walk their strips in step: a tile of C comes from memory once for all of them
        split, block = place_of(unit, splits, row_blocks, together)
        packed = block * 128 + tl.arange(0, 128)
        row = tl.load(rows + packed)
        target = tl.load(targets + packed)
        m = tl.full([128], float("-inf"), tl.float32)
        s = tl.zeros([128], tl.float32)
        origin = m
        if MAXIMA:
            origin = base_of(base, packed, N_PAD) + log_eps
        first = split * tiles // splits
        last = (split + 1) * tiles // splits
        due = _least_target(target, first * BN)
        if FLAT:
            # one loop over tiles and columns: the next tile's blocks are on their way while this one is summed up
            z = tl.zeros([128, BN], tl.float32)
            for i in range((last - first) * steps):
                tile = first + i // steps
                k = i % steps * BK
                e = load_rows(E, E_rows, row, block, k, D, stride_e, BK, GATHER)
                c = load_block(C, tile * BN, k, V, D, stride_c, BN, BK, TMA)
                z = tl.dot(e, c.T, z, input_precision=PRECISION)
                if i % steps == steps - 1:
                    m, s, due = _sum_up(
                        z, m, s, due, tile, block, row, target, packed, origin, bias, target_logit, maxima, kept, N_PAD,
                        V, scale, cap, BN, HAS_BIAS, HAS_CAP, MAXIMA, KEEP, DTYPE,
                    )  # fmt: skip
                    z = tl.zeros([128, BN], tl.float32)
        else:
            for tile in range(first, last):
                z = tl.zeros([128, BN], tl.float32)
                for k in range(0, D, BK):
                    e = load_rows(E, E_rows, row, block, k, D, stride_e, BK, GATHER)
                    c = load_block(C, tile * BN, k, V, D, stride_c, BN, BK, TMA)
                    z = tl.dot(e, c.T, z, input_precision=PRECISION)
                m, s, due = _sum_up(
                    z, m, s, due, tile, block, row, target, packed, origin, bias, target_logit, maxima, kept, N_PAD,
                    V, scale, cap, BN, HAS_BIAS, HAS_CAP, MAXIMA, KEEP, DTYPE,
                )  # fmt: skip
        tl.store(part_max + split * N_PAD + packed, m)
        tl.store(part_sum + split * N_PAD + packed, s)


@triton.jit
def forward_kernel(
    E, E_rows, C, bias, rows, targets, control, part_max, part_sum, target_logit, maxima, base, kept, N_PAD, V, D,
    stride_e, stride_c, scale, cap, log_eps,
    BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, FLAT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr, MAXIMA: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Running (maximum, sum) in base 2 of every strip, the target logits, and the byte maxima (groups, N_PAD).

    KEEP: also the logits, rounded to the inputs' dtype, through a descriptor of (N, V); needs every row and TMA.

    FLAT: one loop instead of a loop over columns within one over tiles. It hides the start of a tile and is the faster
    one where a row has few columns (768); with many (2304) the plain loops are.

    With descriptors (TMA) the rows of E are read in place when every token counts, else gathered; which of the two is
    known on the device only, and reading it on the host would stop the queue.
    """
    dense = False
    if TMA:
        dense = tl.load(control + 3) > 0
    if dense:
        if TMA:
            _strips(
                E, E_rows, C, bias, rows, targets, control, part_max, part_sum, target_logit, maxima, base, kept, N_PAD,
                V, D, stride_e, stride_c, scale, cap, log_eps, BN, BK, TMA, False, FLAT, HAS_BIAS, HAS_CAP,
                MAXIMA, KEEP, PRECISION, DTYPE,
            )  # fmt: skip
    else:
        _strips(
            E, E_rows, C, bias, rows, targets, control, part_max, part_sum, target_logit, maxima, base, kept, N_PAD, V,
            D, stride_e, stride_c, scale, cap, log_eps, BN, BK, TMA, True, FLAT, HAS_BIAS, HAS_CAP, MAXIMA, KEEP,
            PRECISION, DTYPE,
        )  # fmt: skip


@triton.jit
def combine_kernel(part_max, part_sum, rows, targets, control, lse, N_PAD, EVERY_ROW: tl.constexpr):
    """Log-sum-exp of every counting token from its strips, in the order of the strips. EVERY_ROW: 0 for an ignored
    token."""
    block = tl.program_id(0)
    if block < tl.load(control + 1):
        packed = block * 128 + tl.arange(0, 128)
        row = tl.load(rows + packed)
        m = tl.load(part_max + packed)
        s = tl.load(part_sum + packed)
        for split in range(1, tl.load(control + 2)):
            m2 = tl.load(part_max + split * N_PAD + packed)
            s2 = tl.load(part_sum + split * N_PAD + packed)
            top = tl.maximum(m, m2)
            shift = tl.where(top == float("-inf"), 0.0, top)
            s = s * tl.exp2(m - shift) + s2 * tl.exp2(m2 - shift)
            m = top
        total = (m + tl.log2(s)) * LN2
        if EVERY_ROW:
            total = tl.where(tl.load(targets + packed) == IGNORED, 0.0, total)
        tl.store(lse + row, total, mask=row >= 0)
