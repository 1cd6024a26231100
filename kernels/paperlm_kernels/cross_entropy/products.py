"""Second backward kernel: both products with the gradient of the logits, q C for dE and q^T E for dC.

Every piece of dC and dE has one owner, which adds in fp32 in a fixed order: no atomics, no locks, the same bits in
every run. dC is complete with its wave and is rounded once; dE is carried from wave to wave. With a vocabulary order
the rows of C lie where those of dC will (see reorder.py), so dE has a launch of its own, before that of dC. List
entries are read one step before they are used, so that no block waits for its own address.
"""

import triton
import triton.language as tl

from paperlm_kernels.cross_entropy.sharing import MOST_PROGRAMS, TURNS_AHEAD, UNIT_COST, delays, unit_of_turn
from paperlm_kernels.cross_entropy.tiles import COUNTS, gather_block, halves, load_block, place_of


@triton.jit
def _spacing(value):
    """Bits of the float32 that is the distance of a 16-bit number from its neighbours, at least float32's smallest
    normal number."""
    kind: tl.constexpr = value.dtype
    exponent = value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000
    if kind == tl.bfloat16:
        return tl.maximum(exponent - (7 << 23), 1 << 23)
    else:
        return tl.maximum(exponent - (10 << 23), 103 << 23)


@triton.jit
def _unsplit(value, remainder):
    """float32 from a 16-bit number and a byte: 254ths of the distance to its neighbours."""
    step = _spacing(value).to(tl.float32, bitcast=True)
    return value.to(tl.float32) + remainder.to(tl.float32) * (step * (1.0 / 254.0))


@triton.jit
def _remainder(x, value):
    """The byte that `_unsplit` makes x of again, from its rounded value: 8 significant bits more."""
    inverse = (0x7F000000 - _spacing(value)).to(tl.float32, bitcast=True)
    return tl.floor((x - value.to(tl.float32)) * inverse * 254.0 + 0.5).to(tl.int8)


@triton.jit
def _add_to_hidden(x, packed, row, column, D, d_hidden, remainder, wave, PAIR: tl.constexpr, ROUND: tl.constexpr):
    """Stores the sum of x (tokens, columns) and what earlier waves left in dE; ROUND: x holds that already.

    The sum of earlier waves is not where x starts, because wgmma cuts the low bits of what it adds to a large sum: an
    error that grows with the number of ids.
    """
    d = column + tl.arange(0, x.shape[1])
    mask = (row >= 0)[:, None] & (d < D)[None, :]
    out = d_hidden + row.to(tl.int64)[:, None] * D + d[None, :]
    rest = remainder + packed.to(tl.int64)[:, None] * D + d[None, :]
    if not ROUND:  # noqa: SIM102 (known when compiling; the other is not)
        if wave > 0:
            carried = tl.load(out, mask=mask, other=0.0)
            if PAIR:
                x += _unsplit(carried, tl.load(rest, mask=mask, other=0))
            else:
                x += carried.to(tl.float32)
    value = x.to(d_hidden.dtype.element_ty)
    tl.store(out, value, mask=mask)
    if PAIR:
        tl.store(rest, _remainder(x, value), mask=mask)


