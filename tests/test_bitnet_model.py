"""The decoder with BitNet's options: what a block computes, its gradients, sizes, tied embeddings, adapters."""

import math

import pytest
import torch
import torch.nn.functional as F
from support_bitnet import QUANTIZED, bitnet, bitnet_config
from support_model import HEADS, VOCAB, WIDTH, close, count, padded, tokens
from support_quantizers import ORACLES
from transformers import AutoModelForCausalLM

from paperlm.errors import SpecError
from paperlm.models.llama import PaperLlamaConfig, PaperLlamaForCausalLM, PaperLlamaForSequenceClassification
from paperlm.models.quantized import QuantizedInput, QuantizedLinear
from paperlm.models.sizes import SIZES, block_weights, parameter_count
from paperlm.quantizers.presets import PRESETS
from paperlm.quantizers.scheme import quantization_of
from paperlm.quantizers.topk import largest_entries


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# --- sizes ---

PRINTED = {  # of BitNet a4.8: the printed size in millions, without embeddings
    "bitnet_700M": 679.5, "bitnet_1.3B": 1207.8, "bitnet_3B": 3221.5, "bitnet_7B": 6476.0, "P0": 9.5, "P1": 37.9,
    "P2": 84.9,
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_sizes_have_the_parameters_of_the_paper_and_all_of_them_are_counted(name):
    size = SIZES[name]
    shape = (size.hidden_size, size.intermediate_size, size.n_layers)
    assert block_weights(*shape) / 1e6 == pytest.approx(PRINTED[name], abs=0.06)
    with torch.device("meta"):
        model = PaperLlamaForCausalLM(
            PaperLlamaConfig(
                hidden_size=size.hidden_size, intermediate_size=size.intermediate_size, tie_word_embeddings=True,
                num_hidden_layers=size.n_layers, num_attention_heads=size.n_heads, **PRESETS["a48_int4"],
            )
        )  # fmt: skip
    assert count(model) == parameter_count(*shape, sub_norm=True, tied=True)
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(linears) == 7 * size.n_layers
    assert sum(module.weight.numel() for module in linears) == block_weights(*shape)


# --- the block a second time, in float64, on the oracles of test_quantizers ---


def rms(u, gain):
    return gain * u / (u.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def by_numpy(name, x, **options):
    oracle = {(n, *o.values()): formula for n, o, formula in ORACLES}[(name, *options.values())]
    return torch.from_numpy(oracle(x.detach().numpy()))


def entered(place, scheme, x):
    """What the projections at a place read."""
    described = scheme[place]
    if described is None:
        return x
    options = {key: value for key, value in described.items() if key not in ("name", "keep")}
    if options.get("multiple") == 1:
        options = {}
    if "keep" in described:
        order = x.abs().argsort(dim=-1, descending=True, stable=True)[..., : round(described["keep"] * x.shape[-1])]
        x = x * torch.zeros_like(x).scatter(-1, order, 1.0)
    return by_numpy(described["name"], x, **options)


def block_by_hand(x, w, preset):
    """One block on x (B, S, D); w: its weights by name."""
    scheme, silu = preset["quantization"], preset["hidden_act"] == "silu"
    project = lambda h, name: h @ by_numpy("ternary_absmean", w[name + ".weight"]).T  # noqa: E731
    h = entered("qkv", scheme, rms(x, w["attention_residual.pre_norm.weight"]))
    q, k, v = (project(h, f"attention.{n}_proj").unflatten(-1, (HEADS, -1)) for n in "qkv")
    half, seq = WIDTH // HEADS // 2, x.shape[1]
    angle = torch.outer(torch.arange(seq), 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half))
    turn = torch.complex(angle.cos().float().double(), angle.sin().float().double())[:, None]
    q, k = (torch.view_as_real(torch.complex(z[..., :half], z[..., half:]) * turn).transpose(-1, -2).flatten(-2)
            for z in (q, k))  # fmt: skip
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(2 * half)
    scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -math.inf)
    a = rms(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2), w["attention.sub_norm.weight"])
    x = x + project(entered("o", scheme, a), "attention.o_proj")
    h = entered("gate_up", scheme, rms(x, w["mlp_residual.pre_norm.weight"]))
    g, u = project(h, "mlp.gate_proj"), project(h, "mlp.up_proj")
    z = rms(u * (g / (1 + (-g).exp()) if silu else g.clamp(min=0) ** 2), w["mlp.sub_norm.weight"])
    return x + project(entered("down", scheme, z), "mlp.down_proj")


