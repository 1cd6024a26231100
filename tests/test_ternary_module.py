"""A layer with packed weights in the place of one with latent weights, kept and loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from paperlm_kernels import TernaryLinear
from paperlm_kernels.rmsnorm_quantize import rmsnorm_quantize
from paperlm_kernels.ternary_linear import PackedTernary, fused_alpha, pack_ternary, ternary_linear
from safetensors.torch import load_file, save_file
from support_ternary import everywhere, normal
from torch import nn


def latent(rows, width, seed=0, bias=False):
    linear = nn.Linear(width, rows, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(normal(rows, width, seed=seed) / width**0.5)
    return linear


def exact(x, linear, keep=None):
    """The layer as its training sees it, in float64: ternary weights, INT8 input a token at a time."""
    w, x = linear.weight.detach().double(), x.double()
    if keep is not None:
        least = x.abs().topk(round(keep * x.shape[-1]), -1).values[..., -1:]
        x = torch.where(x.abs() >= least, x, 0.0)
    alpha, top = w.abs().mean(), x.abs().amax(-1, keepdim=True)
    y = (x * 127 / top).round() * top / 127 @ ((w / alpha).round().clamp(-1, 1) * alpha).T
    return y if linear.bias is None else y + linear.bias.detach().double()


@everywhere
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("keep", [None, 0.5])
def test_it_computes_what_the_latent_layer_computes_with_quantizers(spot, bias, keep):
    linear, x = latent(70, 300, bias=bias), normal(2, 5, 300, seed=1)
    layer = TernaryLinear.from_linear(linear, keep=keep, backend=spot.backend).to(spot.device)
    y, right = layer(x.to(spot.device)).cpu(), exact(x, linear, keep)
    assert y.dtype == torch.float32 and (y.double() - right).norm() < 1e-5 * right.norm()


def test_layers_that_share_an_input_become_one_with_a_scale_each():
    q, k, v = latent(64, 96), latent(32, 96, seed=1), latent(32, 96, seed=2)
    with torch.no_grad():
        k.weight.mul_(9.0)
    x = normal(7, 96, seed=3)
    together = TernaryLinear.from_linear(q, k, v)(x)
    assert torch.equal(together, torch.cat([TernaryLinear.from_linear(one)(x) for one in (q, k, v)], -1))
    with pytest.raises(ValueError, match="some have none"):
        TernaryLinear.from_linear(q, latent(8, 96, bias=True))


def test_in_16_bits_a_sum_with_a_bias_is_rounded_once():
    linear, x = latent(8, 96, bias=True).bfloat16(), normal(64, 96, seed=1).bfloat16()
    layer, q = TernaryLinear.from_linear(linear), rmsnorm_quantize(x, None, "int8_absmax")
    packed = PackedTernary(layer.weight, 8, 96)
    product = ternary_linear(q.codes, q.scale, q.rowsum, packed, layer.alpha, out_dtype=torch.float32)
    once, twice = (product + linear.bias).bfloat16(), product.bfloat16() + linear.bias
    assert torch.equal(layer(x), once) and not torch.equal(once, twice)


class NormedLinear(nn.Linear):
    """A BitLinear as the authors' tips have it: its norm is inside."""

    def __init__(self, width, rows):
        super().__init__(width, rows, bias=False)
        self.norm = nn.RMSNorm(width)

    def forward(self, x):
        return super().forward(self.norm(x))


def test_a_layer_with_a_norm_of_its_own_is_refused_for_it_would_be_dropped_unseen():
    layer = NormedLinear(96, 64)
    with pytest.raises(ValueError, match=r"NormedLinear has norm.weight beside weight and bias"):
        TernaryLinear.from_linear(layer)
    layer.norm = nn.RMSNorm(96, elementwise_affine=False)
    with pytest.raises(ValueError, match="NormedLinear has norm beside"):
        TernaryLinear.from_linear(latent(8, 96), layer)
    frozen = latent(8, 96)
    frozen.register_buffer("norm_weight", torch.ones(96))
    with pytest.raises(ValueError, match="Linear has norm_weight beside"):
        TernaryLinear.from_linear(frozen)


@pytest.mark.parametrize("part", [lambda w: w[:16], lambda w: w[:, :48]], ids=["rows", "columns"])
def test_a_shard_of_a_weight_is_refused_for_its_mean_is_not_the_matrixs(part):
    layer = latent(64, 96)
    layer.weight = torch.nn.Parameter(part(layer.weight.detach()).clone())
    with pytest.raises(ValueError, match=r"for 64 x 96: the scale is mean\|W\| of the whole matrix"):
        TernaryLinear.from_linear(layer)


