"""Jobs that look at what enters the projections: zeros and distributions, against numpy and closed forms."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from support_probe import TOKENS, Pretrained, inputs, new_model, save
from support_small_jobs import small

from paperlm.data.settings import TokenData
from paperlm.errors import JobError, SpecError
from paperlm.jobs import activation_distribution, activation_sparsity
from paperlm.jobs.activation_distribution import ActivationDistribution
from paperlm.jobs.activation_sparsity import ActivationSparsity
from paperlm.jobs.base import Machine
from paperlm.models.llama import PaperLlamaConfig, PaperLlamaForCausalLM
from paperlm.plan.project import ROOT
from paperlm.probe.distribution import distributions, moment_statistics, quantized_statistics
from paperlm.probe.inputs import GATE, PLACES, visited_inputs
from paperlm.probe.jackknife import standard_errors
from paperlm.probe.sparsity import COUNTED, columns, count_zeros, gaussian_zeros
from paperlm.quantizers.presets import PRESETS
from paperlm.quantizers.scheme import input_quantizer, quantization_of
from paperlm.tables.published import read_published

CPU = Machine(device="cpu", progress=False)


def bitnet(preset="a48_int4", **options):
    """Three blocks whose norms in front of the projections have gains of their own."""
    torch.manual_seed(0)
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = PaperLlamaForCausalLM(PaperLlamaConfig(vocab_size=1024, **shape, **PRESETS[preset], **options)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p).exp()) if p.ndim == 1 and "norm" in name else p.mul_(4.0)
    return model


@pytest.fixture(scope="module")
def text():
    """Sequences of different lengths in two batches: ids and mask."""
    ids = torch.randint(2, 1024, (5, 12), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(12) < torch.tensor([[12], [3], [7], [12], [5]])).long()
    return [(ids[:3] * mask[:3], mask[:3]), (ids[3:] * mask[3:], mask[3:])]


def entered(model, text):
    """(block, place) -> the numbers that enter there at real tokens, (tokens, width), and those that leave the gate."""
    found, mask = {}, {}

    def visit(block, place, x, codes):
        found.setdefault((block, place), []).append(x[mask["now"].bool()].double())

    with torch.no_grad(), visited_inputs(model, visit):
        for ids, mask["now"] in text:
            model(input_ids=ids, attention_mask=mask["now"])
    return {key: torch.cat(parts).numpy() for key, parts in found.items()}


def codes_of(x, place):
    """INT4 absmean and INT8 absmax as the paper writes them, in float64; o: the half of each token that is largest."""
    if place in ("qkv", "gate_up"):
        return np.clip(np.rint(math.sqrt(7) * x / np.abs(x).mean(-1, keepdims=True)), -8, 7)
    if place == "o":
        order = np.argsort(-np.abs(x), axis=-1, kind="stable")[:, x.shape[-1] // 2 :]
        x = x.copy()
        np.put_along_axis(x, order, 0.0, -1)
    return np.rint(127 * x / np.abs(x).max(-1, keepdims=True))


# -- zeros ----


def test_zeros_are_those_of_the_papers_formulas_at_real_tokens(text):
    model = bitnet()
    seen, found = entered(model, text), count_zeros(model, text)
    assert found.tokens == 39 and found.zeros.shape == (5, 3, 5)
    for (block, place), x in seen.items():
        zeros = (x <= 0).sum() if place == GATE else (codes_of(x, place) == 0).sum()
        assert found.zeros[:, block, COUNTED.index(place)].sum() == zeros, (block, place)
        assert found.numbers[:, COUNTED.index(place)].sum() == x.size


def test_exactly_half_of_what_enters_the_output_projection_is_zero(text):
    found = count_zeros(bitnet(), text)
    half = found.numbers[:, COUNTED.index("o")] // 2
    assert (found.zeros[:, :, COUNTED.index("o")] == half[:, None]).all()


def test_without_quantizers_nothing_is_zero(text):
    assert count_zeros(bitnet("llama"), text).zeros.sum() == 0


def test_a_swish_gate_is_not_zero_where_squared_relu_is(text):
    swish, relu = (
        count_zeros(bitnet(preset), text).shares()[:, COUNTED.index(GATE)] for preset in ("b158", "a8_trunk")
    )
    assert (swish < 0.01).all() and (relu > 0.2).all(), "sums of whole numbers can be zero, too"


def test_a_model_of_another_family_is_refused_by_the_name_of_the_module_that_it_lacks(text):
    with pytest.raises(JobError, match=r"LlamaForCausalLM: block 1 has no attention\.q_proj"):
        count_zeros(new_model(), text)


def test_the_columns_are_those_of_the_printed_table():
    """Overall from the other printed columns, Up from the gate's zeros that the text gives for 7B, in percent."""
    table = read_published(ROOT / "paper_tables/published/bitnet_table2.csv", label_columns=2)
    shapes = [(1536, 4096), (2048, 5460), (3200, 8640), (4096, 11008)]
    for row, (width, glu) in zip(table.rows, [shape for shape in shapes for _ in range(3)], strict=True):
        printed = {column: float(table.cell(row, column)) / 100 for column in table.columns}
        gate_act = 1 - (1 - printed["Up"]) / (1 - printed["Gate"])
        zeros = {"qkv": printed["QKV"], "o": printed["Out"], "gate_up": printed["Gate"], "down": printed["Down"]}
        found = columns(zeros | {GATE: gate_act}, width, glu)
        assert found["up"] == pytest.approx(printed["Up"], abs=1e-12)
        assert found["overall"] == pytest.approx(printed["Overall"], abs=1e-3), row
    found = columns({"qkv": 0.121, "o": 0.5, "gate_up": 0.12, "down": 0.842, GATE: 0.675}, 4096, 11008)
    assert round(100 * found["up"], 1) == 71.4 and round(100 * found["overall"], 1) == 44.5


