"""The decoder as a transformers model: sizes, another implementation, saving, states, losses, pruning."""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from support_model import (
    FFN,
    LAYERS,
    LEAK,
    METHODS,
    MIX,
    SHAPE,
    SHARED,
    VOCAB,
    WIDTH,
    close,
    config_of,
    count,
    each,
    model_of,
    padded,
    randomize,
    tokens,
    without_block,
)
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from paperlm.errors import SpecError
from paperlm.models.layers import FeatureGroupNorm, GatedMLP, RMSNorm
from paperlm.models.llama import PaperLlamaConfig, PaperLlamaForCausalLM, PaperLlamaForSequenceClassification
from paperlm.models.sizes import SIZES, flops_per_token, parameter_count
from paperlm.norms import build_method


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# --- sizes ---

COUNTS = {  # size: all parameters, those of blocks and final norm; L * d, what a norm adds if every block has one
    "71M": (70_578_688, 37_810_688, 6_144),
    "130M": (134_105_856, 84_953_856, 9_216),
    "250M": (247_370_496, 198_218_496, 18_432),
    "350M": (367_969_280, 302_433_280, 24_576),
    "1B": (1_339_082_752, 1_208_010_752, 49_152),
    "phi3.5-mini": (3_820_686_336, 3_624_078_336, 98_304),
    "gpt2": (134_105_856, 84_953_856, 9_216),
    "7B": (6_738_415_616, 6_476_271_616, 131_072),
    "bitnet_2B": (2_542_952_960, 2_379_112_960, 76_800),
    "bitnet_700M": (777_856_512, 679_552_512, 36_864),
    "bitnet_1.3B": (1_338_935_296, 1_207_863_296, 49_152),
    "bitnet_3B": (3_426_473_600, 3_221_673_600, 83_200),
    "bitnet_7B": (6_738_415_616, 6_476_271_616, 131_072),
    "neuzip_2.7B": (2_701_560_320, 2_537_720_320, 81_920),
    "neuzip_8B": (8_047_038_464, 7_784_894_464, 131_072),
    "neuzip_13B": (13_015_864_320, 12_688_184_320, 204_800),
    "P0": (25_876_736, 9_492_736, 3_072),
    "P1": (70_726_144, 37_958_144, 6_144),
    "P2": (134_105_856, 84_953_856, 9_216),
}


def meta_model(size, norm):
    shape = {"hidden_size": size.hidden_size, "intermediate_size": size.intermediate_size}
    with torch.device("meta"):
        return PaperLlamaForCausalLM(
            PaperLlamaConfig(norm=norm, num_hidden_layers=size.n_layers, num_attention_heads=size.n_heads, **shape)
        )


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_exactly_those_of_the_papers(name):
    size, (total, trunk, one_norm) = SIZES[name], COUNTS[name]
    model = meta_model(size, {"name": "pre_ln"})
    assert count(model) == size.parameters == total
    assert count(model.model.layers) + count(model.model.norm) == trunk
    assert parameter_count(size.hidden_size, size.intermediate_size, size.n_layers) == total
    assert count(meta_model(size, {"name": "sandwich_ln"})) == total + 2 * one_norm
    four = parameter_count(size.hidden_size, size.intermediate_size, size.n_layers, norms_per_block=4)
    assert four == total + 2 * one_norm


def test_the_250m_shape_that_table_7_prints_has_355_million_parameters():
    assert count(meta_model(SIZES["250M_table7"], {"name": "pre_ln"})) == SIZES["250M_table7"].parameters == 354_993_152
    assert SIZES.keys() == COUNTS.keys() | {"250M_table7"}


@each([*METHODS, *SHARED, LEAK])
def test_a_block_has_the_norms_of_its_method_and_the_last_norm_is_always_rms(norm):
    model, name = model_of(norm), norm["name"]
    per_block = {"sandwich_ln": 4, "peri_ln": 4, "siamese_norm": 6}.get(name, 2)
    for layer in model.model.layers:
        assert sum(isinstance(m, RMSNorm | FeatureGroupNorm) for m in layer.modules()) == per_block
    assert type(model.model.norm) is RMSNorm
    d, n = WIDTH, len(model.model.layers)
    extra = {"sandwich_ln": 2 * d, "group_ln": 2 * d, "layer_scale": 2 * d, "admin": 2 * d}.get(name, 0)
    extra = {"peri_ln": 2 * d, "siamese_norm": 4 * d, "gpas": 1}.get(name, extra)
    extra = {"authors_shared": d, "authors_scalar_0p015": 1}.get(norm.get("preset"), extra)
    ends = {"peri_ln": d, "siamese_norm": 2 * d}.get(name, 0)
    assert count(model) == 2 * VOCAB * d + n * (4 * d * d + 3 * d * FFN + 2 * d + extra) + ends + d


