"""Normalization methods against the equations of their papers, which support_norms.py writes out a second time."""

import itertools
import math
import os
import subprocess
import sys

import pytest
import torch
from support_norms import (
    ATTN,
    CASES,
    FFN,
    HEADS,
    LEAK,
    MIX3,
    MLP,
    POST,
    PRE,
    TAKASE,
    VOCAB,
    WIDTH,
    attention,
    each_case,
    layer_scale,
    model_of,
    norm_of,
    reference_logits,
    rms,
    swiglu,
    tokens,
)

import paperlm.norms
from paperlm.errors import SpecError
from paperlm.models.llama import PaperLlamaConfig, PaperLlamaForCausalLM
from paperlm.norms import ModelShape, build_method, norm_methods


def test_the_equations_of_every_method_are_written_out():
    missing = set(norm_methods()) - {norm["name"] for norm, _, _ in CASES}
    assert len(norm_methods()) >= 11 and not missing, (
        f"write the block equations of {missing} into CASES of support_norms.py"
    )


def test_a_gate_scales_forward_and_leaves_the_gradient_of_what_it_scales():
    """With every gate at g the gradient of the last block's sum is that of an ungated sum of the same numbers."""
    model, ids = model_of(norm_of("gpas", base=PRE), n_layers=1), tokens()
    block, x = model.model.layers[0].mlp_residual, torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    gate = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    branch = torch.randn_like(x, requires_grad=True)
    out, _ = block(x, branch, (None, None, gate))
    silu = 0.7 / (1 + math.exp(-0.7))
    torch.testing.assert_close(out, (1 - silu) * (x + branch))
    weight = torch.randn_like(out)
    into_x, into_branch, into_gate = torch.autograd.grad((out * weight).sum(), (x, branch, gate))
    assert torch.equal(into_x, weight) and torch.equal(into_branch, weight)
    slope = (1 + 0.7 * (1 - 1 / (1 + math.exp(-0.7)))) / (1 + math.exp(-0.7))
    torch.testing.assert_close(into_gate[0], -slope * ((x + branch) * weight).sum().detach())
    assert model(ids).logits.isfinite().all()


def test_gates_start_at_zero_and_both_sums_of_a_block_share_one():
    config = PaperLlamaConfig(
        hidden_size=WIDTH, intermediate_size=FFN, num_attention_heads=HEADS, vocab_size=VOCAB, num_hidden_layers=2,
        norm=norm_of("gpas", base=norm_of("layer_scale", preset="separate")),
    )  # fmt: skip
    gates = {name: p for name, p in PaperLlamaForCausalLM(config).named_parameters() if name.endswith("gate")}
    assert len(gates) == 2 and all(gate.item() == 0 for gate in gates.values())
    with pytest.raises(SpecError, match="gpas: siamese_norm has residual sums of its own"):
        build_method(norm_of("gpas", base=norm_of("siamese_norm")))


