"""Quantizers against the formulas of their papers, written out here a second time in float64 with numpy."""

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from paperlm_kernels.rmsnorm_quantize import MODES
from paperlm_kernels.rmsnorm_quantize.reference import keep_largest, quantize_rows
from paperlm_kernels.ternary_linear import quantize_weight
from support_quantizers import EPS, ORACLES

import paperlm.quantizers
from paperlm.errors import SpecError
from paperlm.quantizers import build_quantizer, quantizers
from paperlm.quantizers.presets import PRESETS, preset_name
from paperlm.quantizers.scheme import kv_cache_of, quantization_of
from paperlm.quantizers.topk import largest_entries


def quantizer(name, **options):
    return quantizers()[name](**options)


each_oracle = pytest.mark.parametrize(
    ("name", "options", "oracle"), ORACLES, ids=[" ".join(map(str, (n, *o.values()))) for n, o, _ in ORACLES]
)
RANDOM = np.random.default_rng(0)
ROWS = {
    "gaussian": RANDOM.standard_normal((64, 1536)),
    "heavy tails": RANDOM.standard_t(2, (64, 1536)),
    "scales far apart": RANDOM.standard_normal((64, 256)) * 10.0 ** RANDOM.uniform(-4, 4, (64, 1)),
    "mostly zeros": RANDOM.standard_normal((64, 256)) * (RANDOM.random((64, 256)) < 0.1),
}


def test_every_quantizer_has_an_oracle():
    assert {name for name, _, _ in ORACLES} == set(quantizers())


