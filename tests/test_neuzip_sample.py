"""The code of a large tensor is made of counts of some of its blocks: the same ones on every device, and of all weights
where those do not tell of the others. Nothing is lost either way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paperlm_kernels.neuzip import pack, sample
from paperlm_kernels.neuzip.codebook import Codebook
from paperlm_kernels.neuzip.geometry import PROFILES
from paperlm_kernels.neuzip.header import Codec, Header, Section
from paperlm_kernels.neuzip.reference import count_exponents
from support_neuzip import bits_of, compiled_or_interpreted, gaussian, same_bits

SIZE = PROFILES["fast"].block


def header_of(numel, profile="fast"):
    return Header(dtype="bfloat16", codec=Codec.PFX, shape=(numel,), geometry=PROFILES[profile])


def blocks_counted(header):
    """Their numbers, of a tensor whose exponents say in which block they lie."""
    runs, run = sample.runs_of(header)
    numbers = np.repeat(np.arange(header.blocks), header.geometry.block)[: header.numel].astype(np.uint8)
    found = sample.counted_of(numbers, header, runs, run)
    assert len(found) == sample.counted_weights(header, runs, run)
    return found[:: header.geometry.block], np.bincount(found, minlength=header.blocks)


@pytest.mark.parametrize("numel", [1, SIZE, 2 * sample.COUNTED - 1])
def test_all_weights_of_a_small_tensor_are_counted(numel):
    assert sample.runs_of(header_of(numel)) == (-(-numel // SIZE), 1)


@pytest.mark.parametrize("numel", [2 * sample.COUNTED, 2**27, 2**29 + 5, 3 * 10**9, 2**38])
@pytest.mark.parametrize("profile", ["default", "dense", "fast"])
def test_about_as_many_weights_of_every_large_tensor_are_counted(numel, profile):
    header = header_of(numel, profile)
    runs, run = sample.runs_of(header)
    assert run > 1 and runs * run < header.blocks  # whole blocks: the last one is not among them
    assert 0.8 * sample.COUNTED <= sample.counted_weights(header, runs, run) <= 1.6 * sample.COUNTED
    assert runs * run * header.geometry.block >= 0.9 * numel or runs < 20


def test_one_block_of_each_run_is_counted_and_of_each_run_another(monkeypatch):
    monkeypatch.setattr(sample, "COUNTED", 16 * SIZE)
    header = header_of(250 * SIZE + 3)
    runs, run = sample.runs_of(header)
    assert (runs, run) == (16, 15)
    which, counts = blocks_counted(header)
    assert (which // run).tolist() == list(range(runs)) and set(counts) == {0, SIZE}
    assert len(set((which % run).tolist())) >= 12  # of 15 places


@pytest.mark.parametrize("period", [2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("run", [2, 3, 4, 16, 64, 1000])
def test_what_repeats_every_few_blocks_is_met_at_all_its_places_about_as_often(run, period):
    """Heads of an attention are a few blocks each, and their rows differ."""
    met = np.bincount(sample.counted_blocks(512, run) % period, minlength=period) / 512
    assert 0.5 / period < met.min() and met.max() < 1.6 / period


def test_blocks_of_the_longest_runs_are_numbered_in_32_bits():
    numel = 2**40
    runs, run = sample.runs_of(header_of(numel))
    assert run == sample.LONGEST and 0xFFFF * run < 2**31 and runs * sample.SPREAD < 2**31
    blocks = sample.counted_blocks(runs, run)
    assert (blocks // run == np.arange(runs)).all() and blocks[-1] < header_of(numel).blocks - 1


@compiled_or_interpreted
@pytest.mark.parametrize("run", [2, 4, 7])
@pytest.mark.parametrize("rest", [0, 8, 30])
def test_the_kernel_counts_the_blocks_that_the_definition_counts(spot, run, rest):
    from paperlm_kernels.neuzip.launch_encode import Job

    t = gaussian(40 * SIZE + rest).view(-1)
    for block in range(40):  # of each block the exponents tell which one it is
        t[block * SIZE : (block + 1) * SIZE] *= 2.0 ** (3 * block - 60)
    header = header_of(t.numel())
    runs = ((header.blocks - 1) // run, run)
    assert len(set((sample.counted_blocks(*runs) % run).tolist())) > 1
    job = Job(t.to(spot.device), header)
    numel = job.count(runs)
    counts = job.tensor("counts")
    right = count_exponents(sample.counted_of((bits_of(t) >> 7 & 0xFF).astype(np.uint8), header, *runs))
    assert numel == right.sum() and counts.cpu().tolist()[1:] == right.tolist()[1:]


@compiled_or_interpreted
@pytest.mark.parametrize("profile", ["fast", "fix4", "default"])
@pytest.mark.parametrize("k", [7, 3])
def test_the_bytes_are_those_of_the_definition(spot, monkeypatch, profile, k):
    size = PROFILES[profile].block
    monkeypatch.setattr(sample, "COUNTED", 2 * size)
    t = gaussian(7 * size + 30)
    for block in sample.counted_blocks(2, 3):  # what is counted has another code than what is not
        t[block * size : (block + 1) * size] *= 0.8
    of_some = pack(t, profile=profile, mant_bits=k, raw="never", backend="reference")
    found = pack(t.to(spot.device), profile=profile, mant_bits=k, raw="never", backend=spot.backend)
    assert found.to_bytes() == of_some.to_bytes()
    if k == 7:
        assert same_bits(found.unpack(backend=spot.backend).cpu(), t)
    monkeypatch.undo()
    of_all = pack(t, profile=profile, mant_bits=k, raw="never", backend="reference")
    assert profile == "fix4" or of_some.to_bytes() != of_all.to_bytes()


def test_the_codebook_is_the_best_for_what_was_counted(monkeypatch):
    monkeypatch.setattr(sample, "COUNTED", 2 * SIZE)
    t = gaussian(9 * SIZE)
    t[: 4 * SIZE] *= 0.5
    packed = pack(t, profile="fast", raw="never")
    runs, run = sample.runs_of(packed.header)
    assert (runs, run) == (2, 4)
    exponents = (bits_of(t) >> 7 & 0xFF).reshape(-1, SIZE)
    counted = sample.counted_blocks(runs, run)
    right = Codebook.of_counts(np.bincount(exponents[counted].reshape(-1), minlength=256), PROFILES["fast"].limit)
    assert np.array_equal(packed.sections[Section.CODEBOOK].numpy(), right.to_bytes())


@compiled_or_interpreted
@pytest.mark.parametrize("profile", ["fast", "fix4"])
def test_where_what_was_counted_does_not_tell_of_the_rest_all_is_counted(spot, monkeypatch, profile):
    size = PROFILES[profile].block
    t = gaussian(9 * size)
    right = None
    for counted in (2**23, 2 * size):  # all, then two blocks
        monkeypatch.setattr(sample, "COUNTED", counted)
        header = header_of(t.numel(), profile)
        runs, run = sample.runs_of(header)
        if right is None:
            t[: 7 * size] *= 2.0**40
            for block in sample.counted_blocks(2, 4):
                t[block * size : (block + 1) * size] = gaussian(size)
            right = pack(t, profile=profile, raw="never", backend="reference").to_bytes()
            continue
        assert (runs, run) == (2, 4)
        assert pack(t, profile=profile, raw="never", backend="reference").to_bytes() == right
        found = pack(t.to(spot.device), profile=profile, raw="never", backend=spot.backend)
        assert found.to_bytes() == right and same_bits(found.unpack(backend=spot.backend).cpu(), t)


def test_lanes_that_are_too_long_in_a_code_of_some_blocks_get_one_of_all(monkeypatch):
    size = PROFILES["dense"].block
    monkeypatch.setattr(sample, "COUNTED", 3 * size)
    t = torch.full((7, size), 2.0**30, dtype=torch.bfloat16)
    t[sample.counted_blocks(3, 2)] = 1.0
    short = pack(t, profile="dense", raw="never")  # what is not counted has the longest code, and is in most lanes
    monkeypatch.undo()
    assert short.to_bytes() == pack(t, profile="dense", raw="never").to_bytes()
    assert same_bits(short.unpack(), t)


def test_an_update_of_a_large_tensor_keeps_its_code_and_loses_nothing(monkeypatch):
    monkeypatch.setattr(sample, "COUNTED", 2 * SIZE)
    packed = pack(gaussian(9 * SIZE), profile="fast", raw="never")
    before = packed.sections[Section.CODEBOOK].clone()
    new = gaussian(9 * SIZE) * 1.01
    packed.update_(new)
    assert torch.equal(packed.sections[Section.CODEBOOK], before) and same_bits(packed.unpack(), new)
    other = new * 2.0**60  # everything escapes
    packed.update_(other)
    assert not torch.equal(packed.sections[Section.CODEBOOK], before) and same_bits(packed.unpack(), other)
    assert packed.header.patches <= 1e-3 * packed.header.numel


@compiled_or_interpreted
@pytest.mark.parametrize("profile", ["fast", "fix4"])
def test_a_tensor_of_which_much_escapes_any_code_is_not_coded_twice_for_it(spot, monkeypatch, profile):
    from paperlm_kernels.neuzip import coding

    size, tried = PROFILES[profile].block, []
    for name in ("_on_device", "_on_host"):
        begin = getattr(coding, name)
        monkeypatch.setattr(coding, name, lambda *given, begin=begin: (tried.append(given[3]), begin(*given))[1])
    t = gaussian(9 * size)
    t[::50] = 2.0**-110
    t[1::50] = 2.0 ** (torch.arange(len(t[1::50])) % 60 - 100.0).bfloat16()
    monkeypatch.setattr(sample, "COUNTED", 2 * size)
    packed = pack(t.to(spot.device), profile=profile, raw="never", backend=spot.backend)
    assert packed.header.patches > 5e-3 * packed.header.numel and tried == [False]
    assert same_bits(packed.unpack(backend=spot.backend).cpu(), t)