@each_case
def test_a_model_computes_the_block_equations_of_its_paper(norm, block, embed_factor):
    model, ids = model_of(norm), tokens()
    expected = reference_logits(model, ids, block, embed_factor)
    tolerance = 2e-5 if "group_ln" in str(norm) else 1e-9  # the statistics of Group-LN are float32, whatever the input
    assert expected.std() > 0.3 and build_method(build_method(norm).describe()) == build_method(norm)
    torch.testing.assert_close(model(ids).logits, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(model.lm_head(model.model.hidden(ids)), expected, rtol=tolerance, atol=tolerance)


@each_case
def test_only_the_preset_that_says_so_sees_the_future(norm, block, embed_factor):
    model, ids, t = model_of(norm), tokens(), 6
    changed = ids.clone()
    changed[:, t] = (ids[:, t] + 5) % VOCAB
    difference = (model(ids).logits - model(changed).logits).abs().amax((0, 2))
    assert difference[t:].min() > 1e-3
    leaks = LEAK in (norm, norm.get("base"))
    assert build_method(norm).leaks_future == leaks
    assert difference[:t].min() > 1e-6 if leaks else difference[:t].max() < 1e-12


@pytest.mark.parametrize(("m", "same"), [(0, PRE), (3, POST)])
def test_mix_ln_at_either_end_is_the_plain_method_bit_for_bit(m, same):
    mixed, plain = (model_of(n) for n in (norm_of("mix_ln", post_layers=m), same))
    assert list(mixed.state_dict()) == list(plain.state_dict())
    assert torch.equal(mixed(tokens()).logits, plain(tokens()).logits)
    assert not torch.equal(model_of(norm_of("mix_ln", post_layers=1))(tokens()).logits, plain(tokens()).logits)


def test_layernorm_scaling_with_its_factors_forced_to_one_is_pre_ln_bit_for_bit():
    model, expected = model_of(norm_of("layernorm_scaling")), model_of(PRE)(tokens()).logits
    assert not torch.allclose(model(tokens()).logits, expected)
    for layer in model.model.layers:
        layer.attention_residual.pre_scale = layer.mlp_residual.pre_scale = 1.0
    assert torch.equal(model(tokens()).logits, expected)


# --- constants printed in the papers ---


def shape(n_layers):
    return ModelShape(hidden_size=768, intermediate_size=2048, n_layers=n_layers)


@pytest.mark.parametrize(("n", "a", "b"), [(12, 2.2134, 0.31947), (24, 2.6321, 0.26864), (32, 2.8284, 0.25)])
def test_deep_norm_constants_are_those_of_the_table(n, a, b):
    methods = [build_method(norm_of("deep_norm", preset=p)) for p in ("correct", "authors_public", "authors_dev")]
    assert [m.wiring(1, shape(n)).residual_scale for m in methods] == pytest.approx([a, 2.8284271, a], rel=1e-4)
    assert [m.gain(n) for m in methods] == pytest.approx([b, 1 / b, 1 / b], rel=1e-4)


@pytest.mark.parametrize(("n", "std"), [(12, 0.0040825), (24, 0.0028868), (32, 0.0025)])
def test_scaled_init_deviations_are_those_of_the_table(n, std):
    code = build_method(norm_of("scaled_init", base=PRE))
    takase = build_method(norm_of("scaled_init", base=PRE, base_std=TAKASE))
    for tensor in ("o", "down"):
        assert code.init_std(tensor, n, shape(n)) == pytest.approx(std, rel=1e-4)
        assert takase.init_std(tensor, n, shape(n)) == pytest.approx(std * 0.02282 / 0.02, rel=1e-3)
    assert {code.init_std(t, 1, shape(n)) for t in ("q", "k", "v", "gate", "up", "embed", "head")} == {0.02}


ALPHAS = {
    24: {0.167: 4, 0.25: 6, 0.33: 8, 0.417: 10, 0.5: 12, "1/6": 4, "1/3": 8, "5/12": 10},
    12: {"1/4": 3, 0.25: 3, 0: 0, 1: 12},
    32: {"1/16": 2, 0.0625: 2},
}


@pytest.mark.parametrize(("blocks", "fraction"), [(n, alpha) for n in ALPHAS for alpha in ALPHAS[n]])
def test_mix_ln_alpha_names_the_number_of_post_blocks_of_table_5(blocks, fraction):
    m = ALPHAS[blocks][fraction]
    method = build_method(norm_of("mix_ln", post_fraction=fraction))
    assert method.post_layers_of(blocks) == m
    assert [method.wiring(i, shape(blocks)).out for i in range(1, blocks + 1)] == [True] * m + [False] * (blocks - m)


def test_mix_ln_alpha_between_two_blocks_is_refused_with_the_way_out():
    with pytest.raises(SpecError, match=r"1/4 of 10 blocks is 2\.50.*post_layers: 2.*2/10"):
        model_of(norm_of("mix_ln", post_fraction="1/4"), n_layers=10)
    with pytest.raises(SpecError, match="not a whole number"):
        build_method(norm_of("mix_ln", post_fraction=0.33)).post_layers_of(30)  # off by exactly 0.1


# --- initialization, measured ---

D, FF, V = 328, 451, 401
XAVIER_D, XAVIER_F = (2 / (2 * D)) ** 0.5, (2 / (D + FF)) ** 0.5
SMALL = {"o": 0.0040825, "down": 0.0040825}
SMALL_TAKASE = dict.fromkeys(SMALL, (2 / (5 * D)) ** 0.5 / 24**0.5)


DEEP, DEEP_AUTHORS = (
    {"q": XAVIER_D, "k": XAVIER_D, "v": b * XAVIER_D, "o": b * XAVIER_D}
    | dict.fromkeys(("gate", "up", "down"), b * XAVIER_F)
    for b in (0.31947, 3.1302)
)
INITS = [  # norm, deviations that are not 0.02 in the blocks, those of block 1 if other, deviation of the embedding
    (PRE, {}, {}, 0.02),
    (norm_of("scaled_init", base=PRE), SMALL, SMALL, 0.02),
    (norm_of("scaled_init", base=PRE, base_std=TAKASE), SMALL_TAKASE, SMALL_TAKASE, 0.02),
    (norm_of("scaled_init", base=MIX3), SMALL, {}, 0.02),
    (norm_of("scaled_init", base=POST), {}, {}, 0.02),
    (norm_of("scaled_embed", base=norm_of("scaled_init", base=MIX3)), SMALL, {}, 0.4**0.5),
    (norm_of("scaled_embed", base=PRE, preset="multiplier"), {}, {}, (2 / (5 * D)) ** 0.5),
    (norm_of("deep_norm"), DEEP, DEEP, 0.02),
    (norm_of("deep_norm", preset="authors_public"), DEEP_AUTHORS, DEEP_AUTHORS, 0.02),
    (norm_of("deep_norm", preset="authors_dev"), DEEP_AUTHORS, DEEP_AUTHORS, 0.02),
]


@pytest.mark.parametrize(("norm", "deep_blocks", "first_block", "embed"), INITS)
def test_measured_deviations_are_within_one_percent(norm, deep_blocks, first_block, embed):
    torch.manual_seed(0)
    blocks = {"num_hidden_layers": 2, "trained_layers": 12, "layer_numbers": [1, 12]}
    sizes = {"hidden_size": D, "intermediate_size": FF, "num_attention_heads": 4, "vocab_size": V}
    model = PaperLlamaForCausalLM(PaperLlamaConfig(norm=norm, **sizes, **blocks))
    expected = {"model.embed_tokens": embed, "lm_head": 0.02}
    for i, stds in enumerate((first_block, deep_blocks)):
        for tensor in ("q", "k", "v", "o", "gate", "up", "down"):
            part = "attention" if tensor in "qkvo" else "mlp"
            expected[f"model.layers.{i}.{part}.{tensor}_proj"] = stds.get(tensor, 0.02)
    matrices = {k.removesuffix(".weight"): v for k, v in model.named_parameters() if v.ndim == 2}
    assert matrices.keys() == expected.keys()
    for name, weight in matrices.items():
        assert weight.double().std().item() == pytest.approx(expected[name], rel=0.01), name
        assert abs(weight.double().mean().item()) < 0.02 * expected[name], name
    assert all((p == 1).all() for k, p in model.named_parameters() if "norm" in k)
    if norm["name"] == "scaled_embed":
        stream = model.model(torch.arange(V)[None], output_hidden_states=True).hidden_states[0]
        assert stream.std().item() == pytest.approx(0.4**0.5, rel=0.01)


def test_admin_profiling_follows_the_recursion_and_grows_with_depth():
    norm, ids = norm_of("admin"), tokens(16, 31)
    model = model_of(norm)
    build_method(norm).initialize_from_batch(model, ids)
    weights, r, expected = model.state_dict(), 1.0, []
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(3):
        w = {k.removeprefix(f"model.layers.{layer}."): v for k, v in weights.items()}
        for residual, f in ((ATTN, attention), (MLP, swiglu)):
            branch = f(x, w)
            expected.append(r)
            following = math.sqrt((r * x).var(correction=0) + branch.var(correction=0))
            x, r = rms(r * x + branch, w[f"{residual}.out_norm.weight"]), following
    found = [p.unique().item() for k, p in model.named_parameters() if k.endswith("residual_scale")]
    assert found == pytest.approx(expected, rel=1e-3)
    assert expected[0] == 1.0 and all(a < b for a, b in itertools.pairwise(expected))


# --- what a user can get wrong, and what a contributor can add ---


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (norm_of("mixln"), "did you mean 'mix_ln'"),
        (norm_of("mix_ln", post_layer=3), "did you mean 'post_layers'"),
        (norm_of("deep_norm", preset="author_public"), "did you mean 'authors_public'"),
        (norm_of("admin", preset="profile"), "did you mean 'profiled'"),
        (norm_of("group_ln", preset="casual"), "did you mean 'causal'"),
        (norm_of("layer_scale", preset="seperate"), "did you mean 'separate'"),
        (norm_of("scaled_embed", base=PRE, preset="init"), "did you mean 'init_only'"),
        (norm_of("scaled_init", base=PRE, base_std="sqrt(2/5d)"), r"did you mean 'sqrt\(2/\(5d\)\)'"),
        (norm_of("scaled_init", base=norm_of("preln")), "did you mean 'pre_ln'"),
        (norm_of("scaled_init", base="pre_ln"), "written as {name"),
        (norm_of("scaled_init"), "needs base"),
        ({"preset": "correct"}, "written as {name"),
        (norm_of("mix_ln"), "exactly one of post_layers"),
        (norm_of("mix_ln", post_layers=1, post_fraction="1/4"), "exactly one of post_layers"),
        (norm_of("mix_ln", post_layers=4), "4 is more than the 3 blocks"),
        (norm_of("mix_ln", post_layers=-1), "whole number >= 0"),
        (norm_of("mix_ln", post_layers=1.0), "whole number >= 0"),
        (norm_of("mix_ln", post_fraction="quarter"), "write 1/4 or 0.25"),
        (norm_of("mix_ln", post_fraction=25.0), "between 0 and 1"),
        (norm_of("group_ln", groups=7), "24 does not divide into 7"),
        (norm_of("group_ln", groups=0), "whole number >= 1"),
    ],
)
def test_a_wrong_description_is_refused_with_what_to_write_instead(norm, message):
    with pytest.raises(SpecError, match=message):
        model_of(norm)


