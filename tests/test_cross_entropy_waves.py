"""How the backward pass is divided: waves of tiles, the sums carried between them, and the units that programs share.

They run under the interpreter (TRITON_INTERPRET=1) and on a GPU; without either only the arithmetic is tested.
"""

from __future__ import annotations

import pytest
import torch
from support_cross_entropy import (
    KERNELS,
    Place,
    check_gradients,
    compare,
    gradients,
    kernels,
    problem,
    relative,
    tighten,
)

if KERNELS:
    import triton
    import triton.language as tl
    from paperlm_kernels.cross_entropy import launch
    from paperlm_kernels.cross_entropy.products import _loads, _remainder, _unsplit
    from paperlm_kernels.cross_entropy.sharing import MOST_PROGRAMS, UNIT_COST, delays, unit_of_turn

    @triton.jit
    def there_and_back(x, value, y, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        short = tl.load(value + at)  # the interpreter's own conversion to bfloat16 cuts off instead of rounding
        tl.store(y + at, _unsplit(short, _remainder(tl.load(x + at), short)))

    @triton.jit
    def share_out(done, lengths, long_units, short_length, short_units):
        """Counts in done (units, programs) who does what: the long units in turns, then the short ones."""
        program = tl.program_id(0)
        programs = tl.num_programs(0)
        q = tl.arange(0, MOST_PROGRAMS)
        load = tl.zeros([MOST_PROGRAMS], tl.int32)
        for begin in range(0, long_units, programs):
            there = (q < programs) & (begin + q < long_units)
            load += tl.where(there, tl.load(lengths + begin + q, mask=there, other=0) + UNIT_COST, 0)
            if begin + program < long_units:
                tl.store(done + (begin + program) * programs + program, 1)
        delay, own, longest = delays(load, short_length + UNIT_COST, programs)
        turn = 0
        given = 0
        while given < short_units:
            unit, given = unit_of_turn(turn, given, short_units, delay, own, longest, programs)
            turn += 1
            if unit < short_units:
                at = done + (long_units + unit) * programs + program
                tl.store(at, tl.load(at) + 1)

    @triton.jit
    def load_both(
        out, row_starts, first, last, offsets, group_counts, row_blocks, groups, columns,
        SOME: tl.constexpr, VISIT: tl.constexpr,
    ):  # fmt: skip
        q = tl.arange(0, MOST_PROGRAMS)
        for kind in tl.static_range(2):
            units = (row_blocks if kind == 0 else last - first) * columns
            load = _loads(
                units, row_starts, first, last, offsets, group_counts, row_blocks, groups, columns, 4, kind == 0, SOME,
                VISIT, 3,
            )  # fmt: skip
            tl.store(out + kind * MOST_PROGRAMS + q, load)


MEMORY = ("fast", "balanced", "lean")
FILTERS = ("both", "hidden", "weight")


@kernels
@pytest.mark.parametrize("memory", MEMORY)
def test_many_waves_give_what_one_gives(place, memory, monkeypatch):
    p = problem(place, (1, 140), 16, 500, ignore="some", spread=4.0)
    settings = [{"filter_eps": 2.0**-5, "filter_grads": f} for f in FILTERS] + [{"filter_eps": None}]
    if place.device == "cpu":  # the interpreter is slow, and the presets differ in the scratch and in how dE is carried
        settings = settings[1::2] if memory == "balanced" else settings[:1]
    roomy = [gradients(place, p, memory=memory, **s) for s in settings]
    tighten(monkeypatch)
    for setting, right in zip(settings, roomy, strict=True):
        mine = gradients(place, p, memory=memory, **setting)
        check_gradients(place, mine[1:], right[1:], {0: 1e-2 if place.dtype.itemsize == 2 else 1e-5})


@kernels
@pytest.mark.parametrize("dtype,bits", [(torch.bfloat16, 8), (torch.float16, 11)])
def test_a_triton_byte_holds_eight_bits_more_than_a_16_bit_number(place, dtype, bits):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1024, generator=g) * torch.exp2(torch.randint(-30, 15, (1024,), generator=g))
    x[:8] = torch.tensor([0.0, -0.0, 1.0, -2.0, 0.99999994, 1.0000001, 2.0**-24, -(2.0**-13) * 1.001])
    x = x.to(place.device)
    value, y = x.to(dtype), torch.empty_like(x)
    there_and_back[(4,)](x, value, y, BLOCK=256)
    # half a 254th of the spacing of the 16-bit numbers there, which in float16 is at least 2^-24
    spacing = torch.exp2(torch.frexp(value.float()).exponent.float() - bits)
    spacing = spacing.clamp(min=2.0**-24) if dtype == torch.float16 else spacing
    assert ((y - x).abs() <= spacing * (0.501 / 254) + 1e-7 * x.abs() + 2.0**-130).all()


