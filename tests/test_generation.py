"""The decoder with a cache, padding and embeddings: it computes what it does on a row alone, and writes the same."""

import pytest
import torch
from support_model import (
    METHODS,
    MIX,
    SHARED,
    WIDTH,
    close,
    each,
    model_of,
    padded,
    tokens,
)

from paperlm.errors import SpecError


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@each([*METHODS, *SHARED])
def test_reading_in_pieces_with_a_cache_gives_the_logits_of_reading_at_once(norm):
    model, ids = model_of(norm), tokens()
    cache, pieces = None, []
    for piece in ids.split((3, 1, 5, 2), dim=1):
        out = model(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    close(torch.cat(pieces, 1), model(ids, use_cache=False).logits)
    close(model(ids, logits_to_keep=2).logits, torch.cat(pieces, 1)[:, -2:])


@each([*METHODS, *SHARED])
def test_greedy_generation_needs_neither_cache_nor_equal_lengths(norm):
    model = model_of(norm)
    model.generation_config.eos_token_id = None
    ids, mask, places = padded("left")
    options = {"max_new_tokens": 9, "do_sample": False}
    cached = model.generate(ids, attention_mask=mask, use_cache=True, **options)[:, ids.shape[1] :]
    recomputed = model.generate(ids, attention_mask=mask, use_cache=False, **options)[:, ids.shape[1] :]
    assert cached.shape == (3, 9) and len(cached.unique()) > 3
    assert torch.equal(cached, recomputed)
    for row, place in enumerate(places):
        alone = ids[row, place][None]
        for token in cached[row]:  # greedy decoding by hand, without generate, cache or padding
            assert model.lm_head(model.model.hidden(alone))[0, -1].argmax() == token
            alone = torch.cat((alone, token.view(1, 1)), 1)


@each([*METHODS, *SHARED])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_leaves_real_tokens_alone(norm, side):
    model, (ids, mask, places) = model_of(norm), padded(side)
    logits, training = model(ids, attention_mask=mask).logits, model.lm_head(model.model.hidden(ids))
    assert logits.isfinite().all()
    for row, place in enumerate(places):
        alone = model(ids[row, place][None]).logits[0]
        close(logits[row, place], alone)
        if side == "right":  # the training path has no mask: causality alone has to do it
            close(training[row, place], alone)


def test_generation_goes_on_from_embeddings():
    model, ids = model_of({"name": "scaled_embed", "base": MIX, "preset": "multiplier"}), tokens(2)
    embeds = model.model.embed_tokens(ids) * WIDTH**0.5
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(inputs_embeds=embeds, **options), model.generate(ids, **options)[:, 11:])


def test_a_method_that_leaks_the_future_generates_without_a_cache_what_it_was_trained_to():
    model, ids = model_of({"name": "group_ln", "preset": "authors_sequence"}).eval(), tokens(1, 7)
    assert model(ids, use_cache=True).past_key_values is None
    written = ids
    for _ in range(5):
        written = torch.cat((written, model(written, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None), written)
    with pytest.raises(SpecError, match="generate with use_cache=False"):
        model.generate(ids, max_new_tokens=2, use_cache=True)
