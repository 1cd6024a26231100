"""Decoding with packed weights and static caches: the model's logits and tokens, and what is refused."""

from __future__ import annotations

import pytest
import torch
from support_bitnet import bitnet
from support_model import tokens

from paperlm.errors import SpecError
from paperlm.models.decoding import PackedDecoder
from paperlm.models.packed import pack

SHAPE = {"hidden_size": 32, "intermediate_size": 88, "num_attention_heads": 4}
"Heads of 8: packed ones divide in four."
CACHES = [
    None, {"kv_bits": 4}, {"kv_bits": 3}, {"kv_bits": 3, "q_bits": 4, "mapping": "minmax"},
    {"kv_bits": 4, "mapping": "minmax"},
]  # fmt: skip


def stepped(decoder, ids):
    """Logits (B, S, V) of whole rows, a token at a time."""
    decoder.rewind()
    found = []
    for column in ids.T:
        decoder.ids.copy_(column)
        found.append(decoder.step())
    return torch.stack(found, 1)


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: "none" if cache is None else str(cache["kv_bits"]))
@pytest.mark.parametrize("preset", ["a48_int4", "a8_trunk", "b158", "full_fp4", "full_int4"])
def test_a_step_at_a_time_gives_the_models_logits(preset, cache):
    """The model quantizes keys and values itself, by code of its own, and attends over whole sequences."""
    model, ids = bitnet(preset, kv_cache=cache, **SHAPE), tokens()
    mine = stepped(PackedDecoder.of(model, batch=ids.shape[0], capacity=ids.shape[1]), ids)
    right = model(ids).logits
    error = (mine - right).norm(dim=-1) / right.norm(dim=-1)
    # A number next to a tie may be rounded the other way, where sums are in another order: that moves its token and
    # those that attend to it, and which ones depends on the machine. Keys in full precision would move all.
    assert error.median() < 1e-6 and error.max() < 0.3


@pytest.mark.parametrize("width", [40, 48, 56])
def test_heads_that_are_filled_up_to_a_fast_width_change_no_logit(width):
    """Heads of 10, 12 and 14 in caches of 16: zeros add nothing to a score, whose scale is that of the real width."""
    model, ids = bitnet("a8_trunk", **SHAPE | {"hidden_size": width}), tokens()
    decoder = PackedDecoder.of(model, batch=ids.shape[0], capacity=ids.shape[1])
    assert decoder.blocks[0].cache.padded_keys.shape[-1] == 16
    error = (stepped(decoder, ids) - model(ids).logits).norm(dim=-1) / model(ids).logits.norm(dim=-1)
    assert error.median() < 1e-6 and error.max() < 0.3


def test_a_packed_model_decodes_to_the_latent_ones_bits():
    model, ids = bitnet("a48_int4", tie_word_embeddings=True), tokens()
    options = {"batch": ids.shape[0], "capacity": ids.shape[1]}
    latent, packed = (stepped(PackedDecoder.of(m, **options), ids) for m in (model, pack(model)))
    assert torch.equal(latent, packed)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_packed_model_with_a_damaged_scale_is_refused(scale):
    model = pack(bitnet("a48_int4"))
    model.get_submodule("model.layers.0.attention.o_proj").weight_scale.fill_(scale)
    model.get_submodule("model.layers.0.attention.o_proj").checked = False  # as when weights were loaded
    with pytest.raises(SpecError, match="packed weights with the scale"):
        PackedDecoder.of(model, batch=1, capacity=4)


def by_transformers(model, prompt, new):
    return model.generate(prompt, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)[:, 5:]


def test_generated_tokens_are_those_of_transformers_generate():
    model = bitnet("a48_int4", **SHAPE)
    prompt = tokens()[:, :5]
    decoder = PackedDecoder.of(model, batch=len(prompt), capacity=12)
    mine = decoder.generate(prompt, 8)
    assert torch.equal(mine, by_transformers(model, prompt, 8)) and torch.equal(decoder.generate(prompt, 8), mine)
    with pytest.raises(SpecError, match="5 tokens and 9 more in caches for 12"):
        decoder.generate(prompt, 9)


