"""The arithmetic of packed weights: fields, rounding, normalization, planes and entropies against worked-out values."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from paperlm_kernels.neuzip import entropy_report, fields, mantissas, pack, rans
from paperlm_kernels.neuzip.codebook import Codebook, canonical_codes, package_merge
from paperlm_kernels.neuzip.entropy import entropy, report_of_counts
from support_neuzip import bits_of, every_pattern, gaussian, patterns

ALL = np.arange(2**16, dtype=np.uint16)


def float_of(bits):
    return (np.asarray(bits, np.uint32) << 16).view(np.float32).astype(np.float64)


def lossy(values, k, **options):
    return pack(values, mant_bits=k, **options).unpack()


def test_splitting_and_merging_keeps_each_of_the_65536_patterns():
    exponents, items = fields.split(ALL)
    assert np.array_equal(fields.merge(exponents, items), ALL)
    assert np.array_equal(exponents, (ALL >> 7 & 255).astype(np.uint8))
    assert [hex(int(i)) for i in fields.split(np.array([0x8001, 0x7FC1], np.uint16))[1]] == ["0x81", "0x41"]


@pytest.mark.parametrize(
    "bits,zero,one,three",
    [
        (0x3FA0, 0x3F80, 0x3FC0, 0x3FA0),  # 1.25: half rounds up
        (0x3FC0, 0x4000, 0x3FC0, 0x3FC0),  # 1.5: a carry into the exponent
        (0x3FFC, 0x4000, 0x4000, 0x4000),  # 1.96875
        (0x8000, 0x8000, 0x8000, 0x8000),  # -0
        (0x0001, 0x0000, 0x0000, 0x0000),  # the smallest subnormal
        (0x0040, 0x0080, 0x0040, 0x0040),  # half of the least normal
        (0x7F7F, 0x7F00, 0x7F40, 0x7F70),  # the largest: not infinity, but what k bits hold
    ],
)
def test_few_mantissa_bits_give_the_values_worked_out_by_hand(bits, zero, one, three):
    for k, right in zip((0, 1, 3), (zero, one, three), strict=True):
        assert bits_of(lossy(patterns([bits]), k))[0] == right
        assert bits_of(lossy(patterns([bits ^ 0x8000]), k))[0] == right ^ 0x8000


@pytest.mark.parametrize("k,bound", [(0, 1 / 3), (1, 1 / 5), (3, 1 / 17)])
def test_the_relative_error_of_rounding_is_at_most_half_a_step_and_reaches_it(k, bound):
    normal = ALL[(ALL >> 7 & 255 > 0) & (ALL >> 7 & 255 < 254)]
    exact, got = float_of(normal), float_of(fields.unrounded(*fields.round_mantissa(normal, k), k))
    assert np.abs(got / exact - 1).max() == pytest.approx(bound, abs=1e-12)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_every_finite_pattern_rounds_to_a_nearest_number_of_k_bits(k):
    finite = ALL[ALL & 0x7F80 != 0x7F80]
    got = fields.unrounded(*fields.round_mantissa(finite, k), k)
    assert not (got & 0x7F & ((1 << (7 - k)) - 1)).any() and (got & 0x7F80 != 0x7F80).all()
    grid = np.unique(float_of(got))
    exact = float_of(finite)
    right = np.searchsorted(grid, exact).clip(1, len(grid) - 1)
    nearest = np.minimum(np.abs(grid[right] - exact), np.abs(grid[right - 1] - exact))
    assert np.array_equal(np.abs(float_of(got) - exact), nearest)


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("block", [32, 64, 512, 1024])
def test_the_largest_weight_of_each_block_is_exact(k, block):
    t = gaussian(10_000, seed=k) * 2.0 ** torch.randint(-90, 90, (10_000,), generator=torch.Generator().manual_seed(1))
    got = lossy(t.bfloat16(), k, block_norm=block)
    for given, made in zip(t.bfloat16().split(block), got.split(block), strict=True):
        top = given.abs().argmax()
        assert given[top] == made[top]


@pytest.mark.parametrize("k,most,rms", [(0, None, 0.191), (1, None, 0.101), (3, 0.06482, 0.0259)])
def test_errors_on_heavy_tailed_weights_are_those_of_the_formulas(k, most, rms):
    rng = np.random.default_rng(3)
    t = torch.from_numpy(rng.standard_t(6, 2**19).astype(np.float32)).bfloat16()
    error = (lossy(t, k, block_norm=512).double() - t.double()).abs()
    assert (error.square().sum() / t.double().square().sum()).sqrt().item() == pytest.approx(rms, rel=0.02)
    if most:
        assert (error / t.double().abs()).max().item() <= most


def test_normalizing_divides_and_multiplies_by_the_mantissa_of_the_largest_in_float32():
    t = torch.tensor([1.9375, -1.0, 0.34375, 0.0] * 8).bfloat16()
    q = 1.9375
    # 1 / q = 0.516.. and 0.34375 / q = 0.1774..: rounded to 0.5 and 0.125 * 1.5
    right = torch.tensor([q, -0.5 * q, 0.1875 * q, 0.0] * 8).bfloat16()
    assert torch.equal(lossy(t, 1, block_norm=32), right)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_zeros_and_what_is_rounded_to_them_keep_their_sign_when_they_are_divided(k):
    got = bits_of(lossy(patterns([0x3FC0, 0x8000, 0x0000, 0x8001] * 16), k, block_norm=32))
    assert got.tolist() == [0x3FC0, 0x8000, 0x0000, 0x8000] * 16


@pytest.mark.parametrize("block", [32, 64, 128, 256, 512, 1024])
def test_the_published_program_takes_the_true_maximum_of_one_block_in_1024_weights_alone(block):
    bits = bits_of(gaussian(4096, seed=block))
    mantissa = lambda part: int((part & 0x7FFF).max() & 0x7F) << 1  # noqa: E731
    for semantics in fields.SEMANTICS:
        got = fields.normalizers(bits, block, semantics)
        for i, byte in enumerate(got):
            part = bits[i * block : (i + 1) * block]
            whole = semantics == "true_max" or block in (32, 1024) or (i * block) % 1024 == 0
            assert byte == mantissa(part if whole else part[:32])
    both = [fields.normalizers(bits, block, semantics) for semantics in fields.SEMANTICS]
    assert np.array_equal(*both) == (block in (32, 1024))


def test_a_block_of_zeros_is_not_divided_and_infinity_is_refused_or_kept():
    assert not fields.normalizers(np.zeros(40, np.uint16), 32).any()
    t = torch.tensor([float("inf"), -2.5, 0.0]).bfloat16()
    with pytest.raises(ValueError, match="nonfinite='keep'"):
        lossy(t, 3)
    assert lossy(t, 3, block_norm=32, nonfinite="keep").tolist() == [float("inf"), -2.5, 0.0]
    for nonfinite in ("error", "keep"):
        with pytest.raises(ValueError, match="NaN"):
            lossy(torch.tensor([float("nan")]).bfloat16(), 0, nonfinite=nonfinite)


@pytest.mark.parametrize("strange", ["nan", "inf", "-inf"])
def test_one_weight_that_is_not_finite_is_refused_wherever_it_stands_and_what_was_packed_stays(strange):
    good = gaussian(40_000)
    packed = pack(good, mant_bits=3, block_norm=512)
    before = packed.to_bytes()
    for place in (0, 20_011, 39_999):
        bad = good.clone()
        bad[place] = float(strange)
        with pytest.raises(ValueError, match="cannot keep"):
            pack(bad, mant_bits=3)
        with pytest.raises(ValueError, match="cannot keep"):
            packed.update_(bad)
        if strange == "nan":
            with pytest.raises(ValueError, match="NaN, which"):
                pack(bad, mant_bits=3, nonfinite="keep")
        else:
            assert pack(bad, mant_bits=3, nonfinite="keep").unpack()[place] == float(strange)
    assert packed.to_bytes() == before


@pytest.mark.parametrize("semantics", fields.SEMANTICS)
@pytest.mark.parametrize("k", [0, 1, 3])
def test_no_finite_weight_becomes_infinite(semantics, k):
    top = np.full(2048, 0x7F7F, np.uint16)
    top[::2] = np.random.default_rng(k).integers(0x7E00, 0x7F80, 1024)
    assert lossy(patterns(top), k, block_norm=128, norm_semantics=semantics).isfinite().all()


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_planes_hold_their_items_and_convert_to_the_published_order(k, count):
    items = np.random.default_rng(k).integers(0, 2 << k, count).astype(np.uint8)
    plane = fields.pack_plane(items, k)
    assert len(plane) == fields.plane_bytes(count, k) and np.array_equal(fields.unpack_plane(plane, k, count), items)
    published = fields.published_order(plane, k)
    assert np.array_equal(fields.published_order(published, k), plane)
    bits = np.unpackbits(published)[: count * (k + 1)].reshape(count, k + 1)  # first item in the highest bits
    assert np.array_equal(bits @ (1 << np.arange(k, -1, -1)), items)


def test_code_lengths_are_optimal_and_codes_free_of_prefixes():
    assert package_merge(np.array([1, 1, 2, 3, 5, 8]), 12).tolist() == [5, 5, 4, 3, 2, 1]  # Huffman's
    assert package_merge(np.array([1, 1, 2, 3, 5, 8]), 3).tolist() == [3, 3, 3, 3, 2, 2]
    lengths = package_merge(np.random.default_rng(0).integers(1, 2**40, 256), 11)
    assert lengths.max() <= 11 and (2.0**-lengths).sum() == 1
    codes = [format(int(c), f"0{n}b")[::-1] for c, n in zip(canonical_codes(lengths), lengths, strict=True)]
    ordered = sorted(codes)
    assert not any(b.startswith(a) for a, b in itertools.pairwise(ordered))
    with pytest.raises(ValueError, match="allow longer"):
        package_merge(np.ones(5), 2)


def test_the_decoding_table_gives_for_any_bits_the_pair_whose_code_they_begin_with():
    book = Codebook.of_counts(np.random.default_rng(0).integers(0, 1000, 256) ** 3, 12)
    table = book.decoding
    exponents = [*book.palette.tolist(), 0]
    for pair, word in enumerate(book.codes.tolist()):
        length, code = word >> 16, word & 0xFFFF
        for rest in (0, (1 << 12 - length) - 1):
            right = length | exponents[pair // 16] << 7 | exponents[pair % 16] << 23
            assert int(table[code | rest << length]) == right


def gaussian_shares(sigma):
    """Of each bfloat16 pattern, for Gaussian weights that are rounded to it, from the normal distribution function."""
    magnitudes = np.arange(0x7F80)
    edges = np.append(float_of(magnitudes), np.inf)
    middle = np.concatenate([[0.0], (edges[:-2] + edges[1:-1]) / 2, [np.inf]])
    below = torch.special.ndtr(torch.from_numpy(-middle / sigma)).numpy()
    shares = np.zeros(2**16)
    shares[:0x7F80] = shares[0x8000 : 0x8000 + 0x7F80] = below[:-1] - below[1:]
    return shares


def test_entropies_of_gaussian_weights_are_those_of_the_normal_distribution():
    exact = report_of_counts(gaussian_shares(0.02))
    assert exact.sign == 1
    assert exact.exponent == pytest.approx(2.5453, abs=2e-4) and exact.mantissa == pytest.approx(6.9716, abs=2e-4)
    assert exact.joint == pytest.approx(10.464, abs=1e-3)
    assert (exact.ratio_sum, exact.ratio_joint) == pytest.approx((1.5214, 1.5291), abs=2e-4)
    sampled = entropy_report(gaussian(2**21))
    assert sampled.exponent == pytest.approx(exact.exponent, abs=3e-3)
    assert sampled.mantissa == pytest.approx(exact.mantissa, abs=1e-3)
    assert sampled.sign_counts.sum() == sampled.exponent_counts.sum() == sampled.mantissa_counts.sum() == 2**21


def test_entropies_of_known_counts_are_exact():
    assert entropy(np.ones(256)) == 8 and entropy(np.array([5])) == 0
    report = entropy_report(every_pattern())
    assert (report.sign, report.exponent, report.mantissa, report.joint) == (1, 8, 7, 16)
    assert report.ratio_sum == report.ratio_joint == 1
    with pytest.raises(TypeError, match="bfloat16"):
        entropy_report(torch.zeros(3))


def test_an_asymmetric_numeral_system_needs_the_entropy_and_its_states():
    exponents = fields.split(bits_of(gaussian(2**16)))[0].reshape(64, -1)
    counts = np.bincount(exponents.reshape(-1), minlength=256)
    shares = rans.shares_of(counts)
    assert shares.sum() == 2048 and (shares[counts > 0] > 0).all()
    states, words = rans.encode(exponents, shares)
    assert np.array_equal(rans.decode(states, words, shares, 1024), exponents)
    stream = (rans.bits(states, words) - 64 * 24) / 2**16  # a state and a half-filled word for each row
    assert stream == pytest.approx(entropy(counts), abs=0.02)
    with pytest.raises(ValueError, match="without a share"):
        rans.encode(np.array([[0]], np.uint8), shares)


def with_every_normalizer() -> np.ndarray:
    """Blocks of 32 weights: every finite pattern beside a largest weight of every mantissa that leaves it smaller."""
    finite = np.flatnonzero((np.arange(2**16) & 0x7F80) != 0x7F80).astype(np.uint16)
    blocks = []
    for mantissa in range(128):
        largest = np.uint16(0x7F00 | mantissa)
        smaller = finite[(finite & 0x7FFF) <= largest]
        smaller = np.concatenate([smaller, np.zeros(-len(smaller) % 31, np.uint16)]).reshape(-1, 31)
        blocks.append(np.column_stack([smaller, np.full(len(smaller), largest)]))
    return np.concatenate(blocks).astype(np.uint16).reshape(-1)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_tables_of_mantissas_give_what_the_definition_gives_for_every_weight_and_normalizer(k):
    bits = with_every_normalizer()
    for block in (32, None):
        exponents, items, norm = fields.lossy_split(bits, k, block)
        found = mantissas.lossy_split(bits, k, block, "true_max")
        merged = fields.lossy_merge(exponents, items, k, norm, block)
        assert np.array_equal(found[0], exponents) and np.array_equal(found[1], items)
        assert np.array_equal(found[3], merged) and (found[2] is norm is None or np.array_equal(found[2], norm))
        shifted = exponents.astype(np.uint16) << 7
        assert np.array_equal(mantissas.lossy_merge(shifted, items, k, norm, block), merged)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_tables_of_mantissas_take_every_normalizer_that_a_container_may_have(k):
    """`pack` writes even bytes; the definition, and the kernels, read all eight bits."""
    norm = np.arange(256, dtype=np.uint8)
    rng = np.random.default_rng(k)
    exponents, items = (rng.integers(0, n, 256 * 32).astype(np.uint8) for n in (255, 2 << k))
    wanted = fields.lossy_merge(exponents, items, k, norm, 32)
    assert np.array_equal(mantissas.lossy_merge(exponents.astype(np.uint16) << 7, items, k, norm, 32), wanted)


@pytest.mark.parametrize("count", [1, 31, 63, 64, 1000, 3000])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_tables_of_mantissas_follow_the_published_program_too_and_take_any_length(k, count):
    bits = np.random.default_rng(count).integers(0, 2**16, count).astype(np.uint16)
    bits[(bits & 0x7F80) == 0x7F80] = 0x7F80  # infinity, which is kept
    assert np.array_equal(mantissas.lossy_split(bits, k, 64, "true_max")[1], fields.lossy_split(bits, k, 64)[1])
    exponents, items, norm = fields.lossy_split(bits, k, 64, "authors_v1")
    found = mantissas.lossy_split(bits, k, 64, "authors_v1")
    assert all(np.array_equal(*pair) for pair in zip(found, (exponents, items, norm), strict=False))
    assert np.array_equal(found[3], fields.lossy_merge(exponents, items, k, norm, 64))
