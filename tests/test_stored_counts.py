"""Bytes of stored weights: counted once, exactly, and those of the values however they came there."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from paperlm_kernels.stored import PackedStore, convert, weight_bytes
from support_stored import CodedStore, ZippedStore, build
from torch import nn

BF16 = torch.bfloat16


def test_bytes_are_counted_once_and_exactly():
    model = build("llama", tie_word_embeddings=True)
    done = convert(model, ZippedStore, "all")
    found = weight_bytes(model)
    assert (found.stored, found.stored_weights) == (done.bytes_after, done.weights)
    assert found.plain == 2 * found.plain_weights == 2 * 5 * 32  # the norms
    assert found.gradients == 2 * (found.stored_weights + found.plain_weights)
    largest = model.lm_head.stored.store
    assert found.in_training(fused=True) == found.total + 2 * (2 * 96 * 32) + largest.nbytes
    assert found.in_training(fused=False) == found.total + found.gradients


def test_of_updates_that_end_later_the_largest_weights_count(monkeypatch):
    """As many as may be under way on a device that the host does not wait for."""
    layers = [nn.Linear(16, rows, bias=False) for rows in (80, 16, 48, 32, 64, 96)]
    model = nn.Sequential(*layers).bfloat16()
    convert(model, PackedStore)
    assert weight_bytes(model).under_way == 0
    monkeypatch.setattr("paperlm_kernels.stored.report.runs_ahead", lambda device: True)
    assert weight_bytes(model).under_way == 2 * 16 * (48 + 64 + 80 + 96)


def test_what_stays_plain_is_not_counted_as_stored():
    model = build("llama", hidden_size=192, intermediate_size=256)
    done = convert(model, PackedStore)
    found = weight_bytes(model)
    kept = {n: p for n, p in model.named_parameters() if n not in done.names}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= kept.keys()
    assert (found.stored, found.stored_weights) == (done.bytes_after, done.weights)
    assert found.plain == 2 * found.plain_weights == sum(p.nbytes for p in kept.values())
    assert found.total == found.stored + found.plain and found.bits_per_weight == done.bits_per_weight


@pytest.mark.parametrize("profile", ["default", "fix4"])
def test_a_store_that_is_renewed_has_the_bytes_of_one_made_from_its_values(profile):
    torch.manual_seed(1)
    coded = partial(CodedStore, profile=profile)
    store = coded(torch.randn(200, 200, dtype=BF16))
    for scale in (0.5, 0.25, 0.01):
        store.write(torch.randn(200, 200, dtype=BF16) * scale)
    store.renew()
    assert store.packed.to_bytes() == coded(store.read()).packed.to_bytes()