def test_no_tokens_no_prompt_and_more_positions_than_the_model_has_are_refused():
    model = bitnet("a48_int4", **SHAPE)
    most = model.config.max_position_embeddings
    decoder = PackedDecoder.of(model, batch=1, capacity=most)
    with pytest.raises(SpecError, match="0 tokens to generate; give 1 or more"):
        decoder.generate(tokens()[:1, :5], 0)
    for prompt, shape in ((tokens()[:1, :0], r"\(1, 0\)"), (tokens()[:2, :5], r"\(2, 5\)")):
        with pytest.raises(SpecError, match=rf"a prompt of shape {shape}; this decoder reads \(1, 1 or more\)"):
            decoder.generate(prompt, 3)
    with pytest.raises(SpecError, match=f"caches for {most + 1} positions; the model was made for {most}"):
        PackedDecoder.of(model, batch=1, capacity=most + 1)


def test_a_prompt_that_is_no_tensor_of_the_models_ids_and_weights_that_are_no_numbers_are_refused():
    model = bitnet("a48_int4", **SHAPE)
    decoder = PackedDecoder.of(model, batch=1, capacity=8)
    size = model.config.vocab_size
    for prompt, said in (
        ([[1, 2]], "a prompt of a list; give token ids"),
        (torch.ones(1, 2), r"a prompt of torch\.float32; give token ids"),
        (torch.ones(2, dtype=torch.long), r"a prompt of shape \(2,\)"),
        (torch.tensor([[1, size]]), f"beyond 0 to {size - 1}"),
        (torch.tensor([[-1, 1]]), f"beyond 0 to {size - 1}"),
    ):
        with pytest.raises(SpecError, match=said):
            decoder.generate(prompt, 2)
    name = "model.layers.0.attention.k_proj.weight"
    with torch.no_grad():
        model.get_parameter(name)[1, 1] = torch.nan
    with pytest.raises(SpecError, match=rf"{name} has numbers that are not finite"):
        PackedDecoder.of(model, batch=1, capacity=8)
    spread = bitnet("a48_int4", **SHAPE)
    spread.get_parameter("model.embed_tokens.weight").full_tensor = None  # as of a DTensor
    with pytest.raises(SpecError, match=r"model.embed_tokens.weight is a shard: gather"):
        PackedDecoder.of(spread, batch=1, capacity=8)


def test_from_a_quantized_cache_each_token_is_the_likeliest_and_most_rows_are_those_of_transformers():
    """A code next to a tie moves a row's tokens, and which ones depends on the machine's order of sums."""
    model = bitnet("a48_int4", kv_cache={"kv_bits": 4}, **SHAPE)
    prompt = tokens(batch=8)[:, :5]
    decoder = PackedDecoder.of(model, batch=len(prompt), capacity=12)
    mine = decoder.generate(prompt, 8)
    logits = stepped(decoder, torch.cat([prompt, mine], 1)[:, :-1])
    assert torch.equal(mine, logits[:, 4:].argmax(-1))
    assert (mine == by_transformers(model, prompt, 8)).all(1).float().mean() >= 0.5


@pytest.mark.parametrize(
    "options,said",
    [
        ({"preset": "llama"}, "ternary_absmean"),
        ({"preset": "a48_int4", "norm": {"name": "post_ln"}}, "wired as 'pre_ln'"),
        ({"preset": "a48_int4", "kv_cache": {"kv_bits": 4, "first_bits": 8}}, "first_bits: packed caches"),
    ],
)
def test_a_model_that_is_wired_otherwise_is_refused(options, said):
    with pytest.raises(SpecError, match=said):
        PackedDecoder.of(bitnet(**options), batch=1, capacity=4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cache", CACHES[:3])
def test_a_graph_of_a_token_gives_the_tokens_of_its_steps(cache):
    model = bitnet("a48_int4", kv_cache=cache, **SHAPE).to("cuda", torch.bfloat16)
    prompt = tokens()[:, :5].cuda()
    decoder = PackedDecoder.of(model, batch=len(prompt), capacity=32)
    mine = decoder.generate(prompt, 20)
    decoder.rewind()
    found = []
    for i in range(24):
        if i < 5:
            decoder.ids.copy_(prompt[:, i])
        decoder.advance()
        found.append(decoder.ids.clone())
    assert torch.equal(mine, torch.stack(found[4:], 1))
