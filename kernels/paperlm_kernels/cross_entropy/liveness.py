"""Which tiles the gradient filter keeps, and the order in which the backward pass visits them.

A tile (128 counting tokens x 128 ids) is kept when it holds a target of its rows or a probability >= eps (paper section
4.3; the authors test |S - onehot|, which is the same but for targets with p > 1 - eps). The forward pass left the
largest logit of every row and group, rounded up to a byte, so the test needs no recomputation and keeps at least what
the published test keeps.

Everything stays on the device: counts, prefix sums, lists and the plan of the waves (see waves.py).
"""

import triton
import triton.language as tl

from paperlm_kernels.cross_entropy.forward import ALWAYS, NEVER, base_of, steps_above


@triton.jit
def alive_kernel(maxima, base, lse, rows, targets, control, alive, N_PAD, groups, GROUPS: tl.constexpr):
    """alive (row blocks, groups) = 1 where the filter keeps the tile. Grid: row blocks x group chunks."""
    block = tl.program_id(0)
    if block < tl.load(control + 1):
        packed = block * 128 + tl.arange(0, 128)
        row = tl.load(rows + packed)
        target = tl.load(targets + packed)
        total = tl.load(lse + row, mask=row >= 0, other=0.0)
        # a fiftieth of a step, and eight roundings, because the byte and log-sum-exp saw the logits in another order
        above = total - base_of(base, packed, N_PAD) - 2.0**-20 * tl.abs(total)
        threshold = steps_above(above) - 0.02
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        at = group.to(tl.int64)[:, None] * N_PAD + packed[None, :]
        byte = tl.load(maxima + at, mask=(group < groups)[:, None], other=-128)
        keep = (byte.to(tl.float32) >= threshold[None, :]) | (byte == ALWAYS)
        keep = keep & (byte > NEVER) & (row >= 0)[None, :]
        own = (target >= 0)[None, :] & ((target // 128)[None, :] == group[:, None])
        any_kept = tl.max((keep | own).to(tl.int32), 1)
        tl.store(alive + block.to(tl.int64) * groups + group, any_kept.to(tl.int8), mask=group < groups)


@triton.jit
def rank_kernel(alive, rank, counts, control, groups, BLOCKS: tl.constexpr, GROUPS: tl.constexpr):
    """Position of every kept tile among those of its group (-1: dropped), and the number of them. Grid: group
    chunks."""
    block = tl.arange(0, BLOCKS)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    at = block[:, None] * groups + group[None, :]
    there = (block < tl.load(control + 1))[:, None] & (group < groups)[None, :]
    keep = tl.load(alive + at, mask=there, other=0).to(tl.int32)
    before = tl.cumsum(keep, 0) - keep
    tl.store(rank + at, tl.where(keep > 0, before, -1).to(tl.int16), mask=there)
    tl.store(counts + group, tl.sum(keep, 0), mask=group < groups)


@triton.jit
def plan_kernel(
    counts,
    control,
    offsets,
    plan,
    groups,
    D,
    slots,
    n_waves,
    LISTED: tl.constexpr,
    ALIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Slot offsets of the groups (in the order of all tiles), and the waves.

    plan[w] = first group of wave w (w <= n_waves), plan[n_waves + 1 + w] = its first slot in the buffer, plan[2 n_waves
    + 1 + w] = its first slot in the order of all tiles. A slot holds the gradient of one tile (128 x 128). ALIASED: the
    buffer is the weight gradient itself and the slots of a wave lie behind the rows that the wave completes, so a wave
    ends before its slots would not fit there.
    """
    total = 0
    row_blocks = tl.load(control + 1)
    for start in range(0, groups, BLOCK):
        group = start + tl.arange(0, BLOCK)
        if LISTED:
            n = tl.load(counts + group, mask=group < groups, other=0)
        else:
            n = tl.where(group < groups, row_blocks, 0)
        tl.store(offsets + group, total + tl.cumsum(n, 0) - n, mask=group < groups)
        total += tl.sum(n, 0)
    tl.store(offsets + groups, total)
    tl.debug_barrier()
    first = 0
    for wave in range(n_waves):
        used = tl.load(offsets + first)
        # what a range needs grows with its end, so counting the ends that fit finds the last one
        fits = 0
        for start in range(0, tl.where(first < groups, groups, 0), BLOCK):
            end = start + tl.arange(0, BLOCK) + 1
            need = tl.load(offsets + end, mask=end <= groups, other=0) - used
            if ALIASED:
                need += ((end.to(tl.int64) * D + 127) // 128).to(tl.int32)
            fits += tl.sum(((end > first) & (end <= groups) & (need <= slots)).to(tl.int32), 0)
        tl.store(plan + wave, first)
        first += fits
        rows_above = 0
        if ALIASED:
            rows_above = ((first.to(tl.int64) * D + 127) // 128).to(tl.int32)
        tl.store(plan + n_waves + 1 + wave, rows_above)
        tl.store(plan + 2 * n_waves + 1 + wave, used)
    tl.store(plan + n_waves, first)


@triton.jit(do_not_specialize=["wave"])
def lists_kernel(
    alive, rank, offsets, control, plan, wave, row_slots, row_groups, row_starts, slot_blocks, group_blocks,
    group_counts, groups, n_blocks,
    WAVE: tl.constexpr, LISTED: tl.constexpr, ROW_LISTS: tl.constexpr, GROUP_LISTS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The kept tiles, row block by row block (for dE) and group by group (for dC): of one wave (WAVE), else of all
    groups.

    row_groups (row blocks, groups): the kept groups of a row block; those of groups [f, l) are the entries
    row_starts[block, f] to row_starts[block, l]. LISTED, i.e. only kept tiles are computed: row_slots (row blocks,
    groups) are their slots in the order of all tiles, and slot_blocks[slot] is the row block of a slot. Otherwise
    group_blocks (groups, row blocks) and group_counts are the kept row blocks of a group. Grid: row blocks, then chunks
    of GROUPS groups.
    """
    program = tl.program_id(0)
    row_blocks = tl.load(control + 1)
    first = 0
    last = groups
    if WAVE:
        first = tl.load(plan + wave)
        last = tl.load(plan + wave + 1)
    if program < n_blocks:
        if ROW_LISTS and program < row_blocks:
            count = first
            row = program.to(tl.int64) * groups
            starts = row_starts + program * (groups + 1)
            for start in range(first, last, BLOCK):
                group = start + tl.arange(0, BLOCK)
                inside = group < last
                keep = tl.load(alive + row + group, mask=inside, other=0) > 0
                before = count + tl.cumsum(keep.to(tl.int32), 0) - keep.to(tl.int32)
                if LISTED:
                    slot = tl.load(offsets + group, mask=inside, other=0)
                    slot += tl.load(rank + row + group, mask=inside, other=0).to(tl.int32)
                    tl.store(slot_blocks + slot, tl.full([BLOCK], 0, tl.int32) + program, mask=keep)
                    tl.store(row_slots + row + before, slot, mask=keep)
                tl.store(row_groups + row + before, group, mask=keep)
                tl.store(starts + group, before, mask=inside)
                count += tl.sum(keep.to(tl.int32), 0)
            tl.store(starts + last, count)
    elif GROUP_LISTS:
        block = tl.arange(0, BLOCKS)
        group = first + (program - n_blocks) * GROUPS + tl.arange(0, GROUPS)
        there = (block < row_blocks)[:, None] & (group < last)[None, :]
        keep = tl.load(alive + block[:, None] * groups + group[None, :], mask=there, other=0).to(tl.int32)
        at = group.to(tl.int64)[None, :] * n_blocks + tl.cumsum(keep, 0) - keep
        tl.store(group_blocks + at, block[:, None] + tl.zeros_like(keep), mask=keep > 0)
        tl.store(group_counts + group, tl.sum(keep, 0), mask=group < last)


@triton.jit
def units_kernel(
    row_starts, offsets, control, plan, n_waves, units, unit_counts, groups, n_blocks, together,
    BLOCKS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The order in which `gradient_kernel` computes the kept tiles: pairs of a row block's groups, `together` row
    blocks at a time, and of these window by window of WINDOW groups.

    The embeddings of the row blocks then stay in L2, and within a window all of them work on the same rows of C.
    units[u] = 2 * (entry of the row lists) + 1 if the pair is whole; the units of a wave begin at offsets[first] // 2 +
    wave * n_blocks, and there are unit_counts[wave] of them. Grid: waves x windows x chunks of row blocks.
    """
    wave = tl.program_id(0)
    first = tl.load(plan + wave)
    last = tl.load(plan + wave + 1)
    begin = first + tl.program_id(1) * WINDOW
    chunk = tl.program_id(2)
    block = tl.arange(0, BLOCKS)
    here = block < tl.load(control + 1)
    starts = row_starts + block * (groups + 1)
    if begin < last or tl.program_id(1) == 0:
        end = tl.minimum(begin + WINDOW, last)
        zero = tl.load(starts + first, mask=here, other=0).to(tl.int32)
        before = (tl.load(starts + tl.minimum(begin, last), mask=here, other=0).to(tl.int32) - zero + 1) // 2
        after = (tl.load(starts + end, mask=here, other=0).to(tl.int32) - zero + 1) // 2
        entries = tl.load(starts + last, mask=here, other=0).to(tl.int32) - zero
        pairs = (entries + 1) // 2
        if tl.program_id(1) == 0 and chunk == 0:
            tl.store(unit_counts + wave, tl.sum(pairs, 0))
        mine = block // together == chunk
        # a pair belongs to the window of its first group: ahead are all units of earlier chunks, and of this one those
        # of earlier windows
        ahead = tl.sum(tl.where(block // together < chunk, pairs, tl.where(mine, before, 0)), 0)
        count = tl.where(mine, after - before, 0)
        at = tl.load(offsets + first) // 2 + wave * n_blocks + ahead + tl.cumsum(count, 0) - count
        for i in range(tl.max(count, 0)):
            entry = 2 * (before + i)
            value = 2 * (block * groups + zero + entry) + (entry + 1 < entries).to(tl.int32)
            tl.store(units + at + i, value, mask=here & (i < count))