def test_weights_in_anothers_packed_layout_are_to_be_unpacked_first():
    layer = SimpleNamespace(weight=torch.zeros(16, 96, dtype=torch.uint8), out_features=64, in_features=96)
    with pytest.raises(ValueError, match="packed already, in a layout of its own: give the latent ones"):
        TernaryLinear.from_linear(layer)
    with pytest.raises(ValueError, match=r"Embedding is no nn\.Linear"):
        TernaryLinear.from_linear(nn.Embedding(64, 96))


@pytest.mark.parametrize("bias", [False, True])
def test_transformers_layer_of_codes_and_a_scale_is_refused_with_the_call_that_takes_it(bias):
    integrations = pytest.importorskip("transformers.integrations.bitnet")
    layer, x = integrations.AutoBitLinear(96, 64, bias=bias), normal(7, 96, seed=1)
    with torch.no_grad():
        layer.weight.copy_(latent(64, 96).weight.sign())
        layer.weight_scale.fill_(0.3)
    with pytest.raises(ValueError, match=r"weight_scale.*already.*Give TernaryLinear\(pack_ternary\(layer.weight.data"):
        TernaryLinear.from_linear(layer)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        right = layer(x)
        times_bias = layer.bias * layer.weight_scale if bias else None
    ours = TernaryLinear(pack_ternary(layer.weight.data), layer.weight_scale, times_bias)
    assert (ours(x) - right).norm() < 1e-6 * right.norm()


def test_it_is_kept_in_safetensors_in_two_bits_a_weight_and_loaded_as_it_was(tmp_path):
    layer = TernaryLinear.from_linear(latent(256, 1024))
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    assert layer.weight.nbytes == 256 * 1024 // 4
    other = TernaryLinear.from_linear(latent(256, 1024, seed=5))
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    x = normal(3, 1024)
    assert torch.equal(other(x), layer(x))


def test_weights_of_another_shape_layout_or_without_scales_are_refused_when_they_are_loaded():
    layer = TernaryLinear.from_linear(latent(100, 200))
    state = layer.state_dict()
    for change, error, words in (
        ({"layout": state["layout"] + torch.tensor([1, 0, 0, 0, 0, 0], dtype=torch.int32)}, ValueError, "version 2"),
        (
            {"layout": state["layout"] - torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.int32)},
            ValueError,
            "100 x 199 for a layer of 100 x 200",
        ),
        ({"weight": torch.full_like(state["weight"], 0xFF)}, ValueError, "the code 3"),
        ({"weight": torch.zeros_like(state["weight"])}, ValueError, "padding beyond 100 x 200"),
        ({"alpha": torch.zeros_like(state["alpha"])}, ValueError, "not above 0"),
        ({"weight": state["weight"][:, :-1]}, ValueError, "shape|bytes"),
    ):
        other, x = TernaryLinear.from_linear(latent(100, 200)), normal(3, 200)
        before = other(x)
        with pytest.raises(error, match=words):
            other.load_state_dict({**state, **change})
        assert torch.equal(other(x), before), "a refused load changes nothing"
    del state["alpha"]
    with pytest.raises(ValueError, match=r"without alpha: .* pack the latent weights anew"):
        TernaryLinear.from_linear(latent(100, 200)).load_state_dict(state)
    model = nn.Sequential(nn.Linear(200, 200), TernaryLinear.from_linear(latent(100, 200)))
    before = model[1].weight.clone()
    model.load_state_dict(nn.Sequential(nn.Linear(200, 200)).state_dict(), strict=False)
    assert torch.equal(model[1].weight, before), "what is not in a state is left as it is"
    del state["layout"], state["weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        model[1].load_state_dict(state)


def test_scales_stay_in_float32_in_a_model_of_16_bits():
    layer = TernaryLinear.from_linear(latent(64, 96))
    before = layer.alpha.clone()
    model = nn.Sequential(layer, nn.Linear(64, 8)).bfloat16()
    assert model[0].alpha.dtype == torch.float32 and torch.equal(model[0].alpha, before)
    assert model(normal(3, 96).bfloat16()).dtype == torch.bfloat16


def test_a_quantizer_that_there_is_not_is_refused_when_the_layer_is_made():
    with pytest.raises(ValueError, match="did you mean 'int8_absmax'"):
        TernaryLinear.from_linear(latent(4, 8), activation="int8_absmx")
    with pytest.raises(ValueError, match="no whole number of them"):
        TernaryLinear.from_linear(latent(4, 9), keep=0.5)


def test_a_layer_made_without_memory_is_filled_by_loading():
    layer, x = TernaryLinear.from_linear(latent(32, 64)), normal(3, 64, seed=1)
    empty = TernaryLinear.from_linear(latent(32, 64, seed=5)).to("meta").to_empty(device="cpu")
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(x), layer(x)) and empty.alpha.dtype == torch.float32
    assert layer.half().alpha.dtype == torch.float32