def test_a_tokens_training_cost_is_that_of_its_products_counted_by_hand():
    """Width 2, feed-forward 3, one block, 5 ids, 4 tokens: 16 + 18 + 10 weights, and two keys a token on average."""
    forward = 2 * (16 + 18 + 10) + 2 * (2 * 2 + 2 * 2)  # a score and its share of the sum take 2 * 2 each for a key
    assert flops_per_token(2, 3, 1, 5, 4) == 3 * forward
    assert flops_per_token(2, 3, 7, 5, 4) == 3 * (forward + 6 * (2 * (16 + 18) + 16))


# --- another implementation ---


@pytest.mark.parametrize("settings", [{}, {"rms_norm_eps": 0.05, "rope_theta": 70.0}], ids=["usual", "others"])
def test_pre_ln_is_the_llama_of_transformers(settings):
    ours = model_of({"name": "pre_ln"}, **settings)
    theta = {"rope_type": "default", "rope_theta": settings.get("rope_theta", 10_000.0)}
    options = {"rms_norm_eps": settings.get("rms_norm_eps", 1e-6), "rope_parameters": theta}
    config = LlamaConfig(**SHAPE, num_hidden_layers=LAYERS, tie_word_embeddings=False, **options)
    theirs = LlamaForCausalLM(config).double().eval()
    names = {
        ".attention.": ".self_attn.",
        "attention_residual.pre_norm": "input_layernorm",
        "mlp_residual.pre_norm": "post_attention_layernorm",
    }
    weights = ours.state_dict()
    for old, new in names.items():
        weights = {k.replace(old, new): v for k, v in weights.items()}
    theirs.load_state_dict(weights, strict=True)
    ids = tokens(2, 29)
    expected = theirs(ids, labels=ids)
    assert expected.logits.std() > 0.5
    close(ours(ids).logits, expected.logits, 1e-5)
    close(ours(ids, labels=ids).loss, expected.loss, 1e-5)
    for side in ("left", "right"):
        ids, mask, places = padded(side)
        ours_logits, expected_logits = (m(ids, attention_mask=mask).logits for m in (ours, theirs))
        for row, place in enumerate(places):
            close(ours_logits[row, place], expected_logits[row, place], 1e-5)


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU, to reach the branch that only GPUs take."""

    is_cuda = True


@pytest.mark.parametrize(("width", "padding"), [(21, 43), (5461, 43), (2740, 12), (1368, 0), (2048, 0)])
def test_aligning_swiglu_for_the_gpu_changes_neither_result_nor_gradient(width, padding, monkeypatch):
    shape = {"hidden_size": 7, "intermediate_size": width, "num_attention_heads": 1}
    mlp, x = GatedMLP(PaperLlamaConfig(**shape)).double(), torch.randn(2, 5, 7, dtype=torch.float64)
    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    g, u = x @ gate.T, x @ up.T
    expected = (g / (1 + (-g).exp()) * u) @ down.T
    expected_gradients = torch.autograd.grad(expected.square().sum(), (gate, up, down))
    amounts, pad = [], F.pad
    monkeypatch.setattr(F, "pad", lambda t, sizes: amounts.append(max(sizes)) or pad(t, sizes))
    for out in (mlp(x), mlp(x.as_subclass(OnCuda))):
        torch.testing.assert_close(out.as_subclass(torch.Tensor), expected, rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad(out.as_subclass(torch.Tensor).square().sum(), (gate, up, down))
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-11, atol=1e-11)
    assert amounts == [padding] * 3 * bool(padding)


def test_rms_norm_has_the_eps_and_the_gain_of_the_equation():
    norm, u = RMSNorm(7, 1e-6).double(), torch.randn(5, 7, dtype=torch.float64) * 1e-3  # small, so that eps counts
    torch.nn.init.normal_(norm.weight)
    close(norm(u), norm.weight * u / (u.square().sum(-1, keepdim=True) / 7 + 1e-6).sqrt(), 1e-12)


def test_a_bfloat16_rms_norm_takes_its_statistics_in_float32():
    norm, u = RMSNorm(771, 1e-6).bfloat16(), torch.randn(9, 771).bfloat16()
    torch.nn.init.normal_(norm.weight)
    exact = u.double() * (u.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight.double()
    assert norm(u).dtype == torch.bfloat16
    assert ((norm(u).double() - exact).abs() / exact.abs()).max() < 2**-8 * 1.01  # two roundings at the very most


@pytest.mark.parametrize("over_sequence", [False, True])
def test_feature_group_norm_is_the_group_norm_of_the_library(over_sequence):
    norm, u = FeatureGroupNorm(24, 8, over_sequence), torch.randn(2, 5, 24) * 3e-3 + 1e-3  # small, so that eps counts
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    rows = u.transpose(1, 2)[..., None] if over_sequence else u.flatten(0, 1)
    expected = F.group_norm(rows, 8, norm.weight, norm.bias, eps=1e-5)
    close(norm(u), expected[..., 0].transpose(1, 2) if over_sequence else expected.view(2, 5, 24), 1e-5)


@pytest.mark.parametrize("std", [0.02, 0.6325])
def test_embedding_deviation_follows_the_config_and_the_last_row_can_be_held_at_zero(std):
    shape = {"hidden_size": 328, "intermediate_size": 21, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = PaperLlamaConfig(**shape, vocab_size=401, embed_init_std=std, zero_last_embedding_row=True)
    model = PaperLlamaForCausalLM(config)
    table, ids = model.model.embed_tokens.weight, torch.tensor([[5, 400, 7, 400, 9]])
    assert table[:-1].std().item() == pytest.approx(std, rel=0.01) and not table[-1].any()
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.01)
    model.summed_loss(ids, ids).backward()
    assert not table.grad[-1].any() and table.grad[5].any()


@pytest.mark.parametrize("n", [1, 12, 18, 19, 24, 25, 32])
def test_learned_factors_start_where_the_depth_of_training_puts_them(n):
    layer_scale = 0.1 if n <= 18 else 1e-5 if n <= 24 else 1e-6
    starts = [({"name": "layer_scale"}, layer_scale, [WIDTH] * 2), ({"name": "admin"}, 1.0, [WIDTH] * 2)]
    starts += [(SHARED[0], 0.015, [1])] + [(SHARED[1], layer_scale, [WIDTH])] * (n in (12, 24))
    one_block = {"num_hidden_layers": 1, "trained_layers": n, "layer_numbers": [n]}
    for norm, start, widths in starts:
        model = PaperLlamaForCausalLM(PaperLlamaConfig(**SHAPE, **one_block, norm=norm))
        if norm != {"name": "admin"}:
            build_method(norm).initialize_from_batch(model, tokens())
        factors = [p for k, p in model.named_parameters() if k.endswith("_scale")]
        assert [p.numel() for p in factors] == widths and all((p == torch.tensor(start)).all() for p in factors)
    if n not in (12, 24):
        with pytest.raises(SpecError, match=f"knows 12 and 24 blocks, not {n}; use separate"):
            PaperLlamaForCausalLM(PaperLlamaConfig(**SHAPE, **one_block, norm=SHARED[1]))


# --- saving, loading, pruning ---


@each([*METHODS, *SHARED, LEAK])
def test_a_saved_model_loads_through_the_auto_class_and_computes_the_same(norm, tmp_path):
    model = model_of(norm, zero_last_embedding_row=True)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = list(file.keys())
    assert sorted(stored) == sorted(k for k, _ in model.named_parameters())
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert type(loaded) is PaperLlamaForCausalLM and loaded.config.method() == build_method(norm)
    assert all(torch.equal(p, model.get_parameter(k)) for k, p in loaded.named_parameters())
    close(loaded.eval()(tokens()).logits, model(tokens()).logits)
    if norm in SHARED:
        assert sum(k.endswith(("residual_scale", "branch_scale")) for k in stored) == len(model.model.layers)


def factors(model):
    return [(r.pre_scale, s.pre_scale) for r, s in ((b.attention_residual, b.mlp_residual) for b in model.model.layers)]


def test_layernorm_scaling_keeps_the_factor_of_the_training_position(tmp_path):
    model = model_of({"name": "layernorm_scaling"}, n_layers=5)
    pruned = without_block(model, 2)
    pruned.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    twice = without_block(reloaded, 4)
    for found, numbers in (
        (model, (1, 2, 3, 4, 5)),
        (pruned, (1, 3, 4, 5)),
        (reloaded, (1, 3, 4, 5)),
        (twice, (1, 3, 5)),
    ):
        assert factors(found) == [pytest.approx((n**-0.5, n**-0.5), abs=1e-15) for n in numbers]
    close(reloaded(tokens()).logits, pruned(tokens()).logits)


@each([*METHODS, *SHARED])
def test_a_model_without_a_block_is_the_model_that_skips_it(norm, tmp_path):
    model, ids = model_of(norm), tokens()
    pruned = without_block(model, 2)
    pruned.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    before = model(ids).logits
    model.model.layers[1].forward = lambda x, *rest, **options: x
    expected = model(ids).logits
    assert not torch.allclose(before, expected)
    for found in (pruned, reloaded):
        close(found(ids).logits, expected)
        assert found.config.num_hidden_layers == len(found.model.layers) == len(model.model.layers) - 1
        assert found(ids, use_cache=True).past_key_values.get_seq_length() == ids.shape[1]


def test_hidden_states_are_the_streams_between_blocks_and_the_normed_end():
    model, ids = model_of({"name": "pre_ln"}), tokens()
    states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == LAYERS + 1
    assert torch.equal(states[0], model.model.embed_tokens.weight[ids])
    cos, sin = model.model.rope_cos[: ids.shape[1]], model.model.rope_sin[: ids.shape[1]]
    assert torch.allclose(states[2], model.model.layers[1](states[1], cos, sin), rtol=1e-12)
    assert torch.equal(states[3], model.model.hidden(ids))


def test_attention_under_autocast_of_a_cpu_is_float32_whatever_the_mask(monkeypatch):
    model, seen, attend = model_of(MIX).float(), [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *a, **k: seen.append(q.dtype) or attend(q, *a, **k)
    )
    ids, allowed = tokens(), torch.ones(11, 11, dtype=torch.bool).tril().expand(3, 1, 11, 11)
    additive = torch.zeros(3, 1, 11, 11, dtype=torch.bfloat16).masked_fill(~allowed, -1e30)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.lm_head(model.model.hidden(ids))
        for mask in (None, allowed, additive):
            close(model(ids, attention_mask=mask).logits, expected, 2**-6)
    assert seen == [torch.float32] * 4 * LAYERS and expected.dtype == torch.bfloat16


# --- scores and losses ---


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_classifier_scores_the_last_real_token(side):
    model = randomize(PaperLlamaForSequenceClassification(config_of(MIX, num_labels=2)))
    ids, mask, places = padded(side)
    scores = model(ids, attention_mask=mask).logits
    for row, place in enumerate(places):
        alone = ids[row, place][None]
        expected = model.model.hidden(alone)[0, -1] @ model.score.weight.T
        close(scores[row], expected)
        close(model(alone).logits[0], expected)
    if side == "right":
        close(model(ids).logits, scores)
    labels = torch.tensor([1, 0, 1])
    expected = -scores.log_softmax(-1)[torch.arange(3), labels].mean()
    torch.testing.assert_close(model(ids, attention_mask=mask, labels=labels).loss, expected)


def test_a_classifier_takes_its_trunk_from_a_saved_language_model(tmp_path):
    model = model_of(MIX)
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {"score.weight"} and loaded.score.weight.shape == (1, WIDTH)
    assert 0.01 < loaded.score.weight.std() < 0.03
    close(loaded.model.hidden(tokens()), model.model.hidden(tokens()))


@each(METHODS)
def test_every_loss_path_is_the_cross_entropy_of_the_next_real_token(norm):
    model, (ids, mask, _) = model_of(norm), padded("right", (11, 6, 2, 1))
    labels = ids.masked_fill(mask == 0, -100)
    expected = torch.zeros(4, 10, dtype=torch.float64)
    logits = model(ids).logits
    for row in range(4):
        for t in range(int(mask[row].sum()) - 1):
            z = logits[row, t]
            expected[row, t] = z.exp().sum().log() - z[ids[row, t + 1]]
    n = 10 + 5 + 1
    assert (expected > 0).sum() == n and expected.sum() / n > 0.5 * math.log(VOCAB)
    losses = model.token_losses(ids, labels)
    close(losses.double(), expected, 1e-5)
    assert (losses == 0).sum() == 40 - n
    total = model.summed_loss(ids, labels)
    torch.testing.assert_close(total.double(), expected.sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(model(ids, labels=labels).loss.double(), expected.sum() / n, rtol=1e-5, atol=0)
    halved = model(ids, labels=labels, num_items_in_batch=2 * n).loss
    torch.testing.assert_close(halved.double(), expected.sum() / (2 * n), rtol=1e-5, atol=0)
    other_padding = torch.where(mask == 0, 5, ids)
    torch.testing.assert_close(model.summed_loss(other_padding, labels), total, rtol=1e-6, atol=0)