# -- theory ----


def test_theory_of_int4_absmean_is_the_integral_over_the_normal_distribution():
    """|x| < mean|x| / (2 sqrt 7), mean|x| = sqrt(2 / pi): 11.99 %."""
    exact = math.erf(math.sqrt(2 / math.pi) / (2 * math.sqrt(7)) / math.sqrt(2))
    assert round(100 * exact, 2) == 11.99
    assert gaussian_zeros(input_quantizer("int4_absmean", ""), 4096) == pytest.approx(exact, abs=5e-4)
    wide = math.erf(2 * math.sqrt(2 / math.pi) / (2 * math.sqrt(7)) / math.sqrt(2))
    assert gaussian_zeros(input_quantizer({"name": "int4_absmean", "multiple": 2}, ""), 4096) == pytest.approx(
        wide, abs=1e-3
    )


@pytest.mark.parametrize("width", [64, 1536, 4096])
def test_theory_of_int8_absmax_is_the_integral_over_the_largest_of_a_token(width):
    """|x| < M / 254, M the largest of `width` magnitudes, whose distribution function is erf(t / sqrt 2)^width."""
    density = lambda t: width * (2 * scipy.stats.norm.cdf(t) - 1) ** (width - 1) * 2 * scipy.stats.norm.pdf(t)  # noqa: E731
    exact, _ = scipy.integrate.quad(lambda t: density(t) * math.erf(t / 254 / math.sqrt(2)), 0, 10, points=[2, 3, 4, 5])
    assert gaussian_zeros(input_quantizer("int8_absmax", ""), width) == pytest.approx(exact, abs=3e-4)
    assert width == 64 or 0.0105 < exact < 0.0125


def test_theory_of_topk_is_its_share_and_without_a_quantizer_nothing():
    assert gaussian_zeros(input_quantizer({"name": "int8_absmax", "keep": 0.5}, ""), 1536) == 0.5
    assert gaussian_zeros(None, 1536) == 0.0


# -- standard errors ----


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(0).normal(size=9)
    found = standard_errors(lambda sums: {"mean": sums[0] / sums[1]}, np.stack([values, np.ones(9)], 1))
    assert found["mean"] == pytest.approx(scipy.stats.sem(values), rel=1e-12)