@pytest.mark.parametrize("rows", ROWS)
@each_oracle
def test_float64_values_are_those_of_the_formula(name, options, oracle, rows):
    x = ROWS[rows]
    found, _ = quantizer(name, **options).values(torch.from_numpy(x.copy()))
    np.testing.assert_allclose(found.numpy(), oracle(x), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("rows", ROWS)
@each_oracle
def test_float32_codes_are_those_of_float64_wherever_float32_can_tell(name, options, oracle, rows):
    """Scaling x rounds twice and the statistic, a mean of so many, a little: a code may differ next to a tie alone."""
    one, x = quantizer(name, **options), torch.from_numpy(ROWS[rows]).float()
    codes, step = one.quantize(x)
    exact, exact_step = one.codes_and_step(x.double())
    assert codes.dtype == torch.int8 and step.dtype == torch.float32
    assert one.limits[0] <= codes.min() and codes.max() <= one.limits[1]
    torch.testing.assert_close(step.double(), exact_step, rtol=1e-6, atol=0)
    unit = x.double() / exact_step + one.zero
    spacing = torch.where(unit.abs() >= 8, 4, torch.where(unit.abs() >= 4, 2, 1)) if name == "fp4_e2m1" else 1
    from_tie = ((unit / spacing - (unit / spacing).floor()) - 0.5).abs() * spacing
    same = codes == exact
    assert (from_tie[~same] <= 1e-6 * (1 + unit[~same].abs())).all()
    assert same.float().mean() > 0.9999


@each_oracle
def test_rows_of_zeros_stay_near_zero_and_no_number_is_lost(name, options, oracle):
    one = quantizer(name, **options)
    values, step = one.values(torch.zeros(3, 8))
    assert values.isfinite().all() and (step > 0).all()
    assert values.abs().max() <= (0 if one.zero == 0 else EPS)


@each_oracle
def test_bfloat16_is_quantized_from_float32_and_keeps_its_dtype(name, options, oracle):
    one = quantizer(name, **options)
    x = torch.from_numpy(ROWS["gaussian"]).bfloat16()
    assert torch.equal(one.quantize(x)[0], one.quantize(x.float())[0])
    values, step = one.values(x)
    assert values.dtype == torch.bfloat16 and step.dtype == torch.float32
    assert torch.equal(values, one.values(x.float())[0].bfloat16())


@each_oracle
def test_the_input_is_left_as_it_was(name, options, oracle):
    x = torch.from_numpy(ROWS["gaussian"].copy())
    quantizer(name, **options).values(x)
    assert np.array_equal(x.numpy(), ROWS["gaussian"])


# --- errors on synthetic rows, as the project's specification of the paper prints them ---


def gaussian(rows, width, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def agrees(printed, digit, name, x, **options):
    """Whether the relative squared error is the printed one, of a few dozen rows; their spread is seen here."""
    values, _ = quantizer(name, **options).values(x)
    of_rows = (values - x).square().sum(-1) / x.square().sum(-1)
    return float(of_rows.mean()) == pytest.approx(printed, abs=digit / 2 + 3 * float(of_rows.std()) / 64**0.5)


@pytest.mark.parametrize(
    ("name", "printed"),
    [("int4_absmean", 0.0132), ("fp4_e2m1", 0.0142), ("int4_absmax", 0.0249), ("fp4_e1m2", 0.0249)],
)
def test_errors_on_gaussian_rows_of_4096_are_the_printed_ones(name, printed):
    assert agrees(printed, 0.0001, name, gaussian(1000, 4096))


@pytest.mark.parametrize(
    ("name", "options", "printed", "digit"),
    [
        ("int4_absmean", {"multiple": 1}, 0.60, 0.01),
        ("int4_absmean", {"multiple": 2}, 0.39, 0.01),
        ("fp4_e2m1", {}, 0.067, 0.001),
        ("int8_absmax", {}, 9.5e-4, 1e-5),
    ],
)
def test_errors_on_squared_relu_products_are_the_printed_ones(name, options, printed, digit):
    x = gaussian(500, 11008) * gaussian(500, 11008, seed=1).relu().square()
    assert agrees(printed, digit, name, x, **options)


@pytest.mark.parametrize(
    ("name", "bits", "printed"),
    [("kv_symmetric", 4, 0.0138), ("kv_minmax", 4, 0.0120), ("kv_symmetric", 3, 0.0750), ("kv_minmax", 3, 0.0551)],
)
def test_errors_on_gaussian_heads_of_128_are_the_printed_ones(name, bits, printed):
    assert agrees(printed, 0.0001, name, gaussian(10000, 128), bits=bits)


def test_int4_absmean_on_a_gaussian_has_the_error_and_the_zeros_of_the_integral():
    beta, grid = math.sqrt(2 / math.pi), np.linspace(-12, 12, 2_400_001)
    density = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi) * (grid[1] - grid[0])
    codes = np.clip(np.rint(math.sqrt(7) * grid / beta), -8, 7)
    error = float(((beta * codes / math.sqrt(7) - grid) ** 2 * density).sum())
    above, below = (math.erfc(edge * beta / math.sqrt(14)) / 2 for edge in (7.5, 8.5))
    zeros = math.erf(0.5 * beta / math.sqrt(14))
    assert (zeros, above, below) == pytest.approx((0.1199, 0.0119, 0.0052), abs=5e-5)
    x = gaussian(1000, 4096)
    found, step = quantizer("int4_absmean").quantize(x)
    share = lambda which: float(which.double().mean())  # noqa: E731
    counted = (share(found == 0), share(x > 7.5 * step), share(x < -8.5 * step))
    assert counted == pytest.approx((zeros, above, below), abs=4 * math.sqrt(0.12 * 0.88 / x.numel()))
    assert float((found * step - x).square().mean()) == pytest.approx(error, rel=0.01)


def test_where_some_channels_are_much_larger_than_others_absmean_is_the_worse_one_of_four_bits():
    """0.37 and 0.22 of the square are lost with channels whose scales are log-normal: absmean cuts large ones off."""
    x = gaussian(2000, 4096) * gaussian(1, 4096, 1).exp()
    lost = {
        name: float((quantizer(name).values(x)[0] - x).square().sum() / x.square().sum())
        for name in ("int4_absmean", "int4_absmax")
    }
    assert lost == pytest.approx({"int4_absmean": 0.37, "int4_absmax": 0.22}, abs=0.03), lost


def test_zeros_that_other_quantizers_make_of_a_gaussian():
    """12.6 % under FP4; 1.1 to 1.2 % under INT8 at widths 1536 to 4096, what the paper's Table 2 prints of b1.58."""
    zeros = lambda name, width: float((quantizer(name).quantize(gaussian(500, width))[0] == 0).double().mean())  # noqa: E731
    assert zeros("fp4_e2m1", 4096) == pytest.approx(0.126, abs=1e-3)
    assert 0.0105 < zeros("int8_absmax", 1536) < zeros("int8_absmax", 4096) < 0.0125


@pytest.mark.parametrize("rows", ROWS)
def test_e1m2_and_int4_absmax_are_the_same_quantizer(rows):
    x = torch.from_numpy(ROWS[rows])
    (a, step_a), (b, step_b) = (quantizer(name).quantize(x) for name in ("fp4_e1m2", "int4_absmax"))
    assert torch.equal(a, b) and torch.equal(step_a, step_b)
    assert a.min() == -7  # -8 is never reached


def test_the_grid_of_e2m1_is_that_of_the_format_with_the_row_maximum_on_its_largest_value():
    x = torch.linspace(-3.7, 3.7, 4001, dtype=torch.float64)[None]
    found = quantizer("fp4_e2m1").values(x)[0].unique()
    format_values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    expected = torch.cat((-format_values, format_values)).unique() * 3.7 / 6
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_one_mean_serves_the_whole_weight_matrix():
    w = gaussian(16, 24)
    codes, alpha = quantizer("ternary_absmean").quantize(w)
    assert alpha.numel() == 1 and float(alpha) == pytest.approx(float(w.abs().mean()), rel=1e-12)
    assert codes.unique().tolist() == [-1, 0, 1]
    assert torch.equal(codes == 0, w.abs() < w.abs().mean() / 2)


# --- TopK ---


def by_hand(row, count):
    """Places of the largest magnitudes; of equal ones the first."""
    order = sorted(range(len(row)), key=lambda i: (-abs(row[i]), i))
    return sorted(order[:count])


@pytest.mark.parametrize("values", ["distinct", "many ties", "all equal", "signs", "zeros"])
@pytest.mark.parametrize("count", [1, 5, 11, 12])
def test_exactly_the_asked_for_number_of_entries_stays_whatever_ties_there_are(values, count):
    x = {
        "distinct": gaussian(9, 12).float(),
        "many ties": gaussian(9, 12).mul(2).round().float(),
        "all equal": torch.full((9, 12), 0.25),
        "signs": gaussian(9, 12).sign().float(),
        "zeros": torch.zeros(9, 12),
    }[values]
    mask = largest_entries(x, count)
    assert [row.nonzero().flatten().tolist() for row in mask] == [by_hand(row.tolist(), count) for row in x]


def test_masking_and_quantizing_commute_since_the_row_maximum_always_stays():
    x, one = gaussian(32, 96).float(), quantizer("int8_absmax")
    mask = largest_entries(x, 48)
    first, step = one.quantize(x * mask)
    second, other_step = one.quantize(x)
    assert torch.equal(first, second * mask) and torch.equal(step, other_step)


# --- the kernels' package, which has them a second time so that it needs no other ---


ACTIVATIONS = [(name, options) for name, options, _ in ORACLES if quantizers()[name].role == "activations"]


def test_the_kernels_have_the_same_quantizers_of_activations():
    assert set(MODES) == {name for name, _ in ACTIVATIONS}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("name", "options"), ACTIVATIONS, ids=str)
