"""Attention on queries, keys and values in few bits: by hand, with every cache, under padding and packing."""

import math

import pytest
import torch
from support_bitnet import bitnet, bitnet_folder
from support_model import HEADS, MIX, WIDTH, close, model_of, padded, tokens
from support_quantizers import minmax, symmetric

from paperlm.errors import JobError, SpecError
from paperlm.models.folder import load_model
from paperlm.models.layers import Attention, rope_tables
from paperlm.models.llama import PaperLlamaConfig, PaperLlamaForCausalLM
from paperlm.models.packed import pack

VARIANTS = [
    {"kv_bits": 4},
    {"kv_bits": 4, "q_bits": 4},
    {"kv_bits": 4, "q_bits": 4, "mapping": "minmax"},
    {"kv_bits": 3, "q_bits": 4},
    {"kv_bits": 3, "first_bits": 3},
    {"kv_bits": 3, "q_bits": 4, "mapping": "minmax"},
]
each_variant = pytest.mark.parametrize("cache", VARIANTS, ids=[" ".join(map(str, v.values())) for v in VARIANTS])


def exact_model(**options):
    """Of plain weights: those of a ternary model are products of whole numbers, which often lie half-way between two
    codes, so that the last bit of a scale decides."""
    return bitnet("llama", dtype=torch.float64, **options)


def rounded(x, bits, mapping="symmetric"):
    return torch.from_numpy({"symmetric": symmetric, "minmax": minmax}[mapping](bits)(x.detach().numpy()))


def attention_by_hand(module, x, cos, sin, q_bits=16, kv_bits=4, first_bits=4, mapping="symmetric"):
    """float64; key and value of the first token have their own bits."""
    heads = [(x @ getattr(module, f"{n}_proj").weight.T).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "qkv"]
    half = WIDTH // HEADS // 2
    turn = lambda z: z * cos + torch.cat((-z[..., half:], z[..., :half]), -1) * sin  # noqa: E731
    q, k, v = turn(heads[0]), turn(heads[1]), heads[2]
    if q_bits != 16:
        q = rounded(q, q_bits, mapping)
    k, v = (
        torch.cat((rounded(z[:, :, :1], first_bits, mapping), rounded(z[:, :, 1:], kv_bits, mapping)), 2)
        for z in (k, v)
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(2 * half)
    scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ module.o_proj.weight.T


@each_variant
def test_attention_rounds_keys_and_values_behind_the_rotation_a_token_and_head_at_a_time(cache):
    torch.manual_seed(0)
    config = PaperLlamaConfig(hidden_size=WIDTH, num_attention_heads=HEADS, kv_cache=cache)
    module, x = Attention(config, 0).double(), torch.randn(2, 9, WIDTH, dtype=torch.float64) * 3
    cos, sin = (table.double() for table in rope_tables(WIDTH // HEADS, 9, 10_000.0))
    expected = attention_by_hand(module, x, cos, sin, **cache)
    close(module(x, cos, sin)[0], expected)
    assert (module(x, cos, sin)[0] - attention_by_hand(module, x, cos, sin, kv_bits=4, first_bits=3)).abs().max() > 1e-3


@each_variant
def test_generation_with_a_cache_writes_what_whole_sequences_predict(cache):
    model, written = exact_model(kv_cache=cache), tokens(2, 5)
    found = model.generate(written, max_new_tokens=10, do_sample=False, eos_token_id=None)
    for _ in range(10):
        written = torch.cat((written, model(written, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(found, written)
    ids = tokens(2, 9)
    start = model(ids[:, :4], use_cache=True)
    rest = model(ids[:, 4:], past_key_values=start.past_key_values)
    close(torch.cat((start.logits, rest.logits), 1), model(ids, use_cache=False).logits)


@pytest.mark.parametrize("side", ["left", "right"])
@each_variant
def test_padding_changes_no_real_token(cache, side):
    """The first token is the one at position 0, wherever padding puts it."""
    model, (ids, mask, places) = exact_model(kv_cache=cache), padded(side)
    logits = model(ids, attention_mask=mask).logits
    for row, place in enumerate(places):
        close(logits[row, place], model(ids[row, place][None]).logits[0])
        close(logits[row, place], model.lm_head(model.model.hidden(ids[row, place][None]))[0])


@each_variant
def test_each_document_of_a_packed_row_has_a_first_token(cache):
    model, a, b = exact_model(kv_cache=cache), tokens(1, 6, seed=1), tokens(1, 5, seed=2)
    places = torch.cat((torch.arange(6), torch.arange(5)))[None]
    together = model(torch.cat((a, b), 1), position_ids=places, use_cache=False).logits
    close(together, torch.cat((model(a).logits, model(b).logits), 1))


def test_a_quantized_cache_is_an_option_of_any_model_of_the_decoder():
    plain = model_of(MIX)
    other = PaperLlamaForCausalLM(PaperLlamaConfig(**(plain.config.to_dict() | {"kv_cache": {"kv_bits": 4}}))).double()
    other.load_state_dict(plain.state_dict())
    difference = (other.eval()(tokens()).logits - plain(tokens()).logits).abs().max()
    assert 1e-3 < difference < 10


def test_fewer_bits_are_further_from_the_exact_logits_and_bits_for_the_first_token_help():
    exact, ids = exact_model(), tokens(8, 30)
    expected = exact(ids).logits

    def error(**cache):
        return float((exact_model(kv_cache=cache)(ids).logits - expected).square().mean().detach())

    assert 0 < error(kv_bits=4) < error(kv_bits=3) < error(kv_bits=3, first_bits=3)
    assert error(kv_bits=4) < error(kv_bits=4, q_bits=4)
    assert error(kv_bits=3, mapping="minmax") < error(kv_bits=3)


@each_variant
def test_packed_weights_and_a_quantized_cache_go_together(cache):
    model, ids = bitnet(kv_cache=cache), tokens(2, 5)
    small = pack(model)
    assert torch.equal(small(ids).logits, model(ids).logits)
    written = [m.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None) for m in (model, small)]
    assert torch.equal(*written)


def test_a_folder_is_loaded_with_a_quantized_cache_though_it_was_saved_without(tmp_path):
    folder, ids = bitnet_folder(tmp_path), tokens()
    loaded = load_model(folder, kv_cache={"kv_bits": 3})
    assert loaded.config.kv_cache == {"kv_bits": 3}
    assert not torch.equal(loaded(ids).logits, load_model(folder)(ids).logits)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(load_model(tmp_path / "again")(ids).logits, loaded(ids).logits)


def test_bits_that_are_not_supported_are_refused_by_the_key(tmp_path):
    with pytest.raises(SpecError, match="kv_cache: unknown kv_bits '2'"):
        bitnet(kv_cache={"kv_bits": 2})
    with pytest.raises(JobError, match="kv_cache: unknown q_bits '8'"):
        load_model(bitnet_folder(tmp_path), kv_cache={"kv_bits": 4, "q_bits": 8})


def test_gradients_pass_what_is_rounded():
    model = bitnet(kv_cache={"kv_bits": 3, "q_bits": 4}).train()
    model.summed_loss(tokens(), tokens()).backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())
