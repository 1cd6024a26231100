"""Weights in bitsandbytes' types, beside which NeuZip's stand: values and products by their published definitions."""

from __future__ import annotations

import math

import pytest
import torch
from paperlm_kernels.stored import Int8Store, Nf4Store, convert, stored_weights, weight_bytes
from paperlm_kernels.stored.functions import stored_linear
from paperlm_kernels.stored.weight import StoredWeight
from support_stored import batch, build

from paperlm.plan.project import Project

BF16 = torch.bfloat16
# QLoRA, arXiv 2305.14314, appendix E
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# bitsandbytes' floats of two bits of exponent and one of mantissa, as shares of the largest
FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 2, 3, 4, 6, 8, 12))


def weights(rows: int = 96, columns: int = 128, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02).to(BF16)


@pytest.mark.parametrize(("kind", "levels"), [("nf4", NF4), ("fp4", FP4)])
def test_four_bits_are_the_nearest_published_level_times_the_largest_of_64_weights(kind, levels):
    w = weights()
    blocks = w.double().reshape(-1, 64)
    largest, known = blocks.abs().amax(dim=1, keepdim=True), torch.tensor(levels, dtype=torch.float64)
    nearest = known[(blocks[..., None] / largest[..., None] - known).abs().argmin(dim=-1)] * largest
    found = Nf4Store(w, quant_type=kind).read().double().reshape(-1, 64)
    # of a weight halfway between two levels either may be taken
    step = (blocks - nearest).abs() + 2**-8 * largest
    assert ((found - blocks).abs() <= step).all()
    # each is a level, as bfloat16 has it
    assert ((found[..., None] / largest[..., None] - known).abs().amin(dim=-1) < 2**-8).all()
    assert (found != 0).double().mean() > 0.8


def test_scales_that_are_quantized_as_well_move_values_little_and_take_an_eighth_of_a_bit():
    w = weights(512, 512)
    plain, double = Nf4Store(w), Nf4Store(w, double=True)
    assert ((plain.read().float() - double.read().float()).norm() / w.float().norm()).item() < 0.02
    count = w.numel()
    levels = 4 * 16
    assert plain.nbytes == count // 2 + 4 * count // 64 + levels
    # of each a byte, and of 256 of them a scale, with the 256 values of a byte and the mean
    assert double.nbytes == count // 2 + count // 64 + 4 * count // 64 // 256 + levels + 4 * 256 + 4


def test_int8_has_a_scale_for_each_row_and_values_within_half_a_step():
    w = weights(80, 200)
    w[3] *= 50
    store = Int8Store(w)
    step = w.double().abs().amax(dim=1, keepdim=True) / 127
    assert store.codes.dtype == torch.int8 and store.scales.shape == (80,)
    half = 0.5 * step + 2**-8 * w.double().abs()  # and a bfloat16's rounding
    assert ((store.read().double() - w.double()).abs() <= half).all()
    assert store.nbytes == w.numel() + 4 * 80


