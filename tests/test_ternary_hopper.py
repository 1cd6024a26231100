"""Which products go to the kernel for Hopper, in which tiles, and when weights may be read early: without a card."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from paperlm_kernels.ternary_linear import hopper, launch, pack_ternary
from support_ternary import ternary

CPU = torch.device("cpu")


@pytest.mark.parametrize("tokens", [5, 16, 17, 64, 65, 256, 1025])
@pytest.mark.parametrize("rows,columns", [(1, 1), (300, 688), (4096, 11008), (22016, 4096)])
def test_tiles_fit_the_matrix_units_and_no_program_is_without_a_step(tokens, rows, columns):
    width = -(-columns // 128) * 32
    tiles = hopper.stream_tiles_of(tokens, rows, width, 132)
    steps = -(-width // (32 * tiles.chunks))
    assert tiles.rows % 64 == 0 and 16 <= tiles.tokens <= 64 and 1 <= tiles.splits <= steps
    assert (tiles.splits - 1) * -(-steps // tiles.splits) < steps
    # of two programs a multiprocessor, less what each needs for itself
    assert tiles.stages * 32 * tiles.chunks * (tiles.rows + 4 * tiles.tokens) <= (228 // 2 - 2) * 1024


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_each_sum_that_is_handed_over_has_a_place_of_its_own_and_a_warps_lie_in_two_lines_of_the_cache(rows, tokens):
    stream = pytest.importorskip("paperlm_kernels.ternary_linear.stream")
    places = stream.place_of.fn(np.arange(rows)[:, None], np.arange(tokens)[None, :], rows)
    assert sorted(places.reshape(-1)) == list(range(rows * tokens))
    # of wgmma's sums a thread has two neighbours at once: lane i those of row i // 4 and tokens 2 (i % 4), and one on
    for row, token in itertools.product(range(0, rows, 8), range(0, tokens, 8)):
        assert len({int(place) // 32 for place in places[row : row + 8, token : token + 8].reshape(-1)}) == 2


def test_a_sum_is_shared_where_rows_are_too_few_to_keep_a_card_busy():
    assert hopper.stream_tiles_of(16, 4096, 2752, 132).splits == 4
    assert hopper.stream_tiles_of(16, 4096, 1024, 132).splits == 3
    assert hopper.stream_tiles_of(16, 3200, 2176, 132).splits == 6
    assert hopper.stream_tiles_of(64, 4096, 2752, 132).splits == 2
    assert hopper.stream_tiles_of(64, 4096, 1024, 132).splits == 1
    assert hopper.stream_tiles_of(16, 6144, 512, 132).splits == 1, "short rows for two thirds of the card"
    assert [hopper.stream_tiles_of(tokens, 5120, 3456, 132).splits for tokens in (16, 64)] == [2, 2], "and long ones"
    assert hopper.stream_tiles_of(16, 12288, 1024, 132).splits == 1


@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_more_programs_than_can_share_a_tile_are_refused(tokens):
    tiles = hopper.StreamTiles(tokens, 64, 2, 4)
    most = hopper.most_splits(tiles)
    assert hopper.constants_of(dataclasses.replace(tiles, splits=most))["PARTS"] == most
    with pytest.raises(ValueError, match=f"at most {most} can"):
        hopper.constants_of(dataclasses.replace(tiles, splits=most + 1))


@pytest.mark.parametrize("rows,columns,right", [(4096, 4096, (8, 64, 3)), (12288, 4096, (8, 64, 3)),
                                                (9600, 3200, (8, 32, 4)), (22016, 4096, (16, 32, 3)),
                                                (4096, 11008, (8, 64, 5))])  # fmt: skip
def test_a_token_on_hopper_takes_small_programs(rows, columns, right):
    few = launch.token_tiles_of(rows, columns // 4, 132)
    assert (few.rows, few.words, few.stages) == right and few.warps == 1


def test_what_is_on_no_hopper_card_is_taken_by_the_kernels_for_every_card():
    packed = pack_ternary(ternary(300, 256))
    assert not hopper.is_hopper(CPU)
    assert not hopper.applies(torch.zeros(16, 256, dtype=torch.int8), packed.data)


def test_a_hopper_card_is_one_of_capability_9_0_and_the_interpreter_has_none(monkeypatch):
    device, asked = torch.device("cuda:0"), hopper.is_hopper.__wrapped__
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for capability, right in (((8, 0), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert asked(device) is right
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not asked(device)


def test_a_triton_without_gluon_for_hopper_leaves_products_to_the_other_kernels(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "paperlm_kernels.ternary_linear.stream", None)
    assert not hopper.has_stream.__wrapped__()


def test_on_hopper_the_copy_engine_takes_whole_rows_that_begin_at_multiples_of_16_bytes(monkeypatch):
    monkeypatch.setattr(hopper, "is_hopper", lambda _: True)
    monkeypatch.setattr(hopper, "has_stream", lambda: True)
    data = pack_ternary(ternary(300, 256)).data
    room = torch.zeros(17 * 256, dtype=torch.int8)
    start = -room.data_ptr() % 16
    codes = room[start : start + 16 * 256].view(16, 256)
    odd = room[start + 4 : start + 4 + 16 * 256].view(16, 256)
    assert hopper.applies(codes, data)
    assert not hopper.applies(odd, data)
    assert not hopper.applies(codes, data.to(torch.int8))  # weights of a byte each


def test_weights_are_read_early_once_a_product_has_read_them_and_until_they_are_written():
    data = pack_ternary(ternary(10, 20)).data
    assert [hopper.settled(data) for _ in range(3)] == [False, True, True]
    data.copy_(pack_ternary(ternary(10, 20, seed=1)).data)
    assert [hopper.settled(data) for _ in range(2)] == [False, True]
    assert not hopper.settled(data.clone())
    with torch.inference_mode():
        unknown = data.clone()
    assert [hopper.settled(unknown) for _ in range(2)] == [False, False]  # it has no counter of writes


def test_weights_that_another_stream_has_read_are_not_read_early_but_those_read_before_a_capture_are(monkeypatch):
    """A product that another stream has made says nothing of what ran in this one; a graph begins with all at rest."""
    data = pack_ternary(ternary(10, 20)).data
    places = [(0, 0, 1), (0, 0, 2), (0, 0, 2), (0, 7, 2), (0, 7, 3), (0, 8, 3), (0, -1, 0), (0, 0, 2)]
    right = [False, False, True, True, False, True, False, False]
    for place, early in zip(places, right, strict=True):
        monkeypatch.setattr(hopper, "_place", lambda _, now=place: now)
        assert hopper.settled(data) is early, place


def test_weights_that_take_the_place_of_others_in_a_tensor_are_not_read_early():
    data = pack_ternary(ternary(10, 20)).data
    hopper.settled(data)
    data.data = data.data.clone()
    assert [hopper.settled(data) for _ in range(2)] == [False, True]


def test_sums_of_graphs_are_apart_zeros_and_kept_however_many_there_are(monkeypatch):
    """A graph can be replayed at any time: memory that its products share sums in is given to nobody else."""
    rooms, given, grain = {}, [], hopper.GRAIN
    monkeypatch.setattr(hopper, "_ROOM", rooms)
    monkeypatch.setattr(hopper, "_ROOMS", [])
    monkeypatch.setattr(hopper, "_CAPTURED", {})

    def room():
        hopper._ROOMS.append(torch.full((12 * grain,), 9, dtype=torch.int32))
        rooms[0] = hopper._ROOMS[-1]

    for number in range(200):
        if number % 4 == 0:
            room()
        monkeypatch.setattr(hopper, "capture_of", lambda _, now=number: (0, now + 1, 5))
        mine = hopper._parts(grain - 1, CPU)
        assert mine.data_ptr() == hopper._parts(grain, CPU).data_ptr() and not mine.any()
        larger = hopper._parts(grain + 1, CPU)
        assert larger.numel() == 2 * grain and not larger.any(), "a larger product has other memory"
        assert hopper._parts(7, CPU).data_ptr() == larger.data_ptr()
        given += [(mine.data_ptr(), mine.numel()), (larger.data_ptr(), larger.numel())]
        assert hopper._parts(13 * grain, CPU).numel() == 13 * grain, "and what finds no room has its own"
    assert len(hopper._CAPTURED) <= 64
    given = sorted((at, at + 4 * numbers) for at, numbers in given)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(given))
    kept = [(r.data_ptr(), r.data_ptr() + 4 * r.numel()) for r in hopper._ROOMS]
    assert all(any(low <= at and end <= high for low, high in kept) for at, end in given)