SKIP_INIT = """
from dataclasses import dataclass
from typing import ClassVar
from paperlm.norms.base import Learned, ModelShape, NormMethod, Wiring

@dataclass(frozen=True, kw_only=True)
class SkipInit(NormMethod):
    name: ClassVar[str] = "{name}"
    source: ClassVar[str] = "Curse of Depth v5 Table 6: a trained number on each branch, started at 1/sqrt(L)"

    def wiring(self, layer: int, shape: ModelShape) -> Wiring:
        return Wiring(pre=True, branch_scale=Learned(init=shape.n_layers**-0.5, per_feature=False))
"""


@pytest.fixture
def add_method(tmp_path, monkeypatch):
    def add(name):
        (tmp_path / "test_only_skip_init.py").write_text(SKIP_INIT.format(name=name))
        monkeypatch.setattr(paperlm.norms, "__path__", [*paperlm.norms.__path__, str(tmp_path)])
        norm_methods.cache_clear()

    yield add
    monkeypatch.undo()
    sys.modules.pop("paperlm.norms.test_only_skip_init", None)
    vars(paperlm.norms).pop("test_only_skip_init", None)
    norm_methods.cache_clear()
    assert "skip_init" not in norm_methods()


def test_a_twelfth_method_is_one_new_file(add_method):
    known = set(norm_methods())
    add_method("skip_init")
    assert set(norm_methods()) == known | {"skip_init"}
    model = model_of(norm_of("scaled_init", base=norm_of("skip_init")))
    torch.testing.assert_close(model(tokens()).logits, reference_logits(model, tokens(), layer_scale(MLP)))
    with pytest.raises(SpecError, match="did you mean 'skip_init'"):
        build_method(norm_of("skipinit"))


def test_two_methods_of_one_name_are_refused(add_method):
    add_method("pre_ln")
    with pytest.raises(SpecError, match="two norm methods are called 'pre_ln'"):
        norm_methods()


def test_methods_are_checked_without_importing_torch():
    code = "import sys, paperlm.norms as n; n.build_method({'name': 'admin'}); assert 'torch' not in sys.modules"
    environment = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