@kernels
@pytest.mark.parametrize("setting,value", [("L2_BYTES", 1), ("WINDOW", 1), ("FLAT_WIDTH", 0)])
def test_the_order_of_the_work_and_the_shape_of_the_loops_change_rounding_at_most(place, setting, value, monkeypatch):
    p = problem(place, (1, 140), 24, 400, ignore="some", spread=4.0)
    settings = {"filter_eps": 2.0**-5, "reduction": "sum"}
    before = gradients(place, p, **settings)
    monkeypatch.setattr(launch, setting, value)
    after = gradients(place, p, **settings)
    bound = 1e-5 if place.dtype == torch.float32 else 2e-3
    assert all(relative(a, b) <= bound for a, b in zip(after, before, strict=True))
    if setting == "WINDOW":
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@kernels
@pytest.mark.parametrize(
    "setting", [{"logit_scale": 0.37}, {"logit_scale": -0.37}, {"softcap": 3.0}, {"keep_logits": True}], ids=str
)
def test_the_loops_for_wide_embeddings_give_the_loss_and_gradients_of_pytorch(place, setting, monkeypatch):
    if setting.get("keep_logits") and place.dtype != torch.float32:
        pytest.skip("kept logits are rounded to 16 bits")
    monkeypatch.setattr(launch, "FLAT_WIDTH", 0)
    compare(place, problem(place, (1, 140), 32, 400, bias=False, ignore="some", spread=4.0), **setting)


SIXTEEN_BITS = [Place(p.backend, p.device, torch.float16) for p in KERNELS if p.dtype == torch.float32]
SIXTEEN_BITS += [p for p in KERNELS if p.dtype == torch.bfloat16]


