"""Packed weights come back to the bit, whatever they hold, from the definition and from the kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paperlm_kernels.neuzip import entropy_report, fields, from_bytes, pack
from paperlm_kernels.neuzip.geometry import PROFILES
from paperlm_kernels.neuzip.header import Codec
from paperlm_kernels.neuzip.streams import CHUNK
from support_neuzip import bits_of, every_pattern, gaussian, patterns, same_bits

B = PROFILES["fast"].block
profiles = pytest.mark.parametrize("profile", PROFILES)


def through(t, **options):
    """Coded and back, also by way of bytes."""
    packed = pack(t, raw="never", **options)
    again = from_bytes(packed.to_bytes())
    again.verify()
    assert again.to_bytes() == packed.to_bytes()
    assert same_bits(again.unpack(), packed.unpack())
    return packed.unpack()


@profiles
def test_all_65536_patterns_come_back(profile):
    t = every_pattern()
    assert same_bits(through(t, profile=profile), t)


@pytest.mark.parametrize("count", [1, 7, 1023, 1024, 1025, B - 1, B, B + 1, 3 * B + 5])
def test_every_length_comes_back(count):
    t = gaussian(count)
    for profile in ("fast", "fix4"):
        assert same_bits(through(t, profile=profile), t)
    for k in (0, 1, 3):
        bits = bits_of(t)
        exponents, items, norm = fields.lossy_split(bits, k, 64)
        assert np.array_equal(
            bits_of(through(t, profile="fast", mant_bits=k, block_norm=64)),
            fields.lossy_merge(exponents, items, k, norm, 64),
        )


@pytest.mark.parametrize("profile", ["default", "dense"])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_lengths_around_a_block_of_each_profile_come_back(profile, more):
    t = gaussian(PROFILES[profile].block + more)
    assert same_bits(through(t, profile=profile), t)


@profiles
def test_tensors_of_no_axes_no_elements_or_odd_strides_come_back(profile):
    for t in (gaussian(1).reshape(()), gaussian(0), gaussian(0).reshape(3, 0, 2), gaussian(70 * 130).view(70, 130).T):
        packed = pack(t, profile=profile)
        assert same_bits(packed.unpack(), t.contiguous()) and packed.shape == t.shape
        out = torch.empty(t.T.shape if t.ndim == 2 else t.shape, dtype=t.dtype)
        out = out.T if t.ndim == 2 else out
        assert packed.unpack(out) is out and same_bits(out, t)
        assert same_bits(from_bytes(packed.to_bytes()).unpack(), t.contiguous())


@profiles
def test_one_exponent_all_exponents_and_payloads_of_nan_come_back(profile):
    rng = np.random.default_rng(1)
    constant = patterns(np.full(20_000, 0x3F80))
    one = patterns(0x3F80 | rng.integers(0, 128, 20_000))
    nan = patterns(0x7F80 | rng.integers(0, 128, 20_000) | rng.integers(0, 2, 20_000) << 15)
    for t in (constant, one, nan):
        assert same_bits(through(t, profile=profile), t)


def test_a_lane_that_is_too_long_for_its_size_makes_the_tensor_raw():
    t = patterns(np.random.default_rng(1).integers(0, 2**16, 20_000))
    with pytest.raises(ValueError, match="raw='auto'"):
        pack(t, profile="dense", raw="never")
    packed = pack(torch.cat([t] * 14), profile="dense")
    assert packed.header.codec == Codec.RAW and same_bits(packed.unpack()[:20_000], t)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 40_000), st.integers(-120, 120), st.integers(0, 2**20), st.sampled_from(["fast", "default"]))
def test_mixtures_of_any_length_and_scale_come_back(count, power, seed, profile):
    rng = np.random.default_rng(seed)
    t = torch.from_numpy(rng.standard_normal(count) * 2.0**power).bfloat16()
    odd = rng.random(count) < rng.random() * 0.1
    bits = np.where(odd, rng.integers(0, 2**16, count), bits_of(t))
    assert same_bits(through(patterns(bits), profile=profile), patterns(bits))


@pytest.mark.parametrize("profile,most", [("default", 10.70), ("dense", 10.62), ("fast", 10.82), ("fix4", 12.02)])
def test_gaussian_weights_take_the_bits_that_the_profile_says(profile, most):
    t = gaussian(2**20)
    packed = pack(t, profile=profile)
    assert packed.bits_per_weight <= most
    report = entropy_report(t)
    assert packed.bits_per_weight > report.exponent + 8  # what no code of single exponents beats
    if profile == "dense":
        assert packed.bits_per_weight <= report.exponent + 8 + 0.10
    assert packed.nbytes >= packed.bits_per_weight * t.numel() / 8
    assert len(packed.to_bytes()) * 8 / t.numel() == pytest.approx(packed.bits_per_weight, abs=0.02)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_lossy_weights_take_a_sign_their_mantissa_their_exponents_and_a_256th_for_each_normalizer(k):
    t = gaussian(2**18)
    plain = pack(t, mant_bits=k, profile="dense")
    exponents, _, _ = fields.lossy_split(bits_of(t), k)
    counts = np.bincount(exponents, minlength=256)
    assert plain.bits_per_weight == pytest.approx(1 + k + plain.book.bits(counts) + 0.03, abs=0.03)
    normed = pack(t, mant_bits=k, block_norm=32, profile="dense")
    assert normed.bits_per_weight - plain.bits_per_weight == pytest.approx(8 / 32, abs=0.05)


def test_normalizers_are_those_of_their_weights_in_a_tensor_of_several_chunks():
    t = gaussian(CHUNK + 5000)
    exponents, items, norm = fields.lossy_split(bits_of(t), 3, 512)
    right = fields.lossy_merge(exponents, items, 3, norm, 512)
    assert np.array_equal(bits_of(through(t, mant_bits=3, block_norm=512)), right)


@pytest.mark.parametrize("profile", ["default", "fast"])
def test_bytes_are_those_of_sections_and_of_the_tables_that_a_gpu_keeps_whether_or_not_they_are_there(profile):
    packed = pack(gaussian(2**16), profile=profile)
    before = packed.nbytes
    sections = sum(-(-s.nbytes // 64) * 64 for s in packed.sections.values())
    tables = sum(packed.book.table(packed.device, which).nbytes for which in ("decoding", "packing", "index"))
    assert before == packed.nbytes == from_bytes(packed.to_bytes()).nbytes == sections + tables


def test_what_has_no_codebook_has_no_tables():
    for packed in (pack(gaussian(2**16), profile="fix4"), pack(gaussian(1000))):
        assert packed.nbytes == sum(-(-s.nbytes // 64) * 64 for s in packed.sections.values())


def test_what_does_not_shrink_or_is_small_or_of_another_dtype_is_kept_as_it_is():
    for t in (gaussian(1000), every_pattern(), gaussian(2**16).float(), gaussian(2**16).half()):
        packed = pack(t)
        assert packed.header.codec == Codec.RAW and torch.equal(packed.unpack().nan_to_num(), t.nan_to_num())
        assert packed.bits_per_weight == 8 * t.element_size()
        assert torch.equal(from_bytes(packed.to_bytes()).unpack().nan_to_num(), t.nan_to_num())
    assert pack(gaussian(2**15)).header.codec == Codec.PFX


def test_a_small_tensor_is_rounded_as_a_large_one_is():
    t = gaussian(1000)
    packed = pack(t, mant_bits=1, block_norm=64)
    assert packed.header.codec == Codec.RAW
    assert same_bits(packed.unpack(), through(t, mant_bits=1, block_norm=64, profile="fast"))


def test_an_update_keeps_the_codebook_and_loses_nothing_by_it():
    t = gaussian(2**15)
    packed = pack(t)
    book = packed.book
    changed = t.clone()
    changed[:5] = torch.tensor([1e30, -1e-30, float("inf"), float("nan"), 0.0]).bfloat16()
    assert packed.update_(changed) is packed and packed.book is book
    assert same_bits(packed.unpack(), changed) and packed.header.patches >= 4
    packed.verify()
    assert same_bits(from_bytes(packed.to_bytes()).unpack(), changed)
    other = gaussian(2**15, seed=1, scale=2.0**40)  # nothing that the palette has
    assert same_bits(packed.update_(other).unpack(), other) and packed.book is not book
    assert packed.bits_per_weight == pytest.approx(pack(other).bits_per_weight)


def test_the_codebook_is_made_anew_after_64_updates():
    t = gaussian(2**15)
    packed, books = pack(t), []
    for _ in range(66):
        packed.update_(t)
        books.append(packed.book)
    first, second = books[0], books[-1]
    assert first is not second and [book is first for book in books] == [True] * 64 + [False] * 2


def test_an_update_keeps_the_options_also_of_what_was_kept_raw():
    t = gaussian(2**15)
    packed = pack(torch.randn(2**15).view(torch.int32).view(torch.bfloat16)[: 2**15], profile="fast")
    assert packed.header.codec == Codec.RAW
    packed.update_(t)
    assert packed.header.codec == Codec.PFX and packed.header.geometry == PROFILES["fast"]
    lossy = pack(t, mant_bits=3, block_norm=128)
    right = pack(-t, mant_bits=3, block_norm=128).unpack()
    assert same_bits(lossy.update_(-t).unpack(), right) and same_bits(from_bytes(lossy.to_bytes()).unpack(), right)


def test_out_takes_over_and_a_failed_update_leaves_everything_as_it_was():
    t = gaussian(2**15)
    packed = pack(t, mant_bits=3)
    before = packed.to_bytes()
    with pytest.raises(ValueError, match="NaN"):
        packed.update_(torch.full_like(t, float("nan")))
    with pytest.raises(ValueError, match="give one like it"):
        packed.update_(t[1:])
    assert packed.to_bytes() == before
    assert pack(t, out=packed) is packed and same_bits(packed.unpack(), t)


def test_a_parameter_can_be_packed_and_unpacked_into():
    for profile in ("fast", "fix4"):
        for t in (gaussian(2**15), gaussian(100)):
            parameter = torch.nn.Parameter(torch.zeros_like(t))
            assert pack(torch.nn.Parameter(t), profile=profile).unpack(parameter) is parameter
            assert same_bits(parameter, t) and parameter.grad_fn is None


def test_a_gradient_free_copy_on_another_device_is_the_same():
    packed = pack(gaussian(2**15).requires_grad_())
    assert packed.to("cpu") is packed and not packed.unpack().requires_grad
    assert repr(packed).startswith("Packed(torch.bfloat16, (32768,), PFX, mant_bits=7, 10.")


@pytest.mark.parametrize(
    "options,message",
    [
        ({"profile": "defualt"}, "did you mean 'default'"), ({"mant_bits": 2}, "one of 0, 1, 3, 7"),
        ({"block_norm": 512}, "leave it out"), ({"mant_bits": 3, "block_norm": 100}, "one of 32, 64"),
        ({"norm_semantics": "max"}, "true_max"), ({"rounding": "even"}, "authors"), ({"nonfinite": "drop"}, "keep"),
        ({"raw": "always"}, "never"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused_with_what_is_right(options, message):
    with pytest.raises(ValueError, match=message):
        pack(gaussian(10), **options)


def test_other_dtypes_are_refused_where_they_would_be_coded():
    for t, options in ((torch.zeros(3, dtype=torch.int8), {}), (torch.zeros(3), {"mant_bits": 3}),
                       (torch.zeros(3), {"raw": "never"})):  # fmt: skip
        with pytest.raises(TypeError, match="convert it"):
            pack(t, **options)


@pytest.mark.parametrize(
    "wrong,right",
    [
        ({"mant_bits": 3.0}, {"mant_bits": 3}), ({"mant_bits": 7.0}, {}), ({"mant_bits": True}, {"mant_bits": 1}),
        ({"mant_bits": 3, "block_norm": 512.0}, {"mant_bits": 3, "block_norm": 512}),
    ],
)  # fmt: skip
def test_an_option_of_another_type_is_refused_and_the_next_call_is_not_spoilt(wrong, right):
    """They are equal to the right ones, and what is planned for these is kept."""
    w = gaussian(5003)
    with pytest.raises(TypeError, match="give an int"):
        pack(w, **wrong)
    packed = pack(w, **right)
    assert type(packed.header.mant_bits) is int and same_bits(from_bytes(packed.to_bytes()).unpack(), packed.unpack())


@pytest.mark.parametrize(
    "given,words",
    [([1.0], "a list to pack"), (None, "a NoneType to pack"), (torch.empty(3, device="meta"), "device meta")],
)  # fmt: skip
def test_what_is_no_tensor_with_values_is_refused(given, words):
    with pytest.raises(TypeError, match=words):
        pack(given)
    with pytest.raises(TypeError, match="out is a Tensor; it is a Packed"):
        pack(gaussian(10), out=gaussian(10))