@pytest.mark.parametrize(
    "scale", [torch.tensor([4.0]), torch.tensor([4.0], dtype=torch.bfloat16), torch.tensor(4.0), 4.0],
)  # fmt: skip
def test_codes_of_transformers_bitlinear_become_a_layer_as_the_error_says(scale):
    """Its `weight_scale` has one number, in the model's dtype: y = x t^T / weight_scale."""
    codes, x = torch.tensor([[1, 0, -1], [-1, 1, 1]], dtype=torch.int8), torch.tensor([[127.0, 2.0, -127.0]])
    layer = TernaryLinear(pack_ternary(codes), 1 / scale)
    assert layer.alpha.shape == (2,) and layer.alpha.dtype == torch.float32
    assert torch.equal(layer(x), x @ codes.float().T / 4)
    again = TernaryLinear(pack_ternary(torch.zeros_like(codes)), 1.0)
    again.load_state_dict(layer.state_dict() | {"alpha": torch.tensor(0.25)})
    assert torch.equal(again(x), layer(x))


@pytest.mark.parametrize(
    "alpha,bias,words",
    [
        (None, None, "no alpha"), (torch.ones(2), None, r"alpha of shape \(2,\) for 3 rows"),
        (torch.ones(3, 1), None, r"alpha of shape \(3, 1\) for 3 rows"),
        (torch.tensor([1.0, 0.0, 1.0]), None, "not above 0"), (-1.0, None, "not above 0"),
        (torch.tensor([1.0, 1.0, torch.nan]), None, "not above 0"),
        (1.0, torch.ones(2), r"a bias of shape \(2,\)"), (1.0, torch.ones(3).long(), "torch.int64 for 3 rows"),
    ],
)  # fmt: skip
def test_scales_and_a_bias_that_do_not_fit_are_refused_when_the_layer_is_made(alpha, bias, words):
    with pytest.raises(ValueError, match=words):
        TernaryLinear(pack_ternary(torch.zeros(3, 4)), alpha, bias)


def test_no_layer_a_weight_that_is_no_number_and_a_layout_of_two_numbers_are_refused():
    with pytest.raises(ValueError, match="no layer: give"):
        TernaryLinear.from_linear()
    linear = latent(8, 16)
    layer = TernaryLinear.from_linear(linear)
    with pytest.raises(ValueError, match=r"layout of shape \(2,\); it is version, rows, columns, and the quantizer"):
        layer.load_state_dict(layer.state_dict() | {"layout": torch.tensor([1, 8])})
    with torch.no_grad():
        linear.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="a value that is not finite"):
        TernaryLinear.from_linear(linear)
    with torch.no_grad():
        linear.weight[0, 0] = -torch.inf
    with pytest.raises(ValueError, match="a value that is not finite"):
        TernaryLinear.from_linear(linear)
    with pytest.raises(ValueError, match="device meta, which holds no values"):
        TernaryLinear.from_linear(linear.to("meta"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"activation": "int4_absmean"}, "int4_absmean, multiple 1, 200 entries kept"),
        ({"activation": "int4_absmean", "multiple": 2}, "int4_absmean, multiple 2, 200 entries kept"),
        ({"keep": 0.5}, "int8_absmax, multiple 1, 100 entries kept"),
    ],
)
def test_a_layer_of_another_quantizer_refuses_the_weights_which_would_give_other_numbers(options, said):
    made, other = (TernaryLinear.from_linear(latent(100, 200), **given) for given in (options, {}))
    with pytest.raises(ValueError, match=f"trained with {said}, for a layer with int8_absmax, multiple 1, 200 entries"):
        other.load_state_dict(made.state_dict())
    again = TernaryLinear.from_linear(latent(100, 200, seed=3), **options)
    again.load_state_dict(made.state_dict())
    x = normal(3, 200)
    assert torch.equal(again(x), made(x)) and not torch.equal(other(x), made(x))


def test_a_product_without_steps_and_one_in_whole_numbers_are_refused():
    packed, codes = pack_ternary(torch.zeros(3, 4)), torch.zeros(2, 4, dtype=torch.int8)
    with pytest.raises(ValueError, match="no act_scale: codes have a step"):
        ternary_linear(codes, None, None, packed, torch.ones(3))
    with pytest.raises(TypeError, match=r"out_dtype=torch\.int8"):
        ternary_linear(codes, torch.ones(2), None, packed, torch.ones(3), out_dtype=torch.int8)


def test_metadata_that_are_no_numbers_and_a_matrix_of_nothing_are_refused():
    packed = pack_ternary(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"layout_version 'x'.*these are whole numbers"):
        PackedTernary.load(packed.data, packed.metadata | {"layout_version": "x"})
    with pytest.raises(ValueError, match=r"codes of shape \(0, 4\)"):
        pack_ternary(torch.zeros(0, 4))
    with pytest.raises(ValueError, match=r"a scale of shape \(2,\)"):
        fused_alpha([torch.ones(2)], [128])
