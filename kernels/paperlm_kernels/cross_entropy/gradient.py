"""First backward kernel: the gradient of the logits of a wave's tiles.

With g = a S + b onehot (a, b: upstream gradients of log-sum-exp and target logit) and q = g cap'(z), the gradients are
dE = scale q C, dC = scale q^T E, db = sum of q over tokens (paper section 4.3). A wave is a range of vocabulary groups
whose q fits the scratch buffer. `gradient_kernel` recomputes the logits of the wave's tiles and stores q, rounded once
to the inputs' dtype, into slots of 128 tokens x 128 ids; products.py multiplies.

Most entries of a kept tile are far below the filter's threshold: a few columns keep it. In 16 bits, and where both
gradients are filtered, those below a 4096th of the threshold are stored as zeros. The card's power limits the products,
and a factor of zero takes less of it. What it changes is in the package's README.

C is the classifier, or its rows in a given order of the vocabulary (see reorder.py), then in the storage of dC. List
entries are read one unit before they are used, so that no block waits for its own address.
"""

import triton
import triton.language as tl

from paperlm_kernels.cross_entropy.tiles import (
    COUNTS,
    LN2,
    LOG2E,
    finish_logits,
    halves,
    load_block,
    load_rows,
    place_of,
)


@triton.jit
def upstream_kernel(rows, lse, d_lse, d_target, upstream, N_PAD, BLOCK: tl.constexpr):
    """What the gradient needs of every counting token, packed in their order: (3, N_PAD) of log-sum-exp in base 2
    and the two upstream gradients, so that no address waits for a row number. Padding: inf, 0, 0. Grid: token
    chunks."""
    packed = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = packed < N_PAD
    row = tl.load(rows + packed, mask=inside, other=-1)
    real = row >= 0
    tl.store(upstream + packed, tl.load(lse + row, mask=real, other=float("inf")) * LOG2E, mask=inside)
    tl.store(upstream + N_PAD + packed, tl.load(d_lse + row, mask=real, other=0.0), mask=inside)
    tl.store(upstream + 2 * N_PAD + packed, tl.load(d_target + row, mask=real, other=0.0), mask=inside)


@triton.jit
def _store_slot(scratch, slot, q, TMA: tl.constexpr):
    if TMA:
        scratch.store([slot * 128, 0], q)
    else:
        i = slot.to(tl.int64) * 16384 + tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
        tl.store(scratch + i, q)