def test_the_jackknife_of_a_ratio_that_is_the_same_everywhere_is_nothing():
    parts = np.array([[2.0, 4.0], [3.0, 6.0], [5.0, 10.0]])
    assert standard_errors(lambda s: {"half": s[0] / s[1]}, parts) == {"half": 0.0}
    assert standard_errors(lambda s: {"half": s[0] / s[1]}, parts[:1]) == {}


# -- distributions ----


TRIED = {"INT4": "int4_absmean", "half": {"name": "int8_absmax", "keep": 0.5}}


@pytest.fixture(scope="module")
def measured(text):
    tried = {title: input_quantizer(described, title) for title, described in TRIED.items()}
    return distributions(bitnet("b158"), lambda: text, bins=16, within=0.99, block=2, tried=tried, at="o")


def test_moments_are_those_of_all_numbers_that_enter_at_real_tokens(measured, text):
    seen = entered(bitnet("b158"), text)
    for place in PLACES:
        x = np.concatenate([seen[block, place].ravel() for block in range(3)])
        found = moment_statistics(measured.moments[place].sum(0))
        rms = math.sqrt(np.square(x).mean())
        assert found["rms"] == pytest.approx(rms, rel=1e-6)
        assert found["kurtosis"] == pytest.approx(scipy.stats.kurtosis(x), rel=1e-5, abs=1e-5)
        assert found["near_zero"] == pytest.approx((np.abs(x) < 0.1 * rms).mean(), abs=2 / len(x))


def test_histograms_are_numpys_of_all_blocks_and_of_the_middle_one(measured, text):
    seen = entered(bitnet("b158"), text)
    for place in PLACES:
        every = np.concatenate([seen[block, place].ravel() for block in range(3)])
        for block, x in ((0, every), (2, seen[1, place].ravel())):
            found = measured.histograms[place, block]
            inside = np.abs(x).astype(np.float32) <= found.edge
            expected, _ = np.histogram(x[inside], bins=found.edges)
            assert found.numbers == x.size
            assert np.abs(found.counts - expected).sum() <= 4, "numbers on an edge may fall to either side"
        top = np.quantile(np.abs(every), 0.99)
        assert top <= measured.histograms[place, 0].edge <= top * (1 + 2**-6)


def test_bins_that_reach_to_the_largest_magnitude_have_every_number(text):
    found = distributions(bitnet("b158"), lambda: text, bins=16, within=1.0, block=2, tried={}, at="o")
    assert all(one.counts.sum() == one.numbers for one in found.histograms.values())