def exact_int8(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """LLM.int8(), arXiv 2208.07339, equation 8, in float64: rows of x and of w in whole numbers of their largest / 127,
    but for columns of x with a value of 6 and more."""
    x, w = x.double(), w.double()
    apart = (x.abs() >= 6).any(dim=0)
    inner = x.masked_fill(apart, 0)
    cx, cw = (a.abs().amax(dim=1, keepdim=True) / 127 for a in (inner, w))
    qx, qw = (inner / cx).round(), (w / cw).round()
    return (qx @ qw.t()) * cx * cw.t() + x[:, apart] @ (qw * cw)[:, apart].t()


@pytest.mark.parametrize("outliers", [0, 3])
@pytest.mark.parametrize("lead", [(5,), (2, 3)])
def test_products_in_int8_are_those_of_the_paper_with_outliers_apart(outliers, lead):
    w = weights(48, 64)
    x = torch.randn(math.prod(lead), 64, generator=torch.Generator().manual_seed(1)).clamp(-5, 5)
    x[0, 7 : 7 + outliers] = 40.0
    x = x.to(BF16)
    found = stored_linear(x.view(*lead, 64), StoredWeight(Int8Store(w))).detach().double().view(-1, 48)
    wanted, exact = exact_int8(x, w), x.double() @ w.double().t()
    scale = exact.norm()
    assert (found - wanted).norm() / scale < 4e-3  # results are bfloat16
    # not the products of rounded weights alone: those are closer
    assert (exact_int8(x, w) - exact).norm() / scale > 4e-3


def test_what_multiplies_by_itself_adds_the_bias_and_refuses_gpt2s_transposed_matrices():
    w, bias = weights(48, 64), torch.arange(48).to(BF16)
    x = torch.randn(3, 64, dtype=BF16)
    with_bias, without = (stored_linear(x, StoredWeight(Int8Store(w)), b) for b in (bias, None))
    torch.testing.assert_close(with_bias, without + bias, atol=0.26, rtol=0)  # half a step of a bfloat16 near 47
    with pytest.raises(ValueError, match=r"Int8Store multiplies by matrices \(out, in\); the model has a Conv1D"):
        convert(build("gpt2"), Int8Store)
    with pytest.raises(ValueError, match="no rows; INT8 is of matrices"):
        Int8Store(torch.zeros(8, dtype=BF16))


@pytest.mark.parametrize("factory", [Int8Store, Nf4Store])
def test_inputs_of_any_number_of_axes_and_autocast_are_taken_as_a_plain_layer_takes_them(factory):
    weight, bias = StoredWeight(factory(weights(48, 64))), torch.zeros(48, dtype=BF16)
    x = torch.randn(2, 3, 2, 64)
    shapes = [stored_linear(one.to(BF16), weight).shape for one in (x, x[0], x[0, 0], x[0, 0, 0])]
    assert shapes == [(2, 3, 2, 48), (3, 2, 48), (2, 48), (48,)]
    with torch.autocast("cpu", dtype=BF16):
        cast = stored_linear(x, weight, bias)
    assert cast.dtype == BF16 and torch.equal(cast, stored_linear(x.to(BF16), weight, bias))


@pytest.mark.parametrize("name", ["llama", "t5", "gpt_neo"])
@pytest.mark.parametrize("factory", [Int8Store, Nf4Store])
def test_a_model_in_these_types_stays_close_to_the_plain_one_and_cannot_be_trained(name, factory):
    given = batch(0)
    plain, model = build(name).eval(), build(name).eval()
    convert(model, factory)
    with torch.no_grad():
        logits = [one(**given).logits.float() for one in (plain, model)]
    assert 0 < (logits[0] - logits[1]).norm() / logits[0].norm() < 0.5
    assert not any(weight.handle.requires_grad for weight in stored_weights(model).values())
    assert weight_bytes(model).total < weight_bytes(plain).total


def test_layers_that_are_left_out_by_name_stay_as_they_are():
    model = build("t5")
    made = convert(model, Int8Store, leave=[".wo."])
    assert made.names and not any(".wo." in name for name in made.names)
    assert all(type(module) is torch.nn.Linear for name, module in model.named_modules() if name.endswith(".wo"))


@pytest.mark.parametrize("scale", ["tiny", "gpu", "paper"])
def test_every_number_of_a_quantizers_row_is_of_weights_in_its_type(scale):
    stores = {"INT8": "int8", "FP4": "fp4", "NF4": "nf4", "FP4^2": "fp4_double", "NF4^2": "nf4_double"}
    project = Project({"scale": scale})
    for name in ("neuzip_table3a", "neuzip_table3a_full", "neuzip_table3b", "neuzip_table3b_full"):
        cells = [cell for cell in project.cells(name) if cell.row.startswith("Quant ")]
        found = {(cell.row, job.store) for cell in cells for job in cell.jobs}
        wanted = {(cell.row, stores[cell.row.removeprefix("Quant ").partition(",")[0]]) for cell in cells}
        assert found == wanted and len({store for _, store in found}) == 5