@triton.jit
def _finish_tile(
    z, bias, target, log_sum, a, b, alive, group, last, V, scale, cap, eps, tiny,
    FLAG: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """q of one tile from its product, rounded to DTYPE; FLAG: writes whether the filter keeps it to `alive`.

    tiny: probabilities below it count as zero. target: of each row, its place in the vocabulary order.
    """
    place = group * 128 + tl.arange(0, 128)
    z = finish_logits(z, bias, place, V, scale, cap, HAS_BIAS, HAS_CAP)
    if group * 128 + 128 > V:
        z = tl.where((place < V)[None, :], z, float("-inf"))
    p = tl.exp2(z - log_sum[:, None])
    q = tl.where(p < tiny, 0.0, p * a[:, None])  # a probability that is not a number stays it
    own = (target >= group * 128) & (target < group * 128 + 128)
    any_own = tl.max(own.to(tl.int32), 0)
    if any_own > 0:
        q += tl.where(place[None, :] == target[:, None], b[:, None], 0.0)
    if FLAG:
        # a row that is padding has log_sum = inf, hence p = 0
        kept = tl.maximum(tl.max((tl.max(p, 1) >= eps).to(tl.int32), 0), any_own)
        tl.store(alive + group, kept.to(tl.int8), mask=group < last)
    if HAS_CAP:
        r = tl.maximum(z * (LN2 / cap), -1.0)
        q = q * (1.0 - r * r)
    return q.to(DTYPE)


@triton.jit
def _pair(unit, entry, row_slots, row_groups, first, last, row_blocks, chunk, groups, LISTED: tl.constexpr):
    """Row block, two groups and their slots of a unit; `groups`, where a descriptor reads zeros, for a group that is
    not there."""
    if LISTED:
        at = entry // 2
        block = at // groups
        left_group = tl.load(row_groups + at, mask=entry >= 0, other=groups).to(tl.int32)
        left_slot = tl.load(row_slots + at, mask=entry >= 0, other=0)
        whole = (entry >= 0) & (entry % 2 == 1)
        right_group = tl.load(row_groups + at + 1, mask=whole, other=groups).to(tl.int32)
        right_slot = tl.load(row_slots + at + 1, mask=whole, other=0)
    else:
        pair, block = place_of(unit, tl.cdiv(last - first, 2), row_blocks, chunk)
        left = first + pair * 2
        left = tl.where(block < row_blocks, left, last)  # a unit beyond the last
        left_group = tl.where(left < last, left, groups)
        right_group = tl.where(left + 1 < last, left + 1, groups)
        left_slot = (left - first) * row_blocks + block
        right_slot = left_slot + row_blocks
    return block, left_group, left_slot, right_group, right_slot


@triton.jit
def _finish_pair(
    left_z, right_z, left_group, right_group, left_slot, right_slot, block, bias, target, log_sum, a, b, scratch, base,
    alive, last, V, scale, cap, eps, tiny, groups,
    TMA: tl.constexpr, FLAG: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Stores q of a unit's tiles."""
    flags = alive + block.to(tl.int64) * groups
    q = _finish_tile(
        left_z, bias, target, log_sum, a, b, flags, left_group, last, V, scale, cap, eps, tiny, FLAG, HAS_BIAS, HAS_CAP,
        DTYPE,
    )  # fmt: skip
    _store_slot(scratch, base + left_slot, q, TMA)
    if right_group < groups:
        q = _finish_tile(
            right_z, bias, target, log_sum, a, b, flags, right_group, last, V, scale, cap, eps, tiny, FLAG, HAS_BIAS,
            HAS_CAP, DTYPE,
        )  # fmt: skip
        _store_slot(scratch, base + right_slot, q, TMA)


@triton.jit
def _gradient_tiles(
    E, E_rows, C, C_wide, bias, rows, targets, control, upstream, row_slots, row_groups, units, unit_counts, plan, wave,
    n_waves, scratch, alive, V, D, stride_e, stride_c, scale, cap, eps, tiny, groups, n_blocks, chunk,
    BK: tl.constexpr, TMA: tl.constexpr, GATHER: tl.constexpr, LISTED: tl.constexpr, FLAG: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.load(control + 1)
    first = tl.load(plan + wave)
    last = tl.load(plan + wave + 1)
    base = tl.load(plan + n_waves + 1 + wave)
    # A unit is a row block and two of its groups: they share the block of E, and neighbouring units share those of C in
    # L2.
    n_units = tl.cdiv(last - first, 2) * row_blocks
    if LISTED:
        start = tl.load(plan + 2 * n_waves + 1 + wave)
        base -= start
        units += start // 2 + wave * n_blocks
        n_units = tl.load(unit_counts + wave)
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    if program < n_units:
        # what the next two units need is read ahead
        entry = -1
        ahead = -1
        if LISTED:
            entry = tl.load(units + program)
            ahead = tl.load(units + program + programs, mask=program + programs < n_units, other=-1)
        block, left_group, left_slot, right_group, right_slot = _pair(
            program, entry, row_slots, row_groups, first, last, row_blocks, chunk, groups, LISTED
        )
        for unit in range(program, n_units, programs):
            next_block, a_group, a_slot, b_group, b_slot = _pair(
                unit + programs, ahead, row_slots, row_groups, first, last, row_blocks, chunk, groups, LISTED
            )
            if LISTED:
                beyond = unit + 2 * programs
                ahead = tl.load(units + beyond, mask=beyond < n_units, other=-1)
            if left_group < groups:
                packed = block * 128 + tl.arange(0, 128)
                row = packed
                if GATHER:
                    row = tl.load(rows + packed)
                target = tl.load(targets + packed)
                log_sum = tl.load(upstream + packed)
                a = tl.load(upstream + n_blocks * 128 + packed)
                b = tl.load(upstream + n_blocks * 256 + packed)
                # Groups that are neighbours are one block of twice the width, whose product reads less shared memory.
                # Each branch finishes its tiles itself, or ptxas serializes the products; as it does where both
                # branches add a bias, for want of registers.
                CAN_BE_WIDE: tl.constexpr = not (LISTED and HAS_BIAS)
                wide = CAN_BE_WIDE
                if CAN_BE_WIDE and LISTED:
                    wide = right_group == left_group + 1
                if wide:
                    if CAN_BE_WIDE:
                        z = tl.zeros([128, 256], tl.float32)
                        for k in range(0, D, BK):
                            e = load_rows(E, E_rows, row, block, k, D, stride_e, BK, GATHER)
                            c = load_block(C_wide, left_group * 128, k, V, D, stride_c, 256, BK, TMA)
                            z = tl.dot(e, c.T, z, input_precision=PRECISION)
                        left_z, right_z = halves(z)
                        _finish_pair(
                            left_z, right_z, left_group, right_group, left_slot, right_slot, block, bias, target,
                            log_sum, a, b, scratch, base, alive, last, V, scale, cap, eps, tiny, groups, TMA, FLAG,
                            HAS_BIAS, HAS_CAP, DTYPE,
                        )  # fmt: skip
                else:
                    if LISTED:
                        left_z = tl.zeros([128, 128], tl.float32)
                        right_z = tl.zeros([128, 128], tl.float32)
                        for k in range(0, D, BK):
                            e = load_rows(E, E_rows, row, block, k, D, stride_e, BK, GATHER)
                            left_c = load_block(C, left_group * 128, k, V, D, stride_c, 128, BK, TMA)
                            right_c = load_block(C, right_group * 128, k, V, D, stride_c, 128, BK, TMA)
                            left_z = tl.dot(e, left_c.T, left_z, input_precision=PRECISION)
                            right_z = tl.dot(e, right_c.T, right_z, input_precision=PRECISION)
                        _finish_pair(
                            left_z, right_z, left_group, right_group, left_slot, right_slot, block, bias, target,
                            log_sum, a, b, scratch, base, alive, last, V, scale, cap, eps, tiny, groups, TMA, FLAG,
                            HAS_BIAS, HAS_CAP, DTYPE,
                        )  # fmt: skip
            block, left_group, left_slot, right_group, right_slot = next_block, a_group, a_slot, b_group, b_slot


@triton.jit(do_not_specialize=COUNTS)
def gradient_kernel(
    E, E_rows, C, C_wide, bias, rows, targets, control, upstream, row_slots, row_groups, units, unit_counts, plan, wave,
    n_waves, scratch, alive, V, D, stride_e, stride_c, scale, cap, eps, tiny, groups, n_blocks, chunk,
    BK: tl.constexpr, TMA: tl.constexpr, LISTED: tl.constexpr, FLAG: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """q of the wave's tiles into its slots. LISTED: the tiles of the row lists; else all of them.

    FLAG: write alive (row blocks, groups) from the recomputed probabilities, for the preset that keeps no maxima.
    """
    dense = False
    if TMA:
        dense = tl.load(control + 3) > 0
    if dense:
        if TMA:
            _gradient_tiles(
                E, E_rows, C, C_wide, bias, rows, targets, control, upstream, row_slots, row_groups, units, unit_counts,
                plan, wave, n_waves, scratch, alive, V, D, stride_e, stride_c, scale, cap, eps, tiny, groups, n_blocks,
                chunk, BK, TMA, False, LISTED, FLAG, HAS_BIAS, HAS_CAP, PRECISION, DTYPE,
            )  # fmt: skip
    else:
        _gradient_tiles(
            E, E_rows, C, C_wide, bias, rows, targets, control, upstream, row_slots, row_groups, units, unit_counts,
            plan, wave, n_waves, scratch, alive, V, D, stride_e, stride_c, scale, cap, eps, tiny, groups, n_blocks,
            chunk, BK, TMA, True, LISTED, FLAG, HAS_BIAS, HAS_CAP, PRECISION, DTYPE,
        )  # fmt: skip
