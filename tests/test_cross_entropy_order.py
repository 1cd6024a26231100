"""The kernels with an order of the vocabulary: the classifier's rows go into it and their gradients back.

They run under the interpreter (TRITON_INTERPRET=1) and on a GPU; which tiles an order makes is in the tests of the
filter.
"""

from __future__ import annotations

import itertools
import random
import weakref

import pytest
import torch
from support_cross_entropy import KERNELS, gpu, gradients, kernels, problem, relative, tighten

if KERNELS:
    from paperlm_kernels.cross_entropy import launch, reorder, waves


@pytest.fixture
def tight(monkeypatch):
    tighten(monkeypatch)


@gpu
@kernels
def test_offsets_beyond_two_to_the_31_are_right_in_an_order_too(place):
    if place.dtype != torch.bfloat16:
        pytest.skip("one dtype is enough")
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("a classifier of 4 GiB, its gradients and float64 copies of some rows")
    p = problem(place, (1, 140), 8192, 300, bias=False)
    weight = (torch.randn(2**18 + 300, 8192, device="cuda", dtype=place.dtype) / 90).requires_grad_()
    target = torch.randint(len(weight) - 300, len(weight), (1, 140), device="cuda")
    big = p._replace(weight=weight, target=target)
    assert weight.numel() > 2**31
    backwards = torch.arange(len(weight) - 1, -1, -1, device="cuda")
    natural, ordered = (gradients(place, big, filter_eps=None, vocab_order=o) for o in (None, backwards))
    torch.testing.assert_close(ordered[0], natural[0], rtol=1e-5, atol=0)
    for mine, right in zip(ordered[1:], natural[1:], strict=True):
        rows = slice(None) if mine.ndim == 3 else slice(len(weight) - 400, None)
        assert relative(mine[rows], right[rows]) < 5e-3


@kernels
def test_a_strided_order_is_read_right(place):
    p = problem(place, (1, 140), 16, 300, spread=4.0)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0)).int().to(place.device)
    strided = torch.stack([order, order.flip(0)], 1)[:, 0]
    results = [gradients(place, p, filter_eps=2.0**-5, vocab_order=o) for o in (order, strided)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@kernels
@pytest.mark.parametrize("width,column", [(16, 0), (16, 1), (21, 0), (536, 8)])
def test_with_an_order_the_rows_of_a_part_of_a_matrix_are_read_right(place, width, column, tight):
    p = problem(place, (1, 140), width, 300, spread=4.0)
    matrix = torch.full((300, width + 24), torch.nan, dtype=place.dtype, device=place.device)
    matrix[:, column : column + width] = p.weight.detach()
    part = matrix.requires_grad_()[:, column : column + width]
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0)).to(place.device)
    mine = gradients(place, p._replace(weight=part), filter_eps=2.0**-5, vocab_order=order)
    right = gradients(place._replace(backend="reference"), p, filter_eps=2.0**-5, vocab_order=order)
    bound = 1e-5 if place.dtype == torch.float32 else 1e-2
    assert all(relative(a, b) <= bound for a, b in zip(mine, right, strict=True))


@kernels
@pytest.mark.parametrize("memory", ["balanced", "lean"])
def test_an_ordered_gradient_is_sorted_back_when_lists_are_freed_and_in_the_room_that_is_left(
    place, memory, monkeypatch, tight
):
    made, left, beyond = [], [], []
    empty, unsort = torch.empty, launch.unsort_rows

    def noted(*shape, **keywords):
        tensor = empty(*shape, **keywords)
        made.append(weakref.ref(tensor))
        return tensor

    def look_first(*arguments):
        _, order, free, room = arguments
        beyond.append(room + free.nbytes + order.nbytes + 8 * len(order) + 40 * 150)  # and db, and the tokens
        tensors = [r() for r in made if r() is not None]
        left.append([t.shape for t in tensors if t.dtype in (torch.int8, torch.int16) and t.numel()])
        return unsort(*arguments)

    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(launch, "unsort_rows", look_first)
    p = problem(place, (1, 150), 16, 400)
    gradients(place, p, memory=memory, vocab_order="mean_logit", filter_eps=2.0**-5)
    assert left == [[], []], "before dC's rows go back, and db's"
    assert max(beyond) <= waves.ORDER_ROOM, "of a preset that is to use nothing else"


ORDERS = {
    "random": lambda n: torch.randperm(n, generator=torch.Generator().manual_seed(1)),
    "natural": torch.arange,
    "reversed": lambda n: torch.arange(n).flip(0),  # cycles of two rows
    "shifted": lambda n: (torch.arange(n) + 1) % n,  # one cycle
    "shifted by 12": lambda n: (torch.arange(n) + 12) % n,  # of 300: 12 cycles
}


