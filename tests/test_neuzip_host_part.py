"""The host's part of packing: what it reads back, when, from where, and what kernels are told."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from paperlm_kernels.neuzip import launch_encode, pack, sample
from paperlm_kernels.neuzip.geometry import PROFILES
from paperlm_kernels.neuzip.header import Section
from paperlm_kernels.neuzip.launcher import Launcher, Starts
from paperlm_kernels.neuzip.read_back import WORDS, ReadBack
from support_neuzip import compiled_or_interpreted, gaussian, same_bits

B = PROFILES["fast"].block
CPU = torch.device("cpu")
BUFFERS = {
    "weights", "norm", "counts", "stored", "index", "packing", "left", "note", "pairs", "units", "directory", "most",
    "patch_directory", "escaping", "sums", "plane", "host", "payload", "patches", "decoding", "lowest",
}  # fmt: skip


def packed_by(spot, t, **options):
    return pack(t.to(spot.device), backend=spot.backend, **{"profile": "fast", **options})


class Late:
    """An event of a card: what kernels wrote is there when somebody has waited for it."""

    def record(self):
        self.found = self.room.clone()
        self.room.fill_(-1)

    def synchronize(self):
        self.room.copy_(self.found)


@compiled_or_interpreted
def test_the_host_reads_what_was_there_when_it_was_sent_and_places_are_used_again(spot, monkeypatch):
    if spot.device != "cpu":
        pytest.skip("a card has events of its own")
    event, room = Late(), torch.zeros(WORDS, dtype=torch.int32)
    event.room = room
    monkeypatch.setattr(ReadBack, "_free", {CPU: [(room, room.numpy(), event)]})
    t = gaussian(2 * B)
    for _ in range(2):
        assert packed_by(spot, t).to_bytes() == pack(t, profile="fast", backend="reference").to_bytes()
    assert [slot[2] for slot in ReadBack._free[CPU]] == [event]


def test_places_of_a_card_are_page_locked_its_own_and_never_given_back(monkeypatch):
    asked, make = [], torch.zeros
    monkeypatch.setattr(ReadBack, "_free", {})
    monkeypatch.setattr(ReadBack, "_all", [])
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory, **k: (asked.append(pin_memory), make(*a, **k))[1])
    monkeypatch.setattr(torch.cuda, "Event", object)
    first = ReadBack(torch.device("cuda", 0))
    first._slots.append(first._slot)
    other = ReadBack(torch.device("cuda", 1))
    assert asked == [True, True] and other.room is not first.room
    assert [id(room) for room in ReadBack._all] == [id(first.room), id(other.room)]


@compiled_or_interpreted
def test_places_are_on_the_host_whatever_the_default_device_is(spot, monkeypatch):
    monkeypatch.setattr(ReadBack, "_free", {})
    t = gaussian(2 * B).to(spot.device)
    with torch.device("meta"):
        packed_by(spot, t)


@compiled_or_interpreted
def test_a_codebook_is_not_what_a_later_packing_reads(spot, monkeypatch):
    monkeypatch.setattr(ReadBack, "_free", {})
    packed = packed_by(spot, gaussian(2 * B))
    before = packed.book.stored.copy()
    packed_by(spot, gaussian(2 * B, scale=2.0**40))
    assert np.array_equal(packed.book.stored, before)


@compiled_or_interpreted
def test_patches_of_four_bits_keep_no_spare_room_where_nothing_was_expected(spot):
    launch_encode._plan_of.cache_clear()
    t = gaussian(40 * 2 * B)
    t[t.abs() < 2.0**-18] = 0.02
    t[:3] = 2.0**90
    patches = packed_by(spot, t, profile="fix4").sections[Section.PATCH]
    assert patches.numel() == 3 and patches.untyped_storage().nbytes() == patches.nbytes


@compiled_or_interpreted
def test_a_codebook_is_made_anew_where_much_of_a_tensor_that_was_counted_in_part_escapes_it(spot, monkeypatch):
    monkeypatch.setattr(sample, "COUNTED", 2 * B)
    packed = packed_by(spot, gaussian(9 * B), raw="never")
    other = (gaussian(9 * B) * 2.0**60).to(spot.device)
    packed.update_(other, backend=spot.backend)
    assert same_bits(packed.unpack(backend=spot.backend).cpu(), other.cpu())
    assert packed.to_bytes() == pack(other.cpu(), profile="fast", raw="never", backend="reference").to_bytes()


@compiled_or_interpreted
def test_lanes_that_are_too_long_are_refused_on_a_device_too(spot, monkeypatch):
    launch_encode._plan_of.cache_clear()  # a plan has the number among its constants
    monkeypatch.setattr(launch_encode, "MOST_UNITS", 10)
    with pytest.raises(ValueError, match="exceed what a byte"):
        packed_by(spot, gaussian(2 * B), raw="never")
    launch_encode._plan_of.cache_clear()


@compiled_or_interpreted
def test_a_new_codebook_has_its_tables_on_the_device_and_the_host_makes_none(spot):
    packed = packed_by(spot, gaussian(2 * B))
    packed.unpack(backend=spot.backend)
    packed.update_(gaussian(2 * B).to(spot.device), backend=spot.backend)
    assert not {"palette", "lengths", "decoding", "packing", "index"} & packed.book.__dict__.keys()


@compiled_or_interpreted
@pytest.mark.parametrize("profile", ["fast", "fix4"])
def test_all_kernels_start_on_the_tensors_device(spot, monkeypatch, profile):
    inside, starts, run = [], [], launch_encode.Job.run

    @contextlib.contextmanager
    def there(t):
        inside.append(t)
        yield
        inside.pop()

    def noted(self, *arguments):
        starts.append(bool(inside))
        run(self, *arguments)

    monkeypatch.setattr(launch_encode, "on_device", there)
    monkeypatch.setattr(launch_encode.Job, "run", noted)
    packed_by(spot, gaussian(2 * B), profile=profile, raw="never")
    assert len(starts) == 5 and all(starts)


def test_no_program_counts_more_steps_than_its_counters_hold(monkeypatch):
    t = gaussian(40 * B)
    header = pack(t, profile="fast", raw="never", backend="reference").header.with_patches(0)
    job, started = launch_encode.Job(t, header), []
    monkeypatch.setattr(launch_encode, "MOST_STEPS", 16)  # two blocks
    monkeypatch.setattr(job, "run", lambda launcher, programs, *numbers: started.append((programs, *numbers)))
    job.count((40, 1))
    assert started == [(20, 40 * B, 40, 1, 20)]


@pytest.mark.parametrize("start,whole", [(0, True), (1, False), (4, False), (8, True)])
def test_a_view_that_begins_between_16_bytes_is_not_loaded_16_at_a_time(start, whole):
    room = torch.zeros(2 * B + 16, dtype=torch.bfloat16)
    begin = -room.data_ptr() % 16 // 2 + start
    header = pack(room[: 2 * B], profile="fast", raw="never", backend="reference").header.with_patches(0)
    assert launch_encode.Job(room[begin:][: 2 * B], header).plan.starts.constants["ALIGNED"] is whole


@compiled_or_interpreted
def test_directories_of_more_blocks_than_are_added_up_at_once(spot):
    n = 40
    buffers = {
        "most": torch.arange(n), "directory": torch.arange(n + 1), "patch_directory": torch.ones(n + 1),
        "note": torch.arange(WORDS), "host": torch.zeros(WORDS),
    }  # fmt: skip
    buffers = {name: t.to(spot.device, torch.int32) for name, t in buffers.items()}
    sizes = buffers["directory"].clone()
    for most, end in ((n - 2, -1), (n - 1, n * (n - 1) // 2)):  # of a lane that is too long, nothing finds room
        buffers["directory"][:], buffers["patch_directory"][:] = sizes, 1
        starts = Starts({"NOTED": WORDS, "STREAMS": True, "STEP": 16, "MOST": most})
        starts.run(launch_encode._SCAN, 1, {name: t.data_ptr() for name, t in buffers.items()}, buffers.get, n)
        assert buffers["directory"].tolist() == [*np.cumsum([0, *range(n - 1)]).tolist(), end]
    assert buffers["patch_directory"].tolist() == list(range(n + 1))
    assert buffers["host"].tolist() == [n * (n - 1) // 2, n, n - 1, *range(3, WORDS)]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile")
@pytest.mark.parametrize("name", [name for name, value in vars(launch_encode).items() if isinstance(value, Launcher)])
def test_a_number_is_no_constant_of_a_kernel_that_is_found_once(name):
    """One that is 1, or a multiple of 16, at the first start would be compiled for that, and is another later."""
    for parameter in getattr(launch_encode, name).kernel.params:
        assert parameter.is_constexpr or parameter.name in BUFFERS or parameter.do_not_specialize, parameter.name