def test_codes_and_steps_are_those_of_the_kernels_reference_to_the_last_bit(name, options, rows):
    x = torch.from_numpy(ROWS[rows]).float()
    codes, step = quantizer(name, **options).codes_and_step(x)
    theirs, scale = quantize_rows(x, MODES[name], **options)
    assert torch.equal(codes, theirs) and torch.equal(step[..., 0], scale)


def test_weights_and_topk_are_those_of_the_kernels_reference_to_the_last_bit():
    w = gaussian(40, 56).float()
    codes, alpha = quantizer("ternary_absmean").quantize(w)
    theirs, their_alpha = quantize_weight(w)
    assert torch.equal(codes, theirs) and torch.equal(alpha, their_alpha)
    ties = gaussian(40, 56).mul(2).round().float()
    assert torch.equal(ties * largest_entries(ties, 28), keep_largest(ties, 28))


# --- what stands where ---


def test_every_preset_is_valid_and_written_out_in_full():
    for name, preset in PRESETS.items():
        if preset["quantization"] is not None:
            assert quantization_of(name).describe() == quantization_of(preset["quantization"]).describe()
            described = quantization_of(name).describe()
            assert {place: one for place, one in described.items() if one != preset["quantization"][place]} == {}
            assert PRESETS[preset_name(**preset)] == preset


def test_b158_and_the_trunk_differ_in_the_activation_and_the_main_model_from_its_trunk_in_what_enters():
    assert preset_name(**PRESETS["a8_trunk"]) == "a8_trunk" and preset_name(**PRESETS["b158"]) == "b158"
    assert (PRESETS["b158"] | {"hidden_act": "relu2"}) == PRESETS["a8_trunk"]
    main = PRESETS["a48_int4"]["quantization"]
    assert main["o"] == {"name": "int8_absmax", "keep": 0.5} and "keep" not in main["down"]
    assert "keep" not in PRESETS["a48_fp4"]["quantization"]["o"]  # its output input is FP4 and dense


