"""What a kernel that unpacks is given, without a card: a kernel that only says what it was started with."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from paperlm_kernels.neuzip import launch, launch_encode, launcher, pack
from paperlm_kernels.neuzip.launcher import Launcher, Starts
from support_neuzip import Told, gaussian


@pytest.fixture(params=["fast", "fix4"])
def told(request, monkeypatch):
    """Packed weights and what their kernel is told."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    packed = pack(gaussian(40_000), profile=request.param, raw="never", backend="reference")
    name, warps = ("_FIX4", launch.WIDTH // 32) if request.param == "fix4" else ("_STREAMS", 4)
    kernel = Told(getattr(launch, name).kernel)
    monkeypatch.setattr(launch, name, Launcher(kernel, warps))
    return packed, kernel


def test_each_call_gives_what_the_first_gave_but_for_where_the_weights_go(told):
    packed, kernel = told
    outs = [torch.empty(40_000, dtype=torch.bfloat16) for _ in range(4)]
    for out in outs:
        packed.unpack(out, backend="triton")
    assert len(kernel.forms) == 1 and len(kernel.starts) == 4, "compiled, looked for, and started twice without"
    for out, (grid, given) in zip(outs, kernel.starts, strict=True):
        assert (grid, given) == (kernel.starts[0][0], kernel.starts[0][1] | {"out": out.data_ptr()})


def test_a_kernel_that_is_found_is_started_on_the_stream_that_is_current_then(told, monkeypatch):
    packed, kernel = told
    asked = []
    monkeypatch.setattr(launcher, "_stream_of", lambda device: lambda: asked.append(device) or len(asked))
    launch._starts.cache_clear()
    for _ in range(4):
        packed.unpack(backend="triton")
    launch._starts.cache_clear()
    assert kernel.streams == [1, 2, 3] and set(asked) == {packed.device}, "all but the first, which compiles"


def test_the_stream_of_a_card_is_asked_for_at_each_start_and_elsewhere_left_to_triton(monkeypatch):
    asked = []
    ask = lambda index: asked.append(index) or len(asked)  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", ask, raising=False)
    tell = launcher._stream_of(torch.device("cuda", 1))
    assert not asked
    assert (tell(), tell()) == (1, 2) and asked == [1, 1]
    assert launcher._stream_of(torch.device("cpu"))() is None is launcher._stream_of(None)()


@pytest.mark.parametrize("cards,current,tensors,entered", [(1, 0, 0, []), (2, 1, 1, []), (2, 0, 1, [1])])
def test_another_card_than_the_current_one_is_entered(monkeypatch, cards, current, tensors, entered):
    found = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", lambda device: found.append(device.index) or contextlib.nullcontext())
    launcher._is_alone.cache_clear()
    with launcher.on_device(SimpleNamespace(device=torch.device("cuda", tensors))):
        assert found == entered
    launcher._is_alone.cache_clear()


def test_all_starts_of_a_kernel_are_on_the_tensors_device(told, monkeypatch):
    packed, kernel = told
    within = []

    @contextlib.contextmanager
    def there(t):
        before = len(kernel.starts)
        yield
        within.append(len(kernel.starts) - before)

    monkeypatch.setattr(launch, "on_device", there)
    for _ in range(4):
        packed.unpack(backend="triton")
    assert within == [1] * 4 and len(kernel.starts) == 4


def test_a_start_is_made_once_for_a_tensor(told, monkeypatch):
    packed, _ = told
    launch._starts.cache_clear()
    made, start = [], Starts.start
    monkeypatch.setattr(Starts, "start", lambda self, *given: made.append(start(self, *given)) or made[-1])
    for _ in range(5):
        packed.unpack(backend="triton")
    launch._starts.cache_clear()
    assert [one is None for one in made] == [True, False], "none before the kernel is compiled, then one"


def test_weights_that_were_packed_anew_with_other_exponents_are_read_with_theirs(told):
    packed, kernel = told
    packed.unpack(backend="triton")
    packed.update_(gaussian(40_000, scale=2.0**20), backend="reference")
    packed.unpack(backend="triton")
    before, after = (given.get("lowest") for _, given in (kernel.starts[0], kernel.starts[-1]))
    assert after == (packed.lowest if "lowest" in kernel.arg_names else None)
    assert after != before or after is None


@pytest.mark.parametrize("hopper", [False, True])
def test_a_kernel_that_waits_for_the_one_in_front_is_started_early_and_no_other_is(told, hopper, monkeypatch):
    packed, kernel = told
    monkeypatch.setattr(launch, "overlaps", lambda device: hopper)
    launch._starts.cache_clear()
    packed.unpack(backend="triton")
    launch._starts.cache_clear()
    assert kernel.early == [(hopper, hopper)]


@pytest.mark.parametrize("apart", [1, 2, 4])
def test_another_place_in_16_bytes_or_no_check_is_another_form(told, apart):
    packed, kernel = told
    room = torch.empty(40_008, dtype=torch.bfloat16)
    begin = -room.data_ptr() % 16 // 2
    for shift, check in [(0, True), (apart, True), (0, False), (apart, False)] * 3:
        packed.unpack(room[begin + shift :][:40_000], check=check, backend="triton")
    forms = [(given["ALIGNED"], given.get("CHECK")) for _, given in kernel.starts]
    checked = "CHECK" in kernel.arg_names
    assert forms == [(True, checked or None), (False, checked or None), (True, False if checked else None),
                     (False, False if checked else None)] * 3  # fmt: skip
    assert len(kernel.forms) == (4 if checked else 2)
    assert [given["out"] for _, given in kernel.starts] == [room[begin + s :].data_ptr() for s in (0, apart)] * 6


def test_weights_that_were_packed_anew_are_read_where_they_are(told):
    packed, kernel = told
    out = torch.empty(40_000, dtype=torch.bfloat16)
    for _ in range(3):
        packed.unpack(out, backend="triton")
    packed.update_(gaussian(40_000, seed=1), backend="reference")
    packed.unpack(out, backend="triton")
    before, after = kernel.starts[0][1], kernel.starts[-1][1]
    assert after["payload"] != before["payload"] and after["out"] == before["out"]


PACKING = {
    "fast": ["_COUNT", "_CODEBOOK", "_SIZE", "_SCAN", "_WRITE"],
    "fix4": ["_COUNT", "_LOWEST", "_FIX4", "_SCAN", "_PATCH"],
    "an old codebook": ["_PAIRS", "_SIZE", "_SCAN", "_WRITE"],
    "normalizers": ["_NORMALIZER", "_COUNT", "_CODEBOOK", "_SIZE", "_SCAN", "_WRITE"],
}


def test_kernels_that_pack_are_started_on_the_stream_that_is_current_then(monkeypatch):
    asked = []
    monkeypatch.setattr(launcher, "_stream_of", lambda device: lambda: asked.append(device) or len(asked))
    kernels = []
    for name in PACKING["fast"]:
        one = getattr(launch_encode, name)
        kernels.append(Told(one.kernel))
        monkeypatch.setattr(launch_encode, name, Launcher(kernels[-1], **one.options))
    header = pack(gaussian(40_000), profile="fast", raw="never", backend="reference").header.with_patches(0)
    launch_encode._plan_of.cache_clear()
    for seed in range(3):
        launch_encode.begin_encode(gaussian(40_000, seed=seed), header, None)()
    launch_encode._plan_of.cache_clear()
    streams = [stream for kernel in kernels for stream in kernel.streams]
    assert sorted(streams) == list(range(1, 11)) and set(asked) == {torch.device("cpu")}, "five, but for the first"


@pytest.mark.parametrize("kind", PACKING)
def test_kernels_that_pack_are_found_once_and_share_the_buffers_of_their_tensor_alone(monkeypatch, kind):
    options = {"profile": "fix4" if kind == "fix4" else "fast"}
    if kind == "normalizers":
        options |= {"mant_bits": 3, "block_norm": 512}
    made = pack(gaussian(40_000), **options, raw="never", backend="reference")
    header, book = made.header.with_patches(0), made.book if kind == "an old codebook" else None
    kernels = {}
    for name in {name for names in PACKING.values() for name in names}:
        one = getattr(launch_encode, name)
        kernels[name] = Told(one.kernel)
        monkeypatch.setattr(launch_encode, name, Launcher(kernels[name], **one.options))
    launch_encode._plan_of.cache_clear()
    tensors = [gaussian(40_000, seed=seed) for seed in range(3)]
    ends = [launch_encode.begin_encode(t, header, book) for t in tensors]  # all before one ends
    assert [end() is not None for end in ends] == [True] * 3
    launch_encode._plan_of.cache_clear()
    assert sorted(name for name in kernels if kernels[name].starts) == sorted(PACKING[kind])
    shared = {"weights", "patches"}  # there are none of these: a tensor without elements lies at 0
    shared |= {"stored", "index", "packing", "decoding"} if book else set()
    places = []
    for number, t in enumerate(tensors):
        at = {}
        for name in PACKING[kind]:
            kernel = kernels[name]
            assert len(kernel.forms) == 1 and len(kernel.starts) == 3
            (grid, first), (grid_now, now) = kernel.starts[0], kernel.starts[number]
            numbers = {key: value for key, value in first.items() if key not in kernel.buffers}
            numbers |= {"patches": now.get("patches")}
            assert grid_now == grid and {key: now.get(key) for key in numbers} == numbers
            for key in now.keys() - numbers.keys():
                assert at.setdefault(key, now[key]) == now[key], f"{key} of {name} is another buffer"
        assert at["weights"] == t.data_ptr()
        if not book:  # what the host is sent lies behind the totals
            assert at["lowest" if kind == "fix4" else "stored"] == at["note"] + 4 * launch_encode.TOTALS
        own = {key: place for key, place in at.items() if key not in shared and place != t.data_ptr()}
        places += [*own.values()] if kind != "fix4" else {*own.values()}  # where some that are not there are another
    assert len(places) == len(set(places)), "two tensors, or two buffers of one, lie at the same place"


def test_a_number_that_needs_64_bits_is_given_to_a_form_of_its_own():
    """A tensor of 2^31 weights and more is first counted in part, and all of it where that part was unlike the rest."""
    kernel = Told(launch_encode._LOWEST.kernel)
    starts, lowest = Starts({}), Launcher(kernel)
    names = kernel.arg_names[:-1]
    t = torch.zeros(64, dtype=torch.int32)
    for numel in (5, 6, 2**31, 2**31 + 1, 7):
        starts.run(lowest, 1, dict.fromkeys(names, t.data_ptr()), lambda name: t, numel)
    assert len(kernel.forms) == 2 and [given["numel"] for _, given in kernel.starts] == [5, 6, 2**31, 2**31 + 1, 7]
    *others, free = names
    at = dict.fromkeys(others, t.data_ptr())
    assert starts.start(lowest, 1, at, free, 6) is not None and starts.start(Launcher(kernel), 1, at, free, 6) is None
    alone = Starts({})
    alone.run(lowest, 1, at | {free: t.data_ptr()}, lambda name: t, 5)
    assert alone.start(lowest, 1, at, free, 2**31) is None