@pytest.mark.parametrize("preset", QUANTIZED)
def test_logits_are_those_of_the_equations(preset):
    model, ids = bitnet(preset, dtype=torch.float64, tie_word_embeddings=True), tokens()
    w = model.state_dict()
    x = w["model.embed_tokens.weight"][ids]
    for index in range(2):
        prefix = f"model.layers.{index}."
        block = {k.removeprefix(prefix): v for k, v in w.items() if k.startswith(prefix)}
        x = block_by_hand(x, block, PRESETS[preset])
    expected = rms(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T
    close(model(ids).logits, expected, 1e-9)
    close(model.lm_head(model.model.hidden(ids)), expected, 1e-9)


def test_an_option_that_is_left_out_changes_the_model():
    """The equations above see every option: without SubLN, TopK or the square the logits are others."""
    model, ids = bitnet(dtype=torch.float64), tokens()
    expected = model(ids).logits
    for change in (
        {"sub_norm": False},
        {"hidden_act": "silu"},
        {"quantization": "a48_no_topk"},
        {"quantization": None},
    ):
        other = bitnet(dtype=torch.float64, **change)
        other.load_state_dict(model.state_dict(), strict=False)
        assert (other(ids).logits - expected).abs().max() > 1e-3, change


def test_a_preset_by_name_and_written_out_is_the_same_model():
    ids = tokens()
    named, written = (bitnet("full_int4", quantization=q) for q in ("full_int4", PRESETS["full_int4"]["quantization"]))
    assert torch.equal(named(ids).logits, written(ids).logits)


# --- gradients ---


def linear(quantizer="ternary_absmean", width=16, out=8):
    return QuantizedLinear(width, out, quantization_of({"weight": quantizer}).weight)


@pytest.mark.parametrize(
    "described", [{"name": "int4_absmean"}, {"name": "int8_absmax", "keep": 0.5}, {"name": "fp4_e2m1"}]
)
def test_gradients_are_those_of_the_plain_product_at_the_quantized_operands_unmasked(described):
    """Clipped entries and those that TopK drops get the gradient of entries that stay."""
    projection, x = linear(), (torch.randn(3, 5, 16) * torch.rand(16) * 4).requires_grad_()
    entering = QuantizedInput(quantization_of({"o": described}).o, 16, "o")
    weights = torch.randn(3, 5, 8)
    x_q, codes, step = entering(x)
    (projection(x_q, codes, step) * weights).sum().backward()
    w_q, _ = projection.quantizer.values(projection.weight.detach())
    plain_x, plain_w = x_q.detach().requires_grad_(), w_q.requires_grad_()
    (F.linear(plain_x, plain_w) * weights).sum().backward()
    torch.testing.assert_close(x.grad, plain_x.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(projection.weight.grad, plain_w.grad, rtol=1e-5, atol=1e-6)
    assert not (x_q.detach() == 0).logical_and(x.grad == 0).any()
    assert (x_q.detach() == 0).any() and (w_q == 0).any()


def test_every_parameter_of_a_quantized_model_learns():
    model = bitnet("a48_int4", tie_word_embeddings=True).train()
    model.summed_loss(tokens(), tokens()).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


def test_the_scale_of_a_weight_follows_it_at_every_step_of_training():
    projection, x = linear(), torch.randn(4, 16)
    before = projection(x)
    with torch.no_grad():
        projection.weight.mul_(3)
    torch.testing.assert_close(projection(x), 3 * before)


# --- exactness ---


def test_float32_products_are_those_of_whole_numbers_rounded_where_they_are_scaled():
    projection, x = linear(width=2048, out=64), torch.randn(7, 2048)
    entering = QuantizedInput(quantization_of({"down": "int8_absmax"}).down, 2048, "down")
    x_q, codes, step = entering(x)
    t, alpha = projection.quantizer.quantize(projection.weight)
    whole = codes.long() @ t.long().T
    assert torch.equal(projection(x_q, codes, step), whole.float() * step * alpha)


def test_float16_products_are_scaled_before_they_leave_its_range():
    layer = QuantizedLinear(1024, 8, quantization_of("b158").weight)
    with torch.no_grad():
        layer.weight.fill_(0.02)
    quantize = QuantizedInput(quantization_of("b158").qkv, 1024, "qkv")
    x = torch.ones(3, 1024)
    with torch.autocast("cpu", torch.float16):
        found = layer(*quantize(x))
    assert found.dtype == torch.float16
    for y in (found, layer.half()(*quantize(x.half()))):
        assert torch.allclose(y.float(), torch.full((3, 8), 20.48), rtol=2e-3)


@pytest.mark.parametrize("preset", ["b158", "a48_int4"])
def test_a_models_loss_does_not_depend_on_how_many_sequences_are_taken_at_once(preset):
    model, ids = bitnet(preset), tokens(6, 20)
    together = model.token_losses(ids, ids)
    apart = torch.cat([model.token_losses(row[None], row[None]) for row in ids])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preset", ["a48_int4", "full_fp4"])
def test_bfloat16_products_take_their_codes_from_float32(preset):
    """Under autocast the numbers of the product are exact in bfloat16; dequantized factors would not be."""
    projection, x = linear(width=256, out=32), torch.randn(9, 256)
    entering = QuantizedInput(quantization_of(PRESETS[preset]["quantization"]).o, 256, "o")
    x_q, codes, step = entering(x)
    expected = projection(x_q, codes, step)
    with torch.autocast("cpu", torch.bfloat16):
        found = projection(x_q, codes, step)
        found.float().sum().backward()
    assert found.dtype == torch.bfloat16 and projection.weight.grad.dtype == torch.float32
    # rounded to 8 bits twice: the sum of the product, then what it is scaled to
    torch.testing.assert_close(found.float(), expected, rtol=2 * 2**-8, atol=0)


# --- as a transformers model ---


def test_quantized_inputs_are_shared_and_projections_keep_their_names():
    model = bitnet()
    entering = [name for name, module in model.named_modules() if isinstance(module, QuantizedInput)]
    places = ("attention.qkv_input", "attention.o_input", "mlp.gate_up_input", "mlp.down_input")
    assert entering == [f"model.layers.{layer}.{place}" for layer in range(2) for place in places]
    names = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    calls = []
    for module in model.modules():
        if isinstance(module, QuantizedInput):
            module.register_forward_hook(lambda m, args, out: calls.append((args[0], *out)))
    model(tokens())
    assert len(calls) == 8
    for x, x_q, codes, step in calls:
        assert torch.equal(codes, codes.round()) and codes.shape == x.shape and step.shape == (*x.shape[:-1], 1)
        torch.testing.assert_close(x_q, codes * step)


def test_exactly_half_of_what_enters_the_output_projection_stays():
    model, kept = bitnet(), []
    for layer in model.model.layers:
        layer.attention.o_input.register_forward_hook(
            lambda m, args, out: kept.append((out[1] != 0) <= largest_entries(args[0], WIDTH // 2))
        )
    model(tokens())
    assert all(one.all() for one in kept) and len(kept) == 2


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_real_token(side):
    model, (ids, mask, places) = bitnet(dtype=torch.float64), padded(side)
    logits = model(ids, attention_mask=mask).logits
    for row, place in enumerate(places):
        close(logits[row, place], model(ids[row, place][None]).logits[0])


def test_generation_with_a_cache_writes_what_whole_sequences_predict():
    model, written = bitnet(), tokens(2, 5)
    found = model.generate(written, max_new_tokens=12, do_sample=False, eos_token_id=None)
    for _ in range(12):
        written = torch.cat((written, model(written, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(found, written)


def test_tied_embeddings_are_one_matrix_before_and_after_saving(tmp_path):
    model = bitnet(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert count(model) == count(bitnet()) - VOCAB * WIDTH
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


def test_untied_models_keep_two_matrices(tmp_path):
    model = bitnet()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


def test_a_classifier_has_the_same_options():
    model = PaperLlamaForSequenceClassification(bitnet_config()).eval()
    assert model(tokens()).logits.shape == (3, 1)
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 14


def test_adapters_of_peft_stand_beside_quantized_projections():
    peft = pytest.importorskip("peft")
    model, ids = bitnet(), tokens()
    before = model(ids).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"]))
    torch.testing.assert_close(adapted(ids).logits, before)
    adapted(ids, labels=ids).loss.backward()
    moved = {name for name, p in adapted.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert moved and all("lora_B" in name for name in moved) and len(moved) == 4


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quantization": {"qkv": "int5"}}, "quantization.qkv: unknown quantizer of activations 'int5'"),
        ({"quantization": {"o": {"name": "int8_absmax", "keep": 0.3}}}, "keep 0.3 of 24 entries is 7.20"),
        ({"quantization": {"down": {"name": "int8_absmax", "keep": 0.5}}}, "keep 0.5 of 21 entries is 10.50"),
        ({"hidden_act": "relu"}, "hidden_act: 'relu' is not implemented"),
        ({"tie_word_embeddings": True, "zero_last_embedding_row": True}, "tie_word_embeddings"),
    ],
)
def test_a_configuration_that_cannot_be_built_is_refused_by_place(options, says):
    with pytest.raises(SpecError) as error:
        PaperLlamaForCausalLM(bitnet_config(**options))
    assert says in str(error.value)


def test_a_part_of_a_matrix_is_refused_since_its_mean_is_another():
    projection = linear()
    projection.weight = torch.nn.Parameter(projection.weight[:4])
    with pytest.raises(SpecError, match=r"8 x 16 of which \(4, 16\) is here.*tensor parallelism"):
        projection(torch.randn(2, 16))
    sharded = linear()
    sharded.weight.full_tensor = lambda: sharded.weight  # as of a DTensor, whose shape is the whole one
    with pytest.raises(SpecError, match="tensor parallelism"):
        sharded(torch.randn(2, 16))


ARMS = """
b158             i8    i8    i8    i8    silu
a8_trunk         i8    i8    i8    i8    relu2
a48_int4         i4    i8/2  i4    i8    relu2
a48_fp4          e2m1  e2m1  e2m1  i8    relu2
a48_no_topk      i4    i8    i4    i8    relu2
full_int4        i4    i4    i4    i4*2  relu2
full_fp4         e2m1  e2m1  e2m1  e2m1  relu2
f5_int8_relu2    i8    i8    i8    i8    relu2
f5_int8_silu     i8    i8    i8    i8    silu
f5_fp4_relu2     i8    i8    i8    e2m1  relu2
f5_int4_relu2    i8    i8    i8    i4*2  relu2
f6_e2m1          e2m1  i8/2  e2m1  i8    relu2
f6_e1m2          e1m2  i8/2  e1m2  i8    relu2
f6_int4_absmax   max   i8/2  max   i8    relu2
f6_int4_absmean  i4    i8/2  i4    i8    relu2
"""
SHORT = {
    "i8": {"name": "int8_absmax"}, "i8/2": {"name": "int8_absmax", "keep": 0.5}, "max": {"name": "int4_absmax"},
    "i4": {"name": "int4_absmean", "multiple": 1}, "i4*2": {"name": "int4_absmean", "multiple": 2},
    "e2m1": {"name": "fp4_e2m1"}, "e1m2": {"name": "fp4_e1m2"},
}  # fmt: skip


def test_every_arm_of_the_paper_has_its_quantizer_in_front_of_each_projection():
    """Queries, keys and values; output; gate and up; down. Section 3, Figures 4 to 6 and Table 4."""
    arms = {name: places for name, *places in map(str.split, ARMS.strip().splitlines())}
    assert set(arms) | {"llama"} == set(PRESETS)
    for name, (*places, act) in arms.items():
        wanted = dict(zip(("qkv", "o", "gate_up", "down"), map(SHORT.get, places), strict=True))
        assert PRESETS[name]["quantization"] == {"weight": {"name": "ternary_absmean"}, **wanted}, name
        assert (PRESETS[name]["hidden_act"], PRESETS[name]["sub_norm"]) == (act, True), name
    assert PRESETS["llama"] == {"quantization": None, "sub_norm": False, "hidden_act": "silu"}