def test_quantizers_are_tried_on_the_inputs_of_one_place(measured, text):
    seen = entered(bitnet("b158"), text)
    x = np.concatenate([seen[block, "o"] for block in range(3)])
    beta = np.abs(x).mean(-1, keepdims=True)
    codes = np.clip(np.rint(math.sqrt(7) * x / beta), -8, 7)
    found = quantized_statistics(measured.quantized["INT4"].sum(0))
    error = np.square(codes * beta / math.sqrt(7) - x).sum() / np.square(x).sum()
    assert found["zeros"] == (codes == 0).mean() and found["square_kept"] == 1.0
    assert found["relative_error"] == pytest.approx(error, rel=1e-5)
    half = quantized_statistics(measured.quantized["half"].sum(0))
    largest = -np.sort(-np.abs(x), -1)[:, : x.shape[-1] // 2]
    assert half["zeros"] == 0.5
    assert half["square_kept"] == pytest.approx(np.square(largest).sum() / np.square(x).sum(), rel=1e-6)
    assert measured.histograms["half", 0].edge == measured.histograms["o", 0].edge


def test_topk_keeps_what_theory_says_of_normal_and_laplace_numbers():
    """The half of largest magnitude has 92.8 % of the square of normal numbers, 96.6 % of Laplace's."""
    draws = np.random.default_rng(0)
    for x, kept in ((draws.normal(size=(64, 4096)), 0.928), (draws.laplace(size=(64, 4096)), 0.966)):
        largest = -np.sort(-np.abs(x), -1)[:, :2048]
        assert np.square(largest).sum() / np.square(x).sum() == pytest.approx(kept, abs=1e-3)


# -- jobs ----


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    from paperlm.data.prepare import prepare

    folder = tmp_path_factory.mktemp("tokens")
    prepare(TokenData(**TOKENS).model_dump(mode="json"), folder)
    return folder / "manifest.json"


def test_a_record_of_zeros_has_table_twos_columns_and_errors(tmp_path, tokens):
    job = ActivationSparsity(of=Pretrained(), documents=6)
    found = activation_sparsity.run(job, inputs(tmp_path, save(tmp_path / "model", bitnet()), [tokens]), CPU)
    assert set(found.metrics) == set(job.metrics()) and found.metrics["out"] == 0.5
    assert found.standard_errors["out"] == found.standard_errors["theory/qkv"] == 0.0
    assert 0 < found.standard_errors["qkv"] < 0.02
    scheme = quantization_of("a48_int4")
    for column, described in (("qkv", scheme.qkv), ("out", scheme.o), ("gate", scheme.gate_up)):
        assert found.metrics[f"theory/{column}"] == gaussian_zeros(described, 24)
    weights = 3 * (4 * 24 * 24 + 3 * 24 * 40)
    assert found.metrics["weights"] == weights
    assert found.metrics["activated"] == pytest.approx((1 - found.metrics["overall"]) * weights)
    rows = np.array(found.series["zeros"].rows)
    assert rows[:, 0].tolist() == [1, 2, 3]
    assert rows[:, 1:].mean(0)[0] == pytest.approx(found.metrics["qkv"]), "blocks have as many numbers each"


def test_a_record_of_distributions_has_every_tensor_and_its_densities_are_of_all_numbers(tmp_path, tokens):
    job = ActivationDistribution(of=Pretrained(), documents=6, bins=10, within=0.9, quantizers=TRIED)
    model = save(tmp_path / "model", bitnet("b158"))
    found = activation_distribution.run(job, inputs(tmp_path, model, [tokens]), CPU)
    assert set(found.metrics) == set(job.metrics())
    assert set(found.standard_errors) == set(job.metrics()) - {"tokens", "documents"}
    rows = found.series["histogram"].rows
    assert {(row[0], row[1]) for row in rows} == {(p, b) for p in PLACES for b in (0, 2)} | {(t, 0) for t in TRIED}
    for name, block in {(row[0], row[1]) for row in rows}:
        mine = [row for row in rows if row[:2] == [name, block]]
        area = sum(density * (right - left) for *_, left, right, _, density in mine)
        assert len(mine) == 10 and area <= 1 + 1e-4
        if name in PLACES and not block:
            assert area == pytest.approx(0.9, abs=0.02)


def test_a_quantizer_that_is_misspelt_or_called_as_an_input_is_refused():
    with pytest.raises(ValueError, match="did you mean 'int4_absmax'"):
        ActivationDistribution(of=Pretrained(), quantizers={"four": "int4_absmx"})
    with pytest.raises(ValueError, match="four: unknown quantizer of activations"):
        ActivationDistribution(of=Pretrained(), quantizers={"four": {"name": ["int4_absmean"]}})
    with pytest.raises(ValueError, match="'o' is the name of an input"):
        ActivationDistribution(of=Pretrained(), quantizers={"o": "int4_absmax"})


@pytest.mark.parametrize("place,width", [("o", 16), ("down", 40)])
def test_a_share_that_does_not_fit_the_width_is_refused_before_the_model_is_trained(place, width):
    model, share = small("pretrain", dataset="local:wikipedia_en")(), {"name": "int8_absmax", "keep": 0.333}
    with pytest.raises(ValueError, match=f"top: keep 0.333 of {width} entries is"):
        ActivationDistribution(of=model, documents=6, tried_on=place, quantizers={"top": share})
    with pytest.raises(SpecError, match="keep: 2 is no share"):
        input_quantizer({"name": "int8_absmax", "keep": 2}, "INT8")