@pytest.mark.parametrize("place", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("filter_eps", [None, 2.0**-7])
def test_sums_carried_in_16_bits_and_a_byte_round_as_those_of_one_wave(place, filter_eps, monkeypatch):
    p = problem(place, (1, 150), 40, 800, bias=False, ignore="some")
    settings = {"filter_eps": filter_eps, "logit_scale": 0.3, "reduction": "sum"}
    whole = gradients(place, p, **settings)[1]
    tighten(monkeypatch)
    carried, rounded = (gradients(place, p, memory=m, **settings)[1] for m in ("balanced", "lean"))
    # seven sums: with a byte beyond its dtype one in a hundred comes out on the other side of a rounding boundary
    assert (carried == whole).float().mean() > 0.97 > (rounded == whole).float().mean()
    assert relative(carried, whole) < 0.1 * relative(rounded, whole) + 2e-5


@pytest.mark.parametrize("place", SIXTEEN_BITS, ids=str)
def test_sums_rounded_to_the_inputs_dtype_are_those_of_the_reference(place, monkeypatch):
    tighten(monkeypatch)
    p = problem(place, (1, 130), 16, 900, bias=False)
    settings = {"filter_eps": None, "reduction": "sum"}
    mine = gradients(place, p, accumulate="input", **settings)[1]
    same, other = (
        gradients(place._replace(backend="reference"), p, accumulate=how, **settings)[1] for how in ("input", "fp32")
    )
    assert relative(mine, same) < 0.6 * relative(mine, other)


@pytest.mark.parametrize(
    "groups,row_blocks,slots,row_slots", [(2000, 64, 36128, 18.0), (7, 3, 3, 0.0), (9, 2, 33, 3.2)]
)
def test_the_waves_cover_the_vocabulary_and_each_fits(groups, row_blocks, slots, row_slots):
    pytest.importorskip("triton")
    from paperlm_kernels.cross_entropy.waves import wave_count

    first, waves = 0, 0
    while first < groups:
        end = max(e for e in range(first, groups + 1) if -(-e * row_slots // 1) + (e - first) * row_blocks <= slots)
        assert end > first
        first, waves = end, waves + 1
    assert wave_count(groups, row_blocks, slots, row_slots) == waves


@pytest.mark.parametrize("tokens,vocab,width,waves", [
    (8192, 256000, 2304, 32), (32768, 50257, 768, 17), (65536, 32000, 768, 11), (131072, 128256, 4096, 32),
    (131072, 32000, 256, 4), (100, 300, 16, 4),
])  # fmt: skip
@pytest.mark.parametrize("memory,exact,limit", [("balanced", False, 32), ("balanced", True, 16), ("fast", False, 32)])
def test_long_batches_take_few_waves_or_256_mib(tokens, vocab, width, waves, memory, exact, limit):
    pytest.importorskip("triton")
    from paperlm_kernels.cross_entropy.waves import MIB, SLOT, budget, most_waves, spare_slots, wave_count

    row_blocks, groups, row_slots = -(-tokens // 128), -(-vocab // 128), width / 128
    bound = 2 * (tokens + vocab) * width
    most = most_waves(memory, exact, False, groups, -(-width // 256), 132)
    assert most == min(waves, limit)
    spare = spare_slots(budget(memory, exact, bound), 0, row_blocks, groups, row_slots, 2, most)
    waves = wave_count(groups, row_blocks, spare + -int(-groups * row_slots // 1), row_slots)
    assert waves <= most or spare >= 256 * MIB // (2 * SLOT)
    assert 2 * SLOT * spare <= max(0.25 * bound, 256 * MIB)


def test_what_the_way_back_may_take_is_what_the_allocator_left():
    pytest.importorskip("triton")
    from paperlm_kernels.cross_entropy.waves import MIB, ORDER_ROOM, allocated, budget, order_room

    # a rest of 1 MiB stays with its buffer, a larger one is split off
    assert [allocated(n * MIB // 2) // (MIB // 2) for n in (20, 21, 22, 23, 24)] == [20, 21, 24, 24, 24]
    # 12,288 tokens, 131,072 ids, width 2,048, lean: 96 slots of 32 KiB behind dC
    bound, dc = 2 * (12288 + 131072) * 2048, 2 * 131072 * 2048
    held = [dc + 96 * 32768, 2 * 12288 * 2048]
    vectors = 40 * 12288 + 4 * 131072
    room = order_room(budget("lean", False, bound), bound, held, vectors)
    assert room == 4 * MIB + 2 * MIB - (3 * MIB + MIB) - vectors < ORDER_ROOM
    assert order_room(budget("fast", False, bound), bound, held, vectors) == ORDER_ROOM
    assert order_room(0.0, bound, held, vectors) < 0


def test_a_frozen_classifier_costs_scratch_and_not_a_wave_for_each_group():
    pytest.importorskip("triton")
    from paperlm_kernels.cross_entropy.waves import MIB, SLOT, budget, most_waves, spare_slots, wave_count

    assert most_waves("lean", False, False, 2000, 9, 132) is None
    for exact, limit in ((False, 32), (True, 16)):
        most = most_waves("lean", exact, True, 2000, 9, 132)
        assert most == limit
        slots = spare_slots(budget("lean", exact, 1161 * MIB), 0, 64, 2000, 0.0, 2, most)
        assert wave_count(2000, 64, slots, 0.0) <= limit
        assert 2 * SLOT * slots <= 256 * MIB


@kernels
@pytest.mark.parametrize("programs,long_units,long_length,short_units,short_length", [
    (12, 6, 32, 96, 2), (12, 52, 31, 270, 6), (12, 3, 24, 70, 1), (4, 3, 10, 40, 2), (4, 8, 10, 5, 2), (7, 0, 5, 3, 1),
    (12, 5, 1, 3, 1), (132, 576, 396, 6075, 40),
])  # fmt: skip
@pytest.mark.parametrize("uneven", [False, True])
def test_programs_do_every_unit_once_and_end_together(
    place, programs, long_units, long_length, short_units, short_length, uneven
):
    if place.dtype != torch.float32:
        pytest.skip("one dtype is enough")
    if place.device == "cpu" and (programs > 12 or not uneven):
        pytest.skip("the interpreter is slow")
    lengths = torch.full((long_units,), long_length, dtype=torch.int32)
    if uneven:
        lengths = (lengths * (0.7 + 0.6 * torch.rand(long_units, generator=torch.Generator().manual_seed(0)))).int()
    turns = torch.zeros(long_units + short_units, programs, dtype=torch.int32, device=place.device)
    share_out[(programs,)](turns, lengths.to(place.device), long_units, short_length, short_units)
    turns = turns.cpu()
    assert (turns.sum(1) == 1).all()
    first = (turns[:long_units] * (lengths[:, None] + 2)).sum(0)
    load = first + turns[long_units:].sum(0) * (short_length + 2)
    # none ends later than fair by more than two short units, unless the long ones alone take longer
    fair = max(load.sum().item() / programs, first.max().item())
    assert load.max() <= fair + 2 * (short_length + 2)


@kernels
@pytest.mark.parametrize("visit", ["listed", "some", "all"])
def test_the_load_of_a_program_is_the_tiles_of_its_units(place, visit):
    if place.dtype != torch.float32:
        pytest.skip("one dtype is enough")
    row_blocks, groups, columns, first, last, cost = 5, 11, 4, 2, 9, 2
    alive = torch.rand(row_blocks, groups, generator=torch.Generator().manual_seed(0)) < 0.4
    row_starts = torch.nn.functional.pad(alive.int().cumsum(1), (1, 0)).to(torch.int16)
    counts = alive.int().sum(0).int()
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    out = torch.zeros(2, MOST_PROGRAMS.value, dtype=torch.int32)
    tensors = [t.to(place.device) for t in (out, row_starts, offsets, counts)]
    load_both[(1,)](
        *tensors[:2], first, last, *tensors[2:], row_blocks, groups, columns, SOME=visit != "all", VISIT=visit
    )
    here = alive[:, first:last] if visit != "all" else torch.ones(row_blocks, last - first)
    for kind, lengths in enumerate((here.int().sum(1), here.int().sum(0))):
        right = [0] * MOST_PROGRAMS.value
        # columns in chunks of three, and in each of them one row block or group after the other
        order = [n for chunk in (3, 1) for n in lengths.tolist() for _ in range(chunk)]
        for unit, n in enumerate(order):
            right[unit % 4] += n + cost
        assert tensors[0][kind].tolist() == right


@pytest.mark.parametrize(
    "tokens,vocab,named", [(2**20 + 1, 8, "at most 1048576"), (2**20, 2**25, "tiles of 128 x 128")]
)
def test_more_than_the_kernels_can_index_is_refused(tokens, vocab, named):
    pytest.importorskip("triton")
    from paperlm_kernels.cross_entropy.ops import linear_cross_entropy_core

    hidden, weight = torch.zeros(1, 8).expand(tokens, 8), torch.zeros(1, 8).expand(vocab, 8)
    with pytest.raises(ValueError, match=f"split.*{named}"):
        linear_cross_entropy_core(hidden, weight, None, torch.zeros(1, dtype=torch.int64).expand(tokens))