def test_a_name_alone_and_a_mapping_mean_the_same():
    short = quantization_of({"weight": "ternary_absmean", "qkv": "int4_absmean", "o": None})
    assert short.describe()["qkv"] == {"name": "int4_absmean", "multiple": 1}
    assert short.describe() == quantization_of(short.describe()).describe()
    assert short.describe()["down"] is None


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"weights": "ternary_absmean"}, ["quantization", "'weights'", "did you mean 'weight'?"]),
        ({"qkv": "int4_absmen"}, ["quantization.qkv", "did you mean 'int4_absmean'?"]),
        ({"qkv": {"name": "int4_absmean", "multipel": 2}}, ["quantization.qkv", "did you mean 'multiple'?"]),
        ({"down": {"name": "int4_absmean", "multiple": 3}}, ["quantization.down", "3", "1, and 2 before down"]),
        ({"down": {"name": "int4_absmean", "multiple": True}}, ["quantization.down", "multiple is True"]),
        ({"weight": "int8_absmax"}, ["quantization.weight", "'int8_absmax' quantizes activations"]),
        ({"o": "ternary_absmean"}, ["quantization.o", "'ternary_absmean' quantizes weights"]),
        ({"o": {"name": "int8_absmax", "keep": 1.5}}, ["quantization.o.keep", "1.5"]),
        ({"o": {"name": "int8_absmax", "keep": 0}}, ["quantization.o.keep", "0 is no share"]),
        ({"o": {"name": "int8_absmax", "keep": "half"}}, ["quantization.o.keep", "'half'"]),
        ({"qkv": 4}, ["quantization.qkv", "'4'"]),
        ({"qkv": None}, ["every place is null"]),
        ("a48_int8", ["unknown preset 'a48_int8'; did you mean 'a48_int4'?"]),
        (["int8_absmax"], ["is no mapping of weight, qkv"]),
    ],
)
def test_a_wrong_quantization_is_refused_with_the_place_and_the_nearest_name(value, says):
    with pytest.raises(SpecError) as error:
        quantization_of(value)
    assert all(part in str(error.value) for part in says), str(error.value)


def test_a_share_that_is_no_whole_number_of_entries_is_refused_with_the_nearest_that_is():
    third = quantization_of({"o": {"name": "int8_absmax", "keep": 0.3}})
    third.check(hidden_size=10, intermediate_size=7)
    with pytest.raises(SpecError, match=r"quantization.o: keep 0.3 of 24 entries is 7.20.*use 0.29166"):
        third.check(hidden_size=24, intermediate_size=7)
    quantization_of({"down": {"name": "int8_absmax", "keep": 0.3}}).check(hidden_size=24, intermediate_size=10)
    nothing = quantization_of({"o": {"name": "int8_absmax", "keep": 1e-8}})
    with pytest.raises(SpecError, match=r"keep 1e-08 of 24 entries is 0.00.*use 0.04166"):
        nothing.check(hidden_size=24, intermediate_size=7)


def test_the_quantized_cache_has_the_papers_defaults_and_refuses_other_bits():
    assert kv_cache_of({"kv_bits": 3}).described == {
        "q_bits": 16, "kv_bits": 3, "first_bits": 4, "mapping": "symmetric",
    }  # fmt: skip
    cache = kv_cache_of({"kv_bits": 3, "q_bits": 4, "mapping": "minmax"})
    assert (cache.q.bits, cache.kv.bits, cache.first.bits) == (4, 3, 4)
    for wrong, says in [
        ({"kv_bits": 2}, "unknown kv_bits '2'"),
        ({"kv_bits": "4"}, "kv_bits '4' is text; write the number 4"),
        ({"q_bits": 4}, "does not say kv_bits"),
        ({"kv_bits": 4, "maping": "minmax"}, "did you mean 'mapping'?"),
        ({"kv_bits": 4, "mapping": "min_max"}, "did you mean 'minmax'?"),
        ({"kv_bits": 4, "first_bits": 3}, "first_bits 3 with kv_bits 4: position 0 has at least as many"),
        (4, "does not say kv_bits"),
    ]:
        with pytest.raises(SpecError) as error:
            kv_cache_of(wrong)
        assert says in str(error.value), str(error.value)


def test_an_option_that_a_quantizer_needs_is_asked_for():
    with pytest.raises(SpecError, match="quantizer 'kv_symmetric' needs bits"):
        build_quantizer("kv_symmetric", "heads", "here")


@pytest.mark.parametrize(
    ("limits", "zero", "says"),
    [
        ("(-200, 200)", "0.0", "codes from -200 to 200; they have to fit into 8 bits"),
        ("(-128, 128)", "0.0", "codes from -128 to 128"),
        ("(-129, 127)", "0.0", "codes from -129 to 127"),
        ("(0, 15)", "7.5", "7.5 for the code of zero"),
    ],
)
def test_a_quantizer_that_products_of_int8_codes_cannot_have_is_refused(limits, zero, says, tmp_path, monkeypatch):
    text = (Path(paperlm.quantizers.__path__[0]) / "int4_absmax.py").read_text()
    text = text.replace('"int4_absmax"', '"mine"').replace("(-8, 7)", limits)
    assert text.count(limits) == 1
    text += f"    zero: ClassVar[float] = {zero}\n"
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.setattr(paperlm.quantizers, "__path__", [*paperlm.quantizers.__path__, str(tmp_path)])
    quantizers.cache_clear()
    with pytest.raises(SpecError, match=f"quantization.o: quantizer 'mine' has {re.escape(says)}"):
        quantization_of({"o": "mine"})
    monkeypatch.undo()
    quantizers.cache_clear()
    sys.modules.pop("paperlm.quantizers.mine")
