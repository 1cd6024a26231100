"""The memory presets: how much scratch a call may use, and in how many waves the backward pass then runs.

| preset   | peak above the inputs, beside dE and dC | kept from the forward pass          | dE between waves   |
|----------|------------------------------------------|-------------------------------------|--------------------|
| fast     | 20 % of dE + dC or 128 MiB               | LSE, row index, byte maxima         | float32            |
| balanced | 5 % or 48 MiB (unfiltered: 25 %)         | LSE, row index, byte maxima         | dtype + a byte     |
| lean     | 0.4 % or 4 MiB                           | LSE, row index                      | dtype              |

The larger of the two figures holds. A buffer that a call cannot do without (one group's slots, the maxima, the
remainder, the sums of a bias) counts even where it is larger, and an order of 256,000 ids takes up to 2 MiB beside
them. `fast` and `balanced` may use up to 256 MiB in long batches, to be done in `most_waves`: each wave reads and
writes dE and lasts as long as its longest unit, so that many thousand tokens beside small gradients (32,768 tokens,
50,257 ids, width 768) would spend their time on that. So may every preset if `weight` has no gradient, whose storage
the waves otherwise share; with an order they have that storage all the same.
"""

from __future__ import annotations

import bisect
import functools
import math

SLOT = 128 * 128  # elements of a slot: the gradient of one tile
MIB = 2**20
ROUNDING = 2 * MIB  # what the allocator may add to the scratch, and small vectors
# share of dE + dC that a preset may use beside them, and the least that it may use, in MiB
BUDGETS = {"fast": (0.20, 128), "balanced": (0.05, 48), "lean": (0.004, 4)}
UNFILTERED_BALANCED = 0.25
ORDER_ROOM = 2 * MIB  # for the order itself and the way back of the rows
MOST_WAVES = 32  # with a filter that drops nothing; lean takes as many as it must
UNFILTERED_WAVES = 16
WAVE_SCRATCH = 256 * MIB  # but no more than this for their sake: the scratch stays with the gradient


@functools.lru_cache(maxsize=256)
def wave_count(groups: int, row_blocks: int, slots: int, row_slots: float) -> int:
    """Waves that the plan needs at most, i.e. if the filter drops nothing.

    `row_slots`: slots that the weight gradient's rows of one group occupy in the buffer (D / 128), 0 if it is a buffer
    of its own.
    """
    first = waves = 0
    while first < groups:
        end = min(groups, int((slots + first * row_blocks) // (row_blocks + row_slots)))
        while math.ceil(end * row_slots) + (end - first) * row_blocks > slots:
            end -= 1
        if end <= first:
            raise AssertionError("the scratch buffer does not hold the tiles of one group")
        first, waves = end, waves + 1
    return waves


def most_waves(memory: str, exact: bool, frozen: bool, groups: int, columns: int, programs: int) -> int | None:
    """Waves that a preset allows, None for any number. `columns`: units that the gradient of a group is divided
    into; a wave needs about one for every second program, which multiply for dE in the meantime. frozen: there is
    no storage for the classifier's gradient, which the waves would share."""
    if memory == "lean" and not frozen:
        return None
    most = UNFILTERED_WAVES if exact else MOST_WAVES
    return min(most, max(4, 2 * groups * columns // programs))


def budget(memory: str, exact: bool, bound: int) -> float:
    """Bytes that a preset may use beside dE and dC, which take `bound`."""
    share, floor = BUDGETS[memory]
    if memory == "balanced" and exact:
        share = UNFILTERED_BALANCED
    return max(share * bound, floor * MIB)


def order_room(budget: float, bound: int, held: list[int], vectors: int) -> int:
    """Bytes that the way back to the natural order may take: what the preset and ORDER_ROOM leave beside what is held
    by then, sizes of large buffers (dE and dC among them, which count `bound`) and of all vectors."""
    return min(ORDER_ROOM, int(budget) + ORDER_ROOM + bound - sum(map(allocated, held)) - vectors)


def allocated(nbytes: int) -> int:
    """What PyTorch's allocator takes for a buffer: from 10 MiB on blocks of 2 MiB, less a rest of more than 1 MiB."""
    rest = -nbytes % (2 * MIB)
    return nbytes + (rest if nbytes >= 10 * MIB and rest <= MIB else 0)


def spare_slots(
    budget: float, other: int, n_blocks: int, groups: int, row_slots: float, itemsize: int, most: int | None
) -> int:
    """Slots of scratch beside those that lie in dC: what the budget affords beside `other` bytes, or what it needs for
    `most` waves; at least those of one group, at most all. `row_slots` as in `wave_count`."""
    affordable = min(max(int((budget - other) / (SLOT * itemsize)), n_blocks), groups * n_blocks)
    if most is None:
        return affordable
    return max(affordable, min(_slots_for(most, groups, n_blocks, row_slots), WAVE_SCRATCH // (SLOT * itemsize)))


@functools.lru_cache(maxsize=256)
def _slots_for(waves: int, groups: int, n_blocks: int, row_slots: float) -> int:
    """Fewest slots beside those in dC with which `waves` waves are enough."""
    in_rows = math.ceil(groups * row_slots)
    enough = lambda slots: wave_count(groups, n_blocks, slots + in_rows, row_slots) <= waves  # noqa: E731
    return bisect.bisect_left(range(groups * n_blocks), True, lo=n_blocks, key=enough)