def sort_back(place, vocab, columns, order, free, room):
    """Whether rows come to their places, and the bytes of each buffer for rows that was made. free: elements."""
    matrix = torch.randn(vocab, columns, generator=torch.Generator().manual_seed(0)).to(place.device, place.dtype)
    order = ORDERS[order](vocab).int().to(place.device)
    right = torch.empty_like(matrix)
    right[order.long()] = matrix
    # what is free begins at any element
    free = torch.zeros(free + 5, dtype=place.dtype, device=place.device)[5:]
    made, empty = [], torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *a, **k: made.append(empty(*a, **k)) or made[-1])
        reorder.unsort_rows(matrix, order, free, room)
    return torch.equal(matrix, right), [tensor.nbytes for tensor in made if tensor.dtype == torch.uint8]


def shuffle_programs(monkeypatch, draw):
    """The interpreter runs the programs of a grid one after the other: here in another order each time."""
    from triton.runtime import interpreter

    builder, turns = interpreter.interpreter_builder, {}
    set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx

    def shuffled(*grid):
        places = list(itertools.product(*map(range, grid)))
        turns.update(zip(places, draw.sample(places, len(places)), strict=True))
        set_dim(*grid)

    monkeypatch.setattr(builder, "set_grid_dim", shuffled)
    monkeypatch.setattr(builder, "set_grid_idx", lambda *program: set_idx(*turns[program]))


@kernels
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "vocab,columns,share", [(300, 21, 0.0), (257, 130, 0.2), (100, 130, 0.0), (1, 130, 0.0), (300, 1, 0.2)]
)
def test_rows_go_back_to_their_places_whatever_the_cycles_of_the_order(place, order, vocab, columns, share):
    """share: rows that what is free holds, of all."""
    free, size = int(share * vocab) * columns, place.dtype.itemsize
    least = max(8 * vocab, 2 * columns * size)  # two numbers a row, or two rows
    enough = free * size - 16 >= least
    assert sort_back(place, vocab, columns, order, free, 0) == (True, [] if enough else [least])


@kernels
def test_rows_go_back_to_their_places_in_orders_drawn_at_random_by_programs_in_any_turn(place, monkeypatch):
    draw = random.Random(0)
    monkeypatch.setattr(reorder, "ROWS_AT_ONCE", 8)
    monkeypatch.setattr(reorder, "CYCLES_AT_ONCE", 4)
    if place.device == "cpu":
        shuffle_programs(monkeypatch, draw)
    for _ in range(8 if place.device == "cpu" else 12):
        vocab, columns = draw.randrange(2, 150), draw.choice([1, 3, 40, 130])
        free, room = draw.randrange(vocab * columns), draw.choice([0, vocab * columns])
        assert sort_back(place, vocab, columns, draw.choice(list(ORDERS)), free, room)[0]


@kernels
def test_an_order_that_is_no_permutation_ends_and_nothing_is_written_elsewhere(place):
    generator = torch.Generator().manual_seed(0)
    for held in (0, 30, 200):
        for _ in range(2 if place.device == "cpu" else 4):
            order = torch.randint(150, (150,), generator=generator).int().to(place.device)
            everything = torch.full((3, 150, 40), 7.0, dtype=place.dtype, device=place.device)
            everything[1] = torch.randn(150, 40, generator=generator)
            free = everything[2].view(-1)[: held * 40]
            reorder.unsort_rows(everything[1], order, free, 0)
            assert (everything[0] == 7).all() and (everything[2].view(-1)[held * 40 :] == 7).all()


@kernels
@pytest.mark.parametrize("room,taken", [(0, 8 * 300), (4000, 4000), (10**6, 10**6)])
def test_the_room_that_a_preset_leaves_is_taken_where_nothing_is_free(place, room, taken):
    assert sort_back(place, 300, 70, "random", 30, room) == (True, [taken])
    assert sort_back(place, 300, 70, "random", 3000, room) == (True, [])


@kernels
@pytest.mark.parametrize("order", ["random", "reversed", "shifted", "shifted by 12"])
@pytest.mark.parametrize("held,stride", [(48, 17), (310, 1)])
def test_no_program_moves_more_rows_than_twice_its_share_of_all(place, order, held, stride, monkeypatch):
    walks = []

    class Noted:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*arguments, **options):
                walks.append((grid[0], arguments[3].clone()))
                return self.kernel[grid](*arguments, **options)

            return launch

    monkeypatch.setattr(reorder, "walk_kernel", Noted(reorder.walk_kernel))
    free = held * 70 + 16
    assert sort_back(place, 300, 70, order, free, 0) == (True, [])
    ((starts, (rows, steps)),) = walks
    assert starts <= held and len(steps) == (starts if stride > 1 else 0)
    if stride > 1:
        assert steps.max() <= stride
        counted = rows[steps > 0]
        assert len(counted) == len(counted.unique()) and (rows[: starts // 2] % stride == 0).all()
        if "shifted" in order:  # every cycle has a start, though one each 13 rows would fit, and 13 divides 299
            assert steps.sum() == 300
