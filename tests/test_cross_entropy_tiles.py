"""Which tiles the filter's kernels keep, number, list and order, beside plain loops over what their docstrings define.

They run under the interpreter (TRITON_INTERPRET=1) and on a GPU. What a kernel has no business with is filled with
values that would change its answer, and has to be left as it is.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from support_cross_entropy import KERNELS

if KERNELS:
    from paperlm_kernels.cross_entropy import liveness

place_of_one_dtype = pytest.mark.parametrize("place", [p for p in KERNELS if p.dtype == torch.float32], ids=str)

N_BLOCKS, ROW_BLOCKS, GROUPS, BLOCKS, AT_ONCE = 5, 4, 11, 8, 4
"Row blocks there is room for, those that hold tokens, groups of ids; the powers of two that programs work on."
UNTOUCHED = -7
"What stands where nothing may be written."


class Tiles(NamedTuple):
    """Kept tiles drawn at random, and what the kernels read of them."""

    kept: list[list[bool]]
    "(row blocks that hold tokens, groups)"
    alive: torch.Tensor
    control: torch.Tensor

    def blocks(self, group: int) -> list[int]:
        return [block for block in range(ROW_BLOCKS) if self.kept[block][group]]

    def groups(self, block: int, first: int = 0, last: int = GROUPS) -> list[int]:
        return [group for group in range(first, last) if self.kept[block][group]]


def drawn(place, seed=0, share=0.5) -> Tiles:
    kept = torch.rand(ROW_BLOCKS, GROUPS, generator=torch.Generator().manual_seed(seed)) < share
    alive = torch.ones(N_BLOCKS, GROUPS, dtype=torch.int8)
    alive[:ROW_BLOCKS] = kept
    control = torch.tensor([N_BLOCKS, ROW_BLOCKS, 1, N_BLOCKS, 0], dtype=torch.int32)
    return Tiles(kept.tolist(), alive.to(place.device), control.to(place.device))


def blank(place, *shape, dtype=torch.int32) -> torch.Tensor:
    return torch.full(shape, UNTOUCHED, dtype=dtype, device=place.device)


def offsets_of(tiles: Tiles) -> list[int]:
    counts = [len(tiles.blocks(group)) for group in range(GROUPS)]
    return [sum(counts[:group]) for group in range(GROUPS + 1)]


def on(place, values, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=place.device)


@place_of_one_dtype
@pytest.mark.parametrize("seed", [0, 1])
def test_a_tile_is_kept_for_a_target_or_a_logit_at_the_threshold_and_for_nothing_else(place, seed):
    g = torch.Generator().manual_seed(seed)
    n_pad = 128 * N_BLOCKS
    lse = 8 * torch.rand(n_pad, generator=g, dtype=torch.float64) + 2
    parts = lse - 1 - 7 * torch.rand(2, n_pad, generator=g, dtype=torch.float64)
    base = parts.logsumexp(0)
    above = (lse - (base - base.abs() / 2048)).tolist()
    # a 68th of an octave a step, the octaves of 1 + x between whole ones by a straight line
    mantissa, exponent = zip(*(math.frexp(1 + x + 0.001) for x in above), strict=True)
    step = [68 * (e - 1 + 2 * m - 1) - 126 for m, e in zip(mantissa, exponent, strict=True)]
    wanted = torch.rand(N_BLOCKS, GROUPS, generator=g) < 0.5
    own = dict(enumerate((0, 127, 128 * GROUPS - 1, 128, 300)))
    for block, target in own.items():
        wanted[block, target // 128] = False  # nothing else keeps that tile
    bytes_ = torch.tensor([math.floor(s) - 1 for s in step]).expand(GROUPS, -1).clamp(-127, 126).clone()
    rows = torch.randperm(n_pad, generator=g).int()
    rows[torch.rand(n_pad, generator=g) < 0.2] = -1  # no token: what stands there says nothing
    bytes_[:, rows < 0] = 127
    for block, group in wanted.nonzero().tolist():  # one row of a kept tile decides
        row = next(128 * block + i for i in torch.randperm(128, generator=g).tolist() if rows[128 * block + i] >= 0)
        bytes_[group, row] = 127 if group % 2 else math.ceil(step[row]) + 1
    bytes_[-1] = -128  # below any threshold, however low
    wanted[:, -1] = False
    targets = torch.full((n_pad,), -1, dtype=torch.int32)
    for block, target in own.items():
        at = 128 * block + int((rows[128 * block : 128 * block + 128] >= 0).nonzero()[0])
        targets[at] = target
        wanted[block, target // 128] = True
    by_token = torch.zeros(n_pad, dtype=torch.float32)
    by_token[rows[rows >= 0].long()] = lse.float()[rows >= 0]
    maxima = torch.full((32, n_pad), 127, dtype=torch.int8)
    maxima[:GROUPS] = bytes_
    alive, control = blank(place, N_BLOCKS, GROUPS, dtype=torch.int8), drawn(place).control
    inputs = (t.to(place.device) for t in (maxima, parts.float(), by_token, rows, targets))
    liveness.alive_kernel[(N_BLOCKS, -(-GROUPS // AT_ONCE))](*inputs, control, alive, n_pad, GROUPS, GROUPS=AT_ONCE)
    assert alive[:ROW_BLOCKS].bool().tolist() == wanted[:ROW_BLOCKS].tolist()
    assert alive[ROW_BLOCKS:].unique().tolist() == [UNTOUCHED]


@place_of_one_dtype
def test_a_kept_tile_is_numbered_among_those_of_its_group(place):
    tiles = drawn(place)
    room = blank(place, N_BLOCKS + BLOCKS, GROUPS, dtype=torch.int16)  # more than a kernel may write
    alive = torch.cat((tiles.alive, torch.ones_like(tiles.alive)))
    counts = blank(place, GROUPS + AT_ONCE)
    grid = (-(-GROUPS // AT_ONCE),)
    liveness.rank_kernel[grid](alive, room, counts, tiles.control, GROUPS, BLOCKS=BLOCKS, GROUPS=AT_ONCE)
    for group in range(GROUPS):
        blocks = tiles.blocks(group)
        assert room[:ROW_BLOCKS, group].tolist() == [
            blocks.index(block) if block in blocks else -1 for block in range(ROW_BLOCKS)
        ]
        assert counts[group] == len(blocks)
    assert room[ROW_BLOCKS:].unique().tolist() == counts[GROUPS:].unique().tolist() == [UNTOUCHED]


@place_of_one_dtype
@pytest.mark.parametrize("aliased", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_a_wave_ends_before_the_group_whose_tiles_would_not_fit(place, listed, aliased):
    tiles, width, slots, waves = drawn(place, share=0.6), 100, 13, 9
    counts = [len(tiles.blocks(group)) if listed else ROW_BLOCKS for group in range(GROUPS)]
    given = on(place, counts if listed else [UNTOUCHED] * GROUPS)
    offsets, plan = blank(place, GROUPS + 1), blank(place, 3 * waves + 1)
    liveness.plan_kernel[(1,)](
        given, tiles.control, offsets, plan, GROUPS, width, slots, waves, LISTED=listed, ALIASED=aliased, BLOCK=4
    )  # fmt: skip
    right = [sum(counts[:group]) for group in range(GROUPS + 1)]
    assert offsets.tolist() == right
    first, firsts, rows, used = 0, [], [], []
    for _ in range(waves):
        taken = {end: -(-end * width // 128) if aliased else 0 for end in range(first, GROUPS + 1)}
        fitting = [end for end in taken if end > first and right[end] - right[first] + taken[end] <= slots]
        firsts.append(first)
        used.append(right[first])
        first = max(fitting, default=first)
        rows.append(taken[first])
    assert first == GROUPS and len(set(firsts)) > 3
    assert plan.tolist() == [*firsts, first, *rows, *used]


@place_of_one_dtype
def test_the_kept_tiles_of_all_groups_are_listed_by_row_block_with_their_slots(place):
    tiles, offsets = drawn(place), offsets_of(drawn(place))
    rank = [[tiles.blocks(g).index(b) if tiles.kept[b][g] else -1 for g in range(GROUPS)] for b in range(ROW_BLOCKS)]
    row_slots, row_groups = blank(place, N_BLOCKS, GROUPS), blank(place, N_BLOCKS, GROUPS)
    row_starts, slot_blocks = blank(place, N_BLOCKS, GROUPS + 1), blank(place, N_BLOCKS * GROUPS)
    other = blank(place, GROUPS + 1, N_BLOCKS)
    liveness.lists_kernel[(N_BLOCKS + 3,)](
        tiles.alive, on(place, [*rank, [0] * GROUPS], torch.int16), on(place, offsets), tiles.control, blank(place, 9),
        0, row_slots, row_groups, row_starts, slot_blocks, other, other, GROUPS, N_BLOCKS,
        WAVE=False, LISTED=True, ROW_LISTS=True, GROUP_LISTS=False, BLOCK=4, BLOCKS=BLOCKS, GROUPS=AT_ONCE,
    )  # fmt: skip
    for block in range(ROW_BLOCKS):
        groups = tiles.groups(block)
        rest = [UNTOUCHED] * (GROUPS - len(groups))
        assert row_groups[block].tolist() == [*groups, *rest]
        assert row_slots[block].tolist() == [*(offsets[g] + rank[block][g] for g in groups), *rest]
        assert row_starts[block].tolist() == [len(tiles.groups(block, 0, g)) for g in range(GROUPS + 1)]
    for blocks in (row_slots, row_groups, row_starts):
        assert blocks[ROW_BLOCKS:].unique().tolist() == [UNTOUCHED]
    by_slot = [block for group in range(GROUPS) for block in tiles.blocks(group)]
    assert slot_blocks.tolist() == by_slot + [UNTOUCHED] * (len(slot_blocks) - len(by_slot))
    assert other.unique().tolist() == [UNTOUCHED]


@place_of_one_dtype
def test_the_kept_tiles_of_a_wave_are_listed_by_row_block_and_by_group(place):
    tiles, first, last = drawn(place), 3, 9
    plan = on(place, [0, first, last, GROUPS])
    row_groups, row_starts = blank(place, N_BLOCKS, GROUPS), blank(place, N_BLOCKS, GROUPS + 1)
    group_blocks, group_counts, other = blank(place, GROUPS + 1, N_BLOCKS), blank(place, GROUPS), blank(place, 99)
    liveness.lists_kernel[(N_BLOCKS + 3,)](
        tiles.alive, other, other, tiles.control, plan, 1, other, row_groups, row_starts, other, group_blocks,
        group_counts, GROUPS, N_BLOCKS,
        WAVE=True, LISTED=False, ROW_LISTS=True, GROUP_LISTS=True, BLOCK=4, BLOCKS=BLOCKS, GROUPS=AT_ONCE,
    )  # fmt: skip
    for block in range(ROW_BLOCKS):
        starts = row_starts[block].tolist()
        for end in range(first, last + 1):
            assert row_groups[block, starts[first] : starts[end]].tolist() == tiles.groups(block, first, end)
    for group in range(GROUPS):
        blocks = tiles.blocks(group) if first <= group < last else []
        assert group_blocks[group].tolist() == blocks + [UNTOUCHED] * (N_BLOCKS - len(blocks))
        assert group_counts[group] == (len(blocks) if first <= group < last else UNTOUCHED)
    assert row_groups[ROW_BLOCKS:].unique().tolist() == row_starts[ROW_BLOCKS:].unique().tolist() == [UNTOUCHED]
    assert other.unique().tolist() == [UNTOUCHED]


@place_of_one_dtype
@pytest.mark.parametrize("together,window", [(2, 4), (3, 2), (5, 16)])
def test_pairs_of_kept_tiles_are_ordered_by_chunk_of_row_blocks_then_window_then_row_block(place, together, window):
    tiles, offsets, ends = drawn(place, 1, 0.7), offsets_of(drawn(place, 1, 0.7)), [0, 5, 9, GROUPS]
    waves = len(ends) - 1
    starts = [[len(tiles.groups(block, 0, group)) for group in range(GROUPS + 1)] for block in range(ROW_BLOCKS)]
    starts += [[UNTOUCHED * group for group in range(GROUPS + 1)]] * (BLOCKS - ROW_BLOCKS)
    units, counts = blank(place, (GROUPS // 2 + 1 + waves) * N_BLOCKS), blank(place, waves)
    liveness.units_kernel[(waves, -(-GROUPS // window), -(-N_BLOCKS // together))](
        on(place, starts), on(place, offsets), tiles.control, on(place, ends), waves, units, counts, GROUPS, N_BLOCKS,
        together, BLOCKS=BLOCKS, WINDOW=window,
    )  # fmt: skip
    for wave, (first, last) in enumerate(itertools.pairwise(ends)):
        right = []
        for chunk in range(0, ROW_BLOCKS, together):
            for begin in range(first, last, window):
                for block in range(chunk, min(chunk + together, ROW_BLOCKS)):
                    groups = tiles.groups(block, first, last)
                    right += [
                        2 * (block * GROUPS + starts[block][first] + entry) + (entry + 1 < len(groups))
                        for entry in range(0, len(groups), 2)
                        if begin <= groups[entry] < begin + window
                    ]
        at = offsets[first] // 2 + wave * N_BLOCKS
        assert counts[wave] == len(right)
        assert units[at : at + len(right)].tolist() == right
        units[at : at + len(right)] = UNTOUCHED
    assert units.unique().tolist() == [UNTOUCHED]
