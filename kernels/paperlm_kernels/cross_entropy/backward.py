"""Backward kernels: the gradient of the logits of the kept tiles, then both products with it, wave by wave.

With g = a S + b onehot (a, b: upstream gradients of log-sum-exp and target logit) and q = g cap'(z):
dE = scale q C, dC = scale q^T E, db = sum of q over tokens (paper section 4.3). A wave is a range of vocabulary groups whose q
fits the scratch buffer. `gradient_kernel` recomputes the logits of the wave's tiles and stores q, rounded once to the inputs'
dtype, into slots of 128 tokens x 128 ids; `products_kernel` multiplies. Every piece of dC and dE has one owner, which adds in
fp32 in a fixed order: no atomics, no locks, the same bits in every run.

ORDERED: groups are taken in a given order of the vocabulary; the rows of C are gathered, and the rows of dC come out in that order.

List entries and addresses are read one step before they are used, so that no block waits for its own address.
"""

import triton
import triton.language as tl

from paperlm_kernels.cross_entropy.tiles import LOG2E, finish_logits, gather_block, load_block, place_of


@triton.jit
def _store_slot(scratch, slot, q, TMA: tl.constexpr):
    if TMA:
        scratch.store([slot * 128, 0], q)
    else:
        i = slot.to(tl.int64) * 16384 + tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
        tl.store(scratch + i, q)