@triton.jit
def _hidden_unit(
    unit, C, rows, row_slots, row_groups, row_starts, first, last, base, scratch, d_hidden, remainder, row_blocks, V, D,
    stride_c, scale, groups, columns, wave,
    BD: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, SOME: tl.constexpr, LISTED: tl.constexpr,
    PAIR: tl.constexpr, ROUND: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds q C of the wave to (128 tokens, BD columns) of dE.

    Between waves the sum is carried in d_hidden. ROUND: it is rounded to the dtype of the inputs after every tile.
    PAIR: what the dtype of d_hidden rounds off goes to `remainder` as a byte, so that 16 significant bits survive the
    waves and the final value is rounded once.
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
    if n > 0 or wave == 0:
        packed = block * 128 + tl.arange(0, 128)
        row = tl.load(rows + packed)
        acc = tl.zeros([128, BD], tl.float32)
        if ROUND:  # noqa: SIM102 (known when compiling; the other is not)
            if wave > 0:
                d = column + tl.arange(0, BD)
                out = d_hidden + row.to(tl.int64)[:, None] * D + d[None, :]
                carried = tl.load(out, mask=(row >= 0)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
                acc = carried * (1.0 / tl.where(scale == 0.0, 1.0, scale))
        for t in range(n * STEPS):
            inner = t % STEPS * BK
            q = load_block(scratch, (base + slot) * 128, inner, (base + slot + 1) * 128, 128, 128, 128, BK, TMA)
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
        # a part of the columns at a time, for want of registers
        left, right = halves(acc * scale)
        for half in tl.static_range(2):
            first_part, second_part = halves(left if half == 0 else right)
            for part in tl.static_range(2):
                _add_to_hidden(
                    first_part if part == 0 else second_part, packed, row, column + (2 * half + part) * (BD // 4), D,
                    d_hidden, remainder, wave, PAIR, ROUND,
                )  # fmt: skip


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
        # no mask, 32 bits: otherwise ptxas serializes the products, for the address of both operands hangs on this load
        at = group * n_blocks + tl.maximum(tl.minimum(j, n - 1), 0)
        return tl.load(group_blocks + at).to(tl.int32)


@triton.jit
def _weight_unit(
    group, column, start, n, block, E, E_rows, rows, slot_blocks, group_blocks, base, scratch, d_weight, V, D, stride_e,
    scale, n_blocks,
    BD: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, GATHER: tl.constexpr, VISIT: tl.constexpr,
    ROUND: tl.constexpr, PRECISION: tl.constexpr,
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
def _row_tiles(block, row_starts, first, last, groups, there, SOME: tl.constexpr):
    """Tiles that a unit of dE visits."""
    if SOME:
        row = row_starts + block * (groups + 1)
        return (tl.load(row + last, mask=there, other=0) - tl.load(row + first, mask=there, other=0)).to(tl.int32)
    else:
        return tl.where(there, last - first, 0)


@triton.jit
def _loads(
    units, row_starts, first, last, offsets, group_counts, row_blocks, groups, columns, programs,
    HIDDEN: tl.constexpr, SOME: tl.constexpr, VISIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Tiles, and what their units cost beside them, of each program when the units of dE (HIDDEN) or of dC are dealt
    out in turns: (MOST_PROGRAMS,)."""
    q = tl.arange(0, MOST_PROGRAMS)
    load = tl.zeros([MOST_PROGRAMS], tl.int32)
    for begin in range(0, units, programs):
        unit = begin + q
        there = (q < programs) & (unit < units)
        if HIDDEN:
            block, _ = place_of(unit, row_blocks, columns, CHUNK)
            n = _row_tiles(block, row_starts, first, last, groups, there, SOME)
        else:
            group, _ = _group_and_column(tl.where(there, unit, units), first, last, columns, CHUNK)
            _, n = _group_range(group, first, last, offsets, group_counts, row_blocks, VISIT)
        load += tl.where(there, n + UNIT_COST, 0)
    return load


@triton.jit
def _sum_of(counts, first, last):
    total = 0
    for begin in range(first, last, MOST_PROGRAMS):
        i = begin + tl.arange(0, MOST_PROGRAMS)
        total += tl.sum(tl.load(counts + i, mask=i < last, other=0), 0)
    return total


@triton.jit
def _group_and_column(unit, first, last, columns, CHUNK: tl.constexpr):
    """What a unit of dC computes; group = last for units beyond it."""
    units = (last - first) * columns
    group, column = place_of(tl.minimum(unit, units), last - first, columns, CHUNK)
    return tl.where(unit < units, first + group, last), column


@triton.jit(do_not_specialize=[name for name in COUNTS if name != "chunk"])
def products_kernel(
    E, E_rows, C, rows, control, row_slots, row_groups, row_starts, slot_blocks, group_blocks, group_counts, offsets,
    plan, wave, n_waves, q_rows, q_columns, d_hidden, remainder, d_weight, V, D, stride_e, stride_c, scale, groups,
    n_blocks,
    BD: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, HIDDEN: tl.constexpr, WEIGHT: tl.constexpr,
    SOME: tl.constexpr, VISIT: tl.constexpr, PAIR: tl.constexpr, ROUND: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Both products of a wave. q_rows, q_columns: the scratch buffer, read in blocks of tokens (dE) and of ids (dC).

    SOME: dE visits the row lists, else every group of the wave. VISIT, for dC: all = every row block; listed = the
    computed tiles, which are the kept ones; some = the kept ones among all computed.
    """
    row_blocks = tl.load(control + 1)
    first = tl.load(plan + wave)
    last = tl.load(plan + wave + 1)
    base = tl.load(plan + n_waves + 1 + wave)
    # slots in the lists count from the first tile of all waves, those of `all` from that of the wave
    listed = base - tl.load(plan + 2 * n_waves + 1 + wave)
    columns = tl.cdiv(D, BD)
    programs = tl.num_programs(0)
    # A unit is a row block (dE) or a group (dC) and some columns. Both products visit the tiles of the wave (all, and
    # the kept ones, if only one is filtered), so the units of dE are the longer ones where the wave has more groups
    # than row blocks. See sharing.py.
    groups_here = last - first
    hidden_units = row_blocks * columns
    weight_units = groups_here * columns
    hidden_delay = tl.zeros([MOST_PROGRAMS], tl.int32)
    hidden_own = 0
    hidden_longest = 0
    weight_delay = tl.zeros([MOST_PROGRAMS], tl.int32)
    weight_own = 0
    weight_longest = 0
    if HIDDEN and WEIGHT:  # noqa: SIM102 (known when compiling; the other is not)
        if groups_here > 0:
            load = _loads(
                tl.where(groups_here >= row_blocks, hidden_units, 0), row_starts, first, last, offsets, group_counts,
                row_blocks, groups, columns, programs, True, SOME, VISIT, CHUNK,
            )  # fmt: skip
            load += _loads(
                tl.where(groups_here >= row_blocks, 0, weight_units), row_starts, first, last, offsets, group_counts,
                row_blocks, groups, columns, programs, False, SOME, VISIT, CHUNK,
            )  # fmt: skip
            if groups_here >= row_blocks:
                ahead = tl.minimum(first + tl.cdiv(programs * TURNS_AHEAD, CHUNK), last)
                n = row_blocks
                if VISIT == "listed":
                    n = (tl.load(offsets + ahead) - tl.load(offsets + first)) // (ahead - first)
                elif VISIT == "some":
                    n = _sum_of(group_counts, first, ahead) // (ahead - first)
                weight_delay, weight_own, weight_longest = delays(load, n + UNIT_COST, programs)
            else:
                n = groups_here
                if VISIT == "listed":
                    n = (tl.load(offsets + last) - tl.load(offsets + first)) // tl.maximum(row_blocks, 1)
                elif VISIT == "some" and SOME:
                    n = _sum_of(group_counts, first, last) // tl.maximum(row_blocks, 1)
                hidden_delay, hidden_own, hidden_longest = delays(load, n + UNIT_COST, programs)
    if HIDDEN:  # noqa: SIM102 (known when compiling; the other is not)
        if last > first or wave == 0:
            turn = 0
            given = 0
            while given < hidden_units:
                unit, given = unit_of_turn(
                    turn, given, hidden_units, hidden_delay, hidden_own, hidden_longest, programs
                )  # fmt: skip
                turn += 1
                if unit < hidden_units:
                    _hidden_unit(
                        unit, C, rows, row_slots, row_groups, row_starts, first, last, listed if SOME else base, q_rows,
                        d_hidden, remainder, row_blocks, V, D, stride_c, scale, groups, columns, wave, BD, BK, TMA,
                        SOME, VISIT == "listed", PAIR, ROUND, PRECISION, CHUNK,
                    )  # fmt: skip
    if WEIGHT:
        dense = False
        if TMA:
            dense = tl.load(control + 3) > 0
        if weight_units > 0:
            # what the next two units need is read ahead
            given = 0
            unit, next_given = unit_of_turn(
                0, 0, weight_units, weight_delay, weight_own, weight_longest, programs
            )  # fmt: skip
            group, column = _group_and_column(unit, first, last, columns, CHUNK)
            start, n = _group_range(group, first, last, offsets, group_counts, row_blocks, VISIT)
            block = _entry(group, start, n, 0, slot_blocks, group_blocks, n_blocks, VISIT)
            unit, far_given = unit_of_turn(
                1, next_given, weight_units, weight_delay, weight_own, weight_longest, programs
            )  # fmt: skip
            next_group, next_column = _group_and_column(unit, first, last, columns, CHUNK)
            next_start, next_n = _group_range(next_group, first, last, offsets, group_counts, row_blocks, VISIT)
            turn = 2
            while given < weight_units:
                next_block = _entry(next_group, next_start, next_n, 0, slot_blocks, group_blocks, n_blocks, VISIT)
                given = next_given
                next_given = far_given
                unit, far_given = unit_of_turn(
                    turn, far_given, weight_units, weight_delay, weight_own, weight_longest, programs
                )  # fmt: skip
                turn += 1
                far_group, far_column = _group_and_column(unit, first, last, columns, CHUNK)
                far_start, far_n = _group_range(far_group, first, last, offsets, group_counts, row_blocks, VISIT)
                if group < last:
                    if dense:
                        if TMA:
                            _weight_unit(
                                group, column, start, n, block, E, E_rows, rows, slot_blocks, group_blocks, listed,
                                q_columns, d_weight, V, D, stride_e, scale, n_blocks, BD, BK, TMA, False, VISIT, ROUND,
                                PRECISION,
                            )  # fmt: skip
                    else:
                        _weight_unit(
                            group, column, start, n, block, E, E_rows, rows, slot_blocks, group_blocks, listed,
                            q_columns, d_weight, V, D, stride_e, scale, n_blocks, BD, BK, TMA, True, VISIT, ROUND,
                            PRECISION,
                        )  # fmt: skip
                group, column, start, n, block = next_group, next_column, next_start, next_n, next_block
                next_group, next_column, next_start, next_n = far_group, far_column, far_start, far_n


@triton.jit(do_not_specialize=["wave", "n_waves", "n_blocks"])
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
