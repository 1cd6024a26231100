"""Room that is taken before it is known how much a tensor needs: what is written there, what is kept, what is not."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch

pytest.importorskip("triton")

from paperlm_kernels.neuzip import launch, launch_encode, pack
from paperlm_kernels.neuzip.buffers import Layout
from paperlm_kernels.neuzip.coding import Later
from paperlm_kernels.neuzip.geometry import PROFILES
from paperlm_kernels.neuzip.header import Section
from paperlm_kernels.neuzip.launch_encode import SPARE, SPARE_PATCHES, SPARE_WORDS, Guess, Job, begin_encode
from paperlm_kernels.neuzip.launcher import Launcher
from paperlm_kernels.neuzip.record import Packed
from support_neuzip import Told, compiled_or_interpreted, gaussian, odd_weights, same_bits

B = PROFILES["fast"].block
FILL = 0x5A5A5A5A


@pytest.fixture(autouse=True)
def nothing_is_expected():
    launch_encode._plan_of.cache_clear()
    yield
    launch_encode._plan_of.cache_clear()


@pytest.fixture
def writes(monkeypatch):
    """How many kernels of streams, or of patches of four bits, were started."""
    started, run = [], Job.run

    def noted(job, launcher, *rest):
        if launcher in (launch_encode._WRITE, launch_encode._PATCH):
            started.append(launcher)
        run(job, launcher, *rest)

    monkeypatch.setattr(Job, "run", noted)
    return started


def exact(t, profile):
    return pack(t, profile=profile, raw="never", backend="reference")


def spare(words, patches):
    return words // SPARE_WORDS + SPARE, patches // SPARE_PATCHES + SPARE


@compiled_or_interpreted
@pytest.mark.parametrize("profile", ["fast", "fix4"])
def test_a_tensor_like_the_last_is_written_once_and_one_unlike_it_twice(spot, writes, profile):
    options = {"profile": profile, "raw": "never", "backend": spot.backend}
    many = [odd_weights(B + 3000, seed=7, finite=False)] * 2
    many += [gaussian(B + 3000), many[0]]
    for t, all_writes in zip(many, [1, 2, 4, 6] if profile == "fast" else [2, 3, 4, 6], strict=True):
        assert pack(t.to(spot.device), **options).to_bytes() == exact(t, profile).to_bytes()
        assert len(writes) == all_writes


@compiled_or_interpreted
@pytest.mark.parametrize("profile", ["fast", "fix4"])
@pytest.mark.parametrize("more_words", [0, 1, -1])
@pytest.mark.parametrize("more_patches", [0, 1, -1, None])
def test_what_was_expected_may_be_as_far_off_as_the_spare_room(spot, writes, profile, more_words, more_patches):
    """More and fewer by what is spare, and by one more than that; None: none at all was expected."""
    t = odd_weights(B + 3000, seed=1, finite=False)
    right = exact(t, profile)
    words, patches = right._taken
    for beyond in (0, 1):
        wrong_words, wrong_patches = 0, 0
        if more_words and profile == "fast":
            wrong_words = most_wrong(words, more_words, lambda w: spare(w, 1)[0]) + more_words * beyond
        if more_patches:
            wrong_patches = most_wrong(patches, more_patches, lambda p: spare(1, p)[1]) + more_patches * beyond
        like = (words + wrong_words, 0 if more_patches is None else patches + wrong_patches)
        holds = more_patches is not None and not (beyond and (wrong_words or wrong_patches))
        assert Guess(like).holds(words, patches) is holds
        del writes[:]
        made = Packed(*begin_encode(t.to(spot.device), right.header.with_patches(0), None, like=like)())
        assert made.to_bytes() == right.to_bytes()
        assert len(writes) == (1 if holds or (profile == "fix4" and like[1] > patches) else 2)
        own = {section: made.sections[section] for section in (Section.PAYLOAD, Section.PATCH)}
        kept = {s.untyped_storage().data_ptr(): s.untyped_storage().nbytes() for s in own.values() if s.numel()}
        if profile == "fix4":
            assert kept[own[Section.PATCH].untyped_storage().data_ptr()] <= 4 * (patches + patches // 3 + 3 * SPARE)
        else:
            needed = sum(s.nbytes for s in own.values())
            assert sum(kept.values()) <= needed + words // 128 + 4 * (patches // 3 + 6 * SPARE)


@compiled_or_interpreted
def test_much_more_than_is_needed_is_not_kept_where_it_was_expected(spot):
    t = odd_weights(B + 3000, seed=1, finite=False)
    for profile in ("fast", "fix4"):
        right = exact(t, profile)
        words, patches = right._taken
        made = Packed(
            *begin_encode(t.to(spot.device), right.header.with_patches(0), None, like=(words, 50 * patches))()
        )
        assert made.to_bytes() == right.to_bytes()
        assert made.sections[Section.PATCH].untyped_storage().nbytes() <= 4 * (words + patches) + 1024


def test_where_nothing_was_expected_nothing_is_spare_and_no_length_below_zero_has_room():
    assert Guess((100_000, 0)).patches == 0 and Guess((0, 0)).fewest == 0
    assert Guess((0, 0)).holds(0, 0) and not Guess((0, 0)).holds(-1, 0)


@compiled_or_interpreted
@pytest.mark.parametrize("profile", ["fast", "fix4"])
def test_a_room_that_does_not_do_is_free_before_another_is_taken(spot, profile, monkeypatch):
    asked, room = [], Layout.room

    def noted(layout, *rest, **named):
        alive = [made() is not None for made in asked]
        made = room(layout, *rest, **named)
        if {name for name, _ in layout.offsets} <= {"payload", "patches"}:
            assert not any(alive)
            asked.append(weakref.ref(made))
        return made

    monkeypatch.setattr(Layout, "room", noted)
    t = odd_weights(B + 3000, seed=1, finite=False)
    right = exact(t, profile)
    made = begin_encode(t.to(spot.device), right.header.with_patches(0), None, like=(20_000, 30))()
    assert len(asked) == 2 and Packed(*made).to_bytes() == right.to_bytes()


def most_wrong(right, sign, spare_of):
    """The most that can be expected too much (sign 1) or too little (-1) so that what is right still fits."""
    wrong = 0
    while abs(wrong + sign) <= spare_of(right + wrong + sign):
        wrong += sign
    return wrong


@compiled_or_interpreted
def test_streams_without_room_leave_it_as_it_was_and_those_with_room_what_lies_around_it(spot):
    t = odd_weights(B + 3001, seed=3, finite=False)  # the last octet is not whole
    right = exact(t, "fast")
    header, (words, patches) = right.header.with_patches(0), right._taken
    begin_encode(t.to(spot.device), header, None, like=(1, patches))()  # the job below does what it does
    for fewest, most, room in ((words + 1, words + 9, 3), (0, words - 1, 3), (words, words, patches)):
        job = Job(t.to(spot.device), header)
        counted = job.count(launch_encode.runs_of(header, True))
        job.take(job.plan.tables)
        job.run(launch_encode._CODEBOOK, 1, counted, header.geometry.limit, 8)
        job.run(launch_encode._SIZE, header.blocks, header.numel)
        job.scan().wait()
        whole = torch.full((words + patches + 8192,), FILL, dtype=torch.int32, device=spot.device)
        job.give("payload", whole[2048:])
        job.give("patches", whole[words + 4096 :])
        numbers = 0, header.geometry.limit, 2, fewest, most, room, header.numel
        job.run(launch_encode._WRITE, 2 * header.blocks, *numbers)
        written = (whole != FILL).nonzero().flatten().tolist()
        if most != words:
            assert written == []
            continue
        guard = header.geometry.guard
        assert written[0] >= 2048 and written[-1] < words + 4096 + patches
        assert not any(words + 2048 + guard <= place < words + 4096 for place in written)
        assert torch.equal(whole[2048:][: words + guard].cpu(), right.sections[Section.PAYLOAD])
        assert torch.equal(whole[words + 4096 :][:patches].cpu(), right.sections[Section.PATCH])


@compiled_or_interpreted
def test_lanes_that_are_too_long_are_refused_where_streams_were_expected_too(spot, monkeypatch):
    t = gaussian(2 * B).to(spot.device)
    options = {"profile": "fast", "raw": "never", "backend": spot.backend}
    pack(t, **options)
    (plan,) = [launch_encode.Job(t, pack(t, **options).header).plan]
    monkeypatch.setattr(launch_encode, "MOST_UNITS", 10)
    monkeypatch.setitem(plan.starts.constants, "MOST", 10)
    monkeypatch.setattr(plan.starts, "_found", {})
    with pytest.raises(ValueError, match="exceed what a byte"):
        pack(t, **options)


@compiled_or_interpreted
@pytest.mark.parametrize("profile", ["fast", "fix4"])
def test_an_update_expects_what_is_replaced_whatever_was_packed_in_between(spot, writes, profile):
    t = gaussian(B + 3000)
    packed = pack(t.to(spot.device), profile=profile, raw="never", backend=spot.backend)
    other = odd_weights(B + 3000, seed=7, finite=False)
    pack(other.to(spot.device), profile=profile, raw="never", backend=spot.backend)
    packed.update_(t.to(spot.device), backend=spot.backend)  # with the old codebook
    pack(other.to(spot.device), profile=profile, raw="never", backend=spot.backend)
    del writes[:]
    packed.update_(t.to(spot.device), backend=spot.backend)
    assert len(writes) == 1
    assert same_bits(packed.unpack(backend=spot.backend).cpu(), t)


@compiled_or_interpreted
@pytest.mark.parametrize("profile", ["fast", "fix4"])
def test_packings_that_expect_the_same_and_are_begun_together_have_rooms_of_their_own(spot, profile):
    many = [torch.cat([odd_weights(3000, seed=5, finite=False), gaussian(B, seed=n)]) for n in range(3)]
    right = [exact(t, profile) for t in many]
    header = right[0].header.with_patches(0)
    ends = [begin_encode(t.to(spot.device), header, None, like=right[0]._taken) for t in many]
    packed = {n: Packed(*ends[n]()) for n in (2, 0, 1)}
    for n, one in packed.items():
        assert one.to_bytes() == right[n].to_bytes()


KINDS = [{}, {"profile": "fast"}, {"profile": "fix4"}, {"mant_bits": 3, "block_norm": 512}]


@compiled_or_interpreted
@pytest.mark.parametrize("options", KINDS)
def test_sections_that_nobody_has_asked_for_hold_no_job_and_are_as_long_as_is_said(spot, options, monkeypatch):
    jobs, init = [], Job.__init__

    def noted(job, *rest):
        jobs.append(weakref.ref(job))
        init(job, *rest)

    monkeypatch.setattr(Job, "__init__", noted)
    t = odd_weights(2 * 16384 + 5).to(spot.device)
    packed = pack(t, raw="never", backend=spot.backend, **options)
    held, bits, device = weakref.ref(t), packed.bits_per_weight, packed.device
    del t
    assert not isinstance(packed.source, dict)
    gc.collect()
    assert held() is None and jobs and not any(job() for job in jobs)
    assert isinstance(packed.sections, dict) and (packed.bits_per_weight, packed.device) == (bits, device)
    assert packed.sections is packed.sections
    assert all(isinstance(section, torch.Tensor) for section in packed.sections.values())


@compiled_or_interpreted
def test_what_is_first_asked_for_in_inference_mode_can_be_changed_outside_of_it(spot):
    packed = pack(gaussian(2 * B).to(spot.device), profile="fast", raw="never", backend=spot.backend)
    with torch.inference_mode():
        before = packed.sections[Section.PLANE].clone()
    packed.sections[Section.PLANE][0] ^= 1
    assert not any(section.is_inference() for section in packed.sections.values())
    assert packed.sections[Section.PLANE][0] == before[0] ^ 1


@compiled_or_interpreted
@pytest.mark.parametrize("options", KINDS)
def test_a_copy_of_what_nobody_has_looked_at_holds_the_same_and_is_apart(spot, options):
    t = odd_weights(2 * 16384 + 5)
    right = pack(t, raw="never", backend="reference", **options)
    for copied in (copy.deepcopy, lambda packed: pickle.loads(pickle.dumps(packed))):  # noqa: S301 - its own
        packed = pack(t.to(spot.device), raw="never", backend=spot.backend, **options)
        other = copied(packed)
        assert other.to_bytes() == packed.to_bytes() == right.to_bytes()
        other.sections[Section.PLANE].zero_()
        assert packed.to_bytes() == right.to_bytes()
        assert same_bits(packed.unpack(backend=spot.backend).cpu(), right.unpack())


@compiled_or_interpreted
@pytest.mark.parametrize("options", KINDS)
def test_what_was_packed_before_like_it_is_decoded_from_where_its_buffers_lie_and_no_tensors_are_made(
    spot, options, monkeypatch
):
    name = "_FIX4" if options.get("profile") == "fix4" else "_STREAMS"
    first, second = (odd_weights(2 * 16384 + 5, seed=n) for n in range(2))
    packed = [pack(t.to(spot.device), raw="never", backend=spot.backend, **options) for t in (first, second)]
    packed[1].update_(second.to(spot.device), backend=spot.backend)
    kernel = Told(getattr(launch, name).kernel)
    if spot.device == "cpu":  # interpreted kernels are given tensors
        monkeypatch.setattr(launch, name, Launcher(kernel))
    launch._starts.cache_clear()
    decoded = [one.unpack(backend=spot.backend) for one in packed]
    launch._starts.cache_clear()
    assert [isinstance(one.source, Later) for one in packed] == [False, True]
    if spot.device != "cpu":
        assert same_bits(decoded[1], pack(second, raw="never", backend="reference", **options).unpack())
        return
    given, tensors = kernel.starts[1][1], launch.Decoding(packed[1]).tensors(packed[1])
    assert len(kernel.forms) == 1 and tensors.keys() < given.keys()
    for which, t in tensors.items():
        if t.numel() and (which != "norm" or "block_norm" in options):
            assert given[which] == t.data_ptr(), which


@compiled_or_interpreted
@pytest.mark.parametrize("name", ["sections", "device", "bits_per_weight", "_taken"])
def test_what_another_thread_makes_of_the_sections_between_two_looks_at_them_changes_nothing(spot, name):
    packed = pack(gaussian(2 * B).to(spot.device), profile="fast", raw="never", backend=spot.backend)
    later, right = packed.source, getattr(packed, name)
    made = later.make()

    class Racing(Packed):
        source = property(lambda self: next(looks), lambda self, value: None)

    looks = itertools.chain([later], itertools.repeat(made))
    packed.__class__ = Racing
    found = getattr(packed, name)
    assert found.keys() == right.keys() if name == "sections" else found == right


@compiled_or_interpreted
def test_tables_of_a_codebook_that_two_threads_ask_for_at_once_are_there_for_both(spot):
    packed = pack(gaussian(2 * B).to(spot.device), profile="fast", raw="never", backend=spot.backend)
    book, device = packed.book, packed.device
    made = book.__dict__["_kept_later"][1]()
    book.keep_later(device, lambda: (book.__dict__.pop("_kept_later"), made)[1])
    assert book.table(device, "index") is made["index"] and book.table(device) is made["decoding"]