@triton.jit
def _finish_tile(
    z, bias, ids, target, log_sum, a, b, alive, group, last, V, scale, cap, eps,
    FLAG: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """q of one tile from its product, rounded to DTYPE; FLAG: writes whether the filter keeps it to `alive`.

    ids: of the tile's columns; target: place of each row's target in the vocabulary order.
    """
    place = group * 128 + tl.arange(0, 128)
    z = finish_logits(z, bias, ids, V, scale, cap, HAS_SCALE, HAS_BIAS, HAS_CAP)
    if group * 128 + 128 > V:
        z = tl.where((place < V)[None, :], z, float("-inf"))
    p = tl.exp2(z * LOG2E - log_sum[:, None])
    q = p * a[:, None]
    own = (target >= group * 128) & (target < group * 128 + 128)
    any_own = tl.max(own.to(tl.int32), 0)
    if any_own > 0:
        q += tl.where(place[None, :] == target[:, None], b[:, None], 0.0)
    if FLAG:
        # a row that is padding has log_sum = inf, hence p = 0
        kept = tl.maximum(tl.max((tl.max(p, 1) >= eps).to(tl.int32), 0), any_own)
        tl.store(alive + group, kept.to(tl.int8), mask=group < last)
    if HAS_CAP:
        r = tl.maximum(z, -cap) * (1.0 / cap)
        q = q * (1.0 - r * r)
    return q.to(DTYPE)


@triton.jit
def _ids(order, group, V, ORDERED: tl.constexpr):
    """Vocabulary ids of a group; -1 beyond the vocabulary where they are looked up in an order."""
    place = group * 128 + tl.arange(0, 128)
    if ORDERED:
        return tl.load(order + place, mask=place < V, other=-1)
    else:
        return place


@triton.jit
def _pair(unit, entry, row_slots, row_groups, first, last, row_blocks, chunk, groups, LISTED: tl.constexpr):
    """Row block, two groups and their slots of a unit; `groups`, where a descriptor reads zeros, for a group that is not there."""
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
def _gradient_tiles(
    E, E_rows, C, C_rows, bias, order, rows, targets, control, lse, d_lse, d_target, row_slots, row_groups, units, unit_counts,
    plan, wave, n_waves, scratch, alive, V, D, stride_e, stride_c, scale, cap, eps, groups, n_blocks, chunk,
    BK: tl.constexpr, TMA: tl.constexpr, GATHER: tl.constexpr, LISTED: tl.constexpr, FLAG: tl.constexpr, ORDERED: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.load(control + 1)
    first = tl.load(plan + wave)
    last = tl.load(plan + wave + 1)
    base = tl.load(plan + n_waves + 1 + wave)
    # A unit is a row block and two of its groups: they share the block of E, and neighbouring units share those of C in L2.
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
                row = tl.load(rows + packed)
                real = row >= 0
                target = tl.load(targets + packed)
                log_sum = tl.load(lse + row, mask=real, other=float("inf")) * LOG2E
                a = tl.load(d_lse + row, mask=real, other=0.0)
                b = tl.load(d_target + row, mask=real, other=0.0)
                left_ids = _ids(order, left_group, V, ORDERED)
                right_ids = _ids(order, right_group, V, ORDERED)
                left_z = tl.zeros([128, 128], tl.float32)
                right_z = tl.zeros([128, 128], tl.float32)
                for k in range(0, D, BK):
                    if GATHER:
                        e = gather_block(E_rows, row, k, D, stride_e, BK)
                    else:
                        e = E.load([block * 128, k])
                    if ORDERED:
                        left_c = gather_block(C_rows, left_ids, k, D, stride_c, BK)
                        right_c = gather_block(C_rows, right_ids, k, D, stride_c, BK)
                    else:
                        left_c = load_block(C, left_group * 128, k, V, D, stride_c, 128, BK, TMA)
                        right_c = load_block(C, right_group * 128, k, V, D, stride_c, 128, BK, TMA)
                    left_z = tl.dot(e, left_c.T, left_z, input_precision=PRECISION)
                    right_z = tl.dot(e, right_c.T, right_z, input_precision=PRECISION)
                flags = alive + block.to(tl.int64) * groups
                q = _finish_tile(
                    left_z, bias, left_ids, target, log_sum, a, b, flags, left_group, last, V, scale, cap, eps,
                    FLAG, HAS_SCALE, HAS_BIAS, HAS_CAP, DTYPE,
                )  # fmt: skip
                _store_slot(scratch, base + left_slot, q, TMA)
                if right_group < groups:
                    q = _finish_tile(
                        right_z, bias, right_ids, target, log_sum, a, b, flags, right_group, last, V, scale, cap, eps,
                        FLAG, HAS_SCALE, HAS_BIAS, HAS_CAP, DTYPE,
                    )  # fmt: skip
                    _store_slot(scratch, base + right_slot, q, TMA)
            block, left_group, left_slot, right_group, right_slot = next_block, a_group, a_slot, b_group, b_slot


@triton.jit
def gradient_kernel(
    E, E_rows, C, C_rows, bias, order, rows, targets, control, lse, d_lse, d_target, row_slots, row_groups, units, unit_counts,
    plan, wave, n_waves, scratch, alive, V, D, stride_e, stride_c, scale, cap, eps, groups, n_blocks, chunk,
    BK: tl.constexpr, TMA: tl.constexpr, LISTED: tl.constexpr, FLAG: tl.constexpr, ORDERED: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
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
                E, E_rows, C, C_rows, bias, order, rows, targets, control, lse, d_lse, d_target, row_slots, row_groups, units,
                unit_counts, plan, wave, n_waves, scratch, alive, V, D, stride_e, stride_c, scale, cap, eps, groups, n_blocks, chunk,
                BK, TMA, False, LISTED, FLAG, ORDERED, HAS_SCALE, HAS_BIAS, HAS_CAP, PRECISION, DTYPE,
            )  # fmt: skip
    else:
        _gradient_tiles(
            E, E_rows, C, C_rows, bias, order, rows, targets, control, lse, d_lse, d_target, row_slots, row_groups, units,
            unit_counts, plan, wave, n_waves, scratch, alive, V, D, stride_e, stride_c, scale, cap, eps, groups, n_blocks, chunk,
            BK, TMA, True, LISTED, FLAG, ORDERED, HAS_SCALE, HAS_BIAS, HAS_CAP, PRECISION, DTYPE,
        )  # fmt: skip


@triton.jit
def _hidden_unit(
    unit, C, C_rows, order, rows, row_slots, row_groups, row_starts, first, last, base, scratch, d_hidden, remainder, row_blocks,
    V, D, stride_c, scale, groups, columns,
    BD: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, SOME: tl.constexpr, LISTED: tl.constexpr, ORDERED: tl.constexpr, FIRST: tl.constexpr,
    PAIR: tl.constexpr, ROUND: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds q C of the wave to (128 tokens, BD columns) of dE.

    Between waves the sum is carried in d_hidden; PAIR: what its dtype rounds off goes to `remainder`, so that 16 significant
    bits survive the waves and the final value is rounded once.
    """
    block, column = place_of(unit, row_blocks, columns, CHUNK)
    column *= BD
    STEPS: tl.constexpr = 128 // BK
    if SOME:
        start = tl.load(row_starts + block * (groups + 1) + first).to(tl.int32)
        n = tl.load(row_starts + block * (groups + 1) + last).to(tl.int32) - start
        entry = block.to(tl.int64) * groups + start
        group = tl.load(row_groups + entry, mask=n > 0, other=0).to(tl.int32)
        slot = group * row_blocks + block
        if LISTED:
            slot = tl.load(row_slots + entry, mask=n > 0, other=0)
    else:
        n = last - first
        group = first
        slot = block
    if n > 0 or FIRST:
        acc = tl.zeros([128, BD], tl.float32)
        for t in range(n * STEPS):
            inner = t % STEPS * BK
            q = load_block(scratch, (base + slot) * 128, inner, (base + slot + 1) * 128, 128, 128, 128, BK, TMA)
            if ORDERED:
                place = group * 128 + inner + tl.arange(0, BK)
                ids = tl.load(order + place, mask=place < V, other=-1)
                c = gather_block(C_rows, ids, column, D, stride_c, BD)
            else:
                c = load_block(C, group * 128 + inner, column, V, D, stride_c, BK, BD, TMA)
            acc = tl.dot(q, c, acc, input_precision=PRECISION)
            if ROUND:
                acc = acc.to(q.dtype).to(tl.float32)
            following = tl.minimum((t + 1) // STEPS, n - 1)
            if SOME:
                group = tl.load(row_groups + entry + following).to(tl.int32)
                slot = group * row_blocks + block
                if LISTED:
                    slot = tl.load(row_slots + entry + following)
            else:
                group = first + following
                slot = following * row_blocks + block
        packed = block * 128 + tl.arange(0, 128)
        row = tl.load(rows + packed)
        c = column + tl.arange(0, BD)
        mask = (row >= 0)[:, None] & (c < D)[None, :]
        out = d_hidden + row.to(tl.int64)[:, None] * D + c[None, :]
        rest = remainder + packed.to(tl.int64)[:, None] * D + c[None, :]
        acc = acc * scale
        if not FIRST:
            acc += tl.load(out, mask=mask, other=0.0).to(tl.float32)
            if PAIR:
                acc += tl.load(rest, mask=mask, other=0.0).to(tl.float32)
        value = acc.to(d_hidden.dtype.element_ty)
        tl.store(out, value, mask=mask)
        if PAIR:
            tl.store(rest, (acc - value.to(tl.float32)).to(remainder.dtype.element_ty), mask=mask)


@triton.jit
def _group_range(group, first, last, offsets, group_counts, row_blocks, VISIT: tl.constexpr):
    """First slot (in the order of all tiles) and number of visited tiles of a group of the wave; 0, 0 beyond it."""
    there = group < last
    start = tl.load(offsets + group, mask=there, other=0)
    if VISIT == "all":
        return start, row_blocks
    elif VISIT == "listed":
        return start, tl.load(offsets + group + 1, mask=there, other=0) - start
    else:
        return start, tl.load(group_counts + group, mask=there, other=0)


@triton.jit
def _entry(group, start, n, j, slot_blocks, group_blocks, n_blocks, VISIT: tl.constexpr):
    """Row block of the j-th visited tile of a group."""
    if VISIT == "all":
        return j
    elif VISIT == "listed":
        return tl.load(slot_blocks + start + j, mask=j < n, other=0).to(tl.int32)
    else:
        at = group.to(tl.int64) * n_blocks + j
        return tl.load(group_blocks + at, mask=j < n, other=0).to(tl.int32)


@triton.jit
def _weight_unit(
    group, column, start, n, block, E, E_rows, rows, slot_blocks, group_blocks, base, scratch, d_weight,
    V, D, stride_e, scale, n_blocks,
    BD: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, GATHER: tl.constexpr, VISIT: tl.constexpr, ROUND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q^T E over the n visited tiles of a group: (128 ids, BD columns) of dC; zeros for a group without tiles."""
    column *= BD
    STEPS: tl.constexpr = 128 // BK
    slot = base + start
    acc = tl.zeros([128, BD], tl.float32)
    for t in range(n * STEPS):
        inner = t % STEPS * BK
        at = slot + t // STEPS
        if VISIT == "some":
            at = slot + block
        q = load_block(scratch, at * 128 + inner, 0, (at + 1) * 128, 128, 128, BK, 128, TMA)
        if GATHER:
            row = tl.load(rows + block * 128 + inner + tl.arange(0, BK))
            e = gather_block(E_rows, row, column, D, stride_e, BD)
        else:
            e = E.load([block * 128 + inner, column])
        acc = tl.dot(q.T, e, acc, input_precision=PRECISION)
        if ROUND:
            acc = acc.to(q.dtype).to(tl.float32)
        block = _entry(group, start, n, (t + 1) // STEPS, slot_blocks, group_blocks, n_blocks, VISIT)
    ids = group * 128 + tl.arange(0, 128)
    c = column + tl.arange(0, BD)
    out = d_weight + ids.to(tl.int64)[:, None] * D + c[None, :]
    tl.store(out, (acc * scale).to(d_weight.dtype.element_ty), mask=(ids < V)[:, None] & (c < D)[None, :])


@triton.jit
def _turn(turn, turns, cycle, program, programs, heavy, first, last, columns, CHUNK: tl.constexpr):
    """Group and column that a program computes in its turn; group >= last in the turns that it sits out."""
    unit = turn // turns * cycle + turn % turns * programs + program
    mine = True
    if turn % turns == turns - 1:
        mine = program >= heavy
        unit -= heavy
    group, column = place_of(tl.minimum(unit, (last - first) * columns), last - first, columns, CHUNK)
    return tl.where(mine & (unit < (last - first) * columns), first + group, last), column


@triton.jit
def products_kernel(
    E, E_rows, C, C_rows, order, rows, control, row_slots, row_groups, row_starts, slot_blocks, group_blocks, group_counts, offsets,
    plan, wave, n_waves, q_rows, q_columns, d_hidden, remainder, d_weight, V, D, stride_e, stride_c, scale, groups, n_blocks,
    BD: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, HIDDEN: tl.constexpr, WEIGHT: tl.constexpr, SOME: tl.constexpr,
    ORDERED: tl.constexpr, VISIT: tl.constexpr, FIRST: tl.constexpr, PAIR: tl.constexpr, ROUND: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Both products of a wave. q_rows, q_columns: the scratch buffer, read in blocks of tokens (dE) and of ids (dC).

    SOME: dE visits the row lists, else every group of the wave. VISIT, for dC: all = every row block; listed = the computed tiles,
    which are the kept ones; some = the kept ones among all computed.
    """
    row_blocks = tl.load(control + 1)
    first = tl.load(plan + wave)
    last = tl.load(plan + wave + 1)
    base = tl.load(plan + n_waves + 1 + wave)
    # slots in the lists count from the first tile of all waves, those of `all` from that of the wave
    listed = base - tl.load(plan + 2 * n_waves + 1 + wave)
    columns = tl.cdiv(D, BD)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    turns = 1
    heavy = 0
    if HIDDEN:
        units = row_blocks * columns
        if last > first or FIRST:
            for unit in range(program, units, programs):
                _hidden_unit(
                    unit, C, C_rows, order, rows, row_slots, row_groups, row_starts, first, last, listed if SOME else base, q_rows,
                    d_hidden,
                    remainder, row_blocks, V, D, stride_c, scale, groups, columns,
                    BD, BK, TMA, SOME, VISIT == "listed", ORDERED, FIRST, PAIR, ROUND, PRECISION, CHUNK,
                )  # fmt: skip
        # `heavy` programs had one unit more than the others. Both products cost the same in total, so a unit of dE is
        # 1 / row_blocks of the work on dC: the heavy programs sit out one turn in `turns` of the dC units.
        heavy = units % programs
        spare = 2 * units - units // programs * programs
        turns = tl.maximum(1, (spare + programs // 2) // programs)
        if heavy == 0:
            turns = 1
    if WEIGHT:
        dense = False
        if TMA:
            dense = tl.load(control + 3) > 0
        units = (last - first) * columns
        cycle = turns * programs - heavy
        if units > 0:
            # what the next two units need is read ahead
            group, column = _turn(0, turns, cycle, program, programs, heavy, first, last, columns, CHUNK)
            start, n = _group_range(group, first, last, offsets, group_counts, row_blocks, VISIT)
            block = _entry(group, start, n, 0, slot_blocks, group_blocks, n_blocks, VISIT)
            next_group, next_column = _turn(1, turns, cycle, program, programs, heavy, first, last, columns, CHUNK)
            next_start, next_n = _group_range(next_group, first, last, offsets, group_counts, row_blocks, VISIT)
            for turn in range(tl.cdiv(units, cycle) * turns):
                next_block = _entry(next_group, next_start, next_n, 0, slot_blocks, group_blocks, n_blocks, VISIT)
                far_group, far_column = _turn(
                    turn + 2, turns, cycle, program, programs, heavy, first, last, columns, CHUNK
                )
                far_start, far_n = _group_range(far_group, first, last, offsets, group_counts, row_blocks, VISIT)
                if group < last:
                    if dense:
                        if TMA:
                            _weight_unit(
                                group, column, start, n, block, E, E_rows, rows, slot_blocks, group_blocks, listed, q_columns,
                                d_weight, V, D, stride_e, scale, n_blocks, BD, BK, TMA, False, VISIT, ROUND, PRECISION,
                            )  # fmt: skip
                    else:
                        _weight_unit(
                            group, column, start, n, block, E, E_rows, rows, slot_blocks, group_blocks, listed, q_columns,
                            d_weight, V, D, stride_e, scale, n_blocks, BD, BK, TMA, True, VISIT, ROUND, PRECISION,
                        )  # fmt: skip
                group, column, start, n, block = next_group, next_column, next_start, next_n, next_block
                next_group, next_column, next_start, next_n = far_group, far_column, far_start, far_n


@triton.jit
def bias_kernel(
    control, group_blocks, group_counts, offsets, plan, wave, n_waves, scratch, d_bias, V, n_blocks, VISIT: tl.constexpr
):
    """db of the wave's groups: q summed over the tokens of the tiles that dC visits, in their order. Grid: groups."""
    first = tl.load(plan + wave)
    group = first + tl.program_id(0)
    if group < tl.load(plan + wave + 1):
        start = tl.load(offsets + group)
        if VISIT == "all":
            n = tl.load(control + 1)
        elif VISIT == "listed":
            n = tl.load(offsets + group + 1) - start
        else:
            n = tl.load(group_counts + group)
        slot = tl.load(plan + n_waves + 1 + wave) + start - tl.load(offsets + first)
        total = tl.zeros([128], tl.float32)
        cell = tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
        for j in range(n):
            at = slot + j
            if VISIT == "some":
                at = slot + tl.load(group_blocks + group.to(tl.int64) * n_blocks + j)
            total += tl.sum(tl.load(scratch + at.to(tl.int64) * 16384 + cell).to(tl.float32), 0)
        ids = group * 128 + tl.arange(0, 128)
        tl.store(d_bias + ids, total, mask=ids < V)
