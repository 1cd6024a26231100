"""Training with stored weights is training with plain ones: the same bits in any store, and no gradient that stays."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from paperlm_kernels.neuzip import decode_errors
from paperlm_kernels.neuzip.errors import StreamError
from paperlm_kernels.stored import (
    LomoSgd,
    PackedStore,
    RawStore,
    convert,
    model_hash,
    plain_tensors,
    stored_weights,
    stores,
    weight_hashes,
)
from paperlm_kernels.stored.lomo import AHEAD
from support_stored import MODELS, STORES, CodedStore, ZippedStore, batch, build
from support_ternary import compiled_or_interpreted, normal
from torch.utils.checkpoint import checkpoint

LR = 0.3


def rate(step):
    return LR * (1 - step / 25)


def trained(name, store, steps, policy="paper", checkpointed=False, fused=True, **options):
    """Hashes of all parameters after every step, and the model."""
    model = build(name)
    convert(model, store, policy, **options)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer, hashes = LomoSgd(model, rate, fused=fused), []
    for step in range(steps):
        model(**batch(step)).loss.backward()
        optimizer.step()
        hashes.append(weight_hashes(model))
    return hashes, model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("store", STORES, ids=lambda s: s.__name__)
def test_twenty_steps_give_the_same_bits_as_with_raw_weights_after_each(name, store):
    raw, _ = trained(name, RawStore, 20)
    stored, model = trained(name, store, 20)
    assert stored == raw
    assert all(raw[n] != raw[n + 1] for n in range(19))
    assert all(p.grad is None for p in model.parameters())
    assert store is not CodedStore or {w.store.packed.header.codec.name for w in stored_weights(model).values()} == {
        "PFX"
    }
    assert all(w.gradient is None and not w.rows for w in stored_weights(model).values())


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_and_tied_heads_in_stores_change_no_bit_either(name):
    raw, _ = trained(name, RawStore, 6, policy="all")
    assert trained(name, ZippedStore, 6, policy="all")[0] == raw


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("keep_recomputed", [False, True])
def test_recomputed_activations_change_no_bit(name, keep_recomputed):
    raw, _ = trained(name, RawStore, 5)
    assert trained(name, ZippedStore, 5, checkpointed=True, keep_recomputed=keep_recomputed)[0] == raw


def test_an_update_uses_the_weight_of_the_backward_pass_which_uses_that_of_the_recomputation_if_it_is_kept(monkeypatch):
    reads, read = [], ZippedStore.read
    monkeypatch.setattr(ZippedStore, "read", lambda self: (reads.append(self), read(self))[1])
    counts = []
    for keep in (False, True):
        model = build("llama")
        names = convert(model, ZippedStore, keep_recomputed=keep).names
        model.gradient_checkpointing_enable({"use_reentrant": False})
        LomoSgd(model, LR)
        reads.clear()
        model(**batch(0)).loss.backward()
        counts.append(len(reads) / len(names))
    assert counts == [3, 2]


def test_no_weight_is_held_behind_the_backward_pass():
    model, first = build("llama"), torch.nn.Sequential(torch.nn.Linear(4, 4))
    for one in (model, first):
        convert(one, ZippedStore, keep_recomputed=True)
        LomoSgd(one, LR)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**batch(0)).loss.backward()
    # an input without a gradient: the backward pass needs no weight
    checkpoint(first, torch.ones(2, 4), use_reentrant=False).sum().backward()
    # a weight that is frozen, and so never updated
    frozen = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).requires_grad_(False)
    convert(frozen, ZippedStore, keep_recomputed=True)
    checkpoint(frozen, torch.ones(2, 4, requires_grad=True), use_reentrant=False).sum().backward()
    weights = [w for one in (model, first, frozen) for w in stored_weights(one).values()]
    assert all(w._recomputed is None and w._decoded is None for w in weights)


def test_a_weight_that_was_decoded_for_an_update_that_never_came_is_not_used_after_others_were_loaded(monkeypatch):
    model, values = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(4, 4, bias=False)), torch.full((4, 4), 2.0)
    convert(model, RawStore)
    optimizer = LomoSgd(model, LR)
    monkeypatch.setattr(LomoSgd, "_update", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    model.load_state_dict({"1.weight": values})
    optimizer.close()
    LomoSgd(model, 0.0)
    monkeypatch.undo()
    x = torch.ones(2, 4, requires_grad=True)
    model[1](x).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 4), 8.0))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_updates_that_end_while_others_have_begun_give_the_same_bits_and_none_is_left_behind_a_step(
    checkpointed, monkeypatch
):
    """On a card the host does not wait for lengths of streams; here nothing runs ahead, but updates end as late."""
    raw, _ = trained("llama", RawStore, 6)
    monkeypatch.setattr(stores, "runs_ahead", lambda device: True)
    model = build("llama")
    convert(model, CodedStore, keep_recomputed=True)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer, packed = LomoSgd(model, rate), [w.store for w in stored_weights(model).values()]
    for step in range(6):
        model(**batch(step)).loss.backward()
        assert sum(store._finish is not None for store in packed) == AHEAD < len(packed)
        if step == 2:
            copied = copy.deepcopy(model)  # has what was begun
            assert weight_hashes(copied) == weight_hashes(model) == raw[2]
        optimizer.step()
        assert all(store._finish is None for store in packed) and not optimizer._under_way
        assert weight_hashes(model) == raw[step]


def test_a_write_that_is_refused_at_its_end_leaves_the_weight_as_it_was_and_the_store_usable(monkeypatch):
    monkeypatch.setattr(stores, "runs_ahead", lambda device: True)
    good = normal((64, 600)).bfloat16()
    bad = good.clone()
    bad[3, 5] = float("nan")
    store = PackedStore(good, mant_bits=3, block_norm=512)
    before = store.read()
    store.write_later(bad)
    with pytest.raises(ValueError, match="cannot keep"):
        store.read()
    assert torch.equal(store.read(), before) and store.nbytes > 0
    store.write_later(2 * good)
    assert torch.equal(store.read(), 2 * before)


def test_descent_after_the_backward_pass_gives_the_bits_of_descent_within_it():
    assert trained("gpt_neo", RawStore, 6, fused=False)[0] == trained("gpt_neo", RawStore, 6)[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["paper", "all"])
def test_in_float32_it_is_the_descent_of_torch_on_plain_layers_up_to_rounding(name, policy):
    plain = build(name, torch.float32)
    model = copy.deepcopy(plain)
    convert(model, RawStore, policy)
    torch_sgd, ours = torch.optim.SGD(plain.parameters(), lr=LR), LomoSgd(model, LR)
    for step in range(3):
        losses = []
        for one in (plain, model):
            losses.append(one(**batch(step)).loss)
            losses[-1].backward()
        torch_sgd.step()
        torch_sgd.zero_grad()
        ours.step()
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    found = plain_tensors(model)
    for key, value in plain.named_parameters():
        torch.testing.assert_close(found[key], value.detach(), rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


def test_the_update_is_made_in_float32_and_rounded_once():
    from paperlm_kernels.stored import sgd_update

    w = torch.tensor([1.0, 1.0, 256.0], dtype=torch.bfloat16)
    g = torch.tensor([1.0, 3.0, 1.0], dtype=torch.bfloat16)
    # 1 - 0.001 and 256 - 0.001 lie nearest to what they were; a rate rounded to bfloat16 would not show here
    sgd_update(w, g, 0.001)
    assert w.tolist() == [1.0, 0.99609375, 256.0]
    # a product rounded to bfloat16 would be 2^-9, whose difference from 1 is a tie that goes to 1
    w, g = torch.ones(2, 1, dtype=torch.bfloat16)
    sgd_update(w, g, 2.0**-9 * (1 + 2.0**-10))
    assert w.item() == 0.99609375
    with pytest.raises(ValueError, match="contiguous"):
        sgd_update(torch.ones(3, 5).t(), torch.ones(5, 3), 0.1)


@compiled_or_interpreted
def test_the_kernel_of_an_update_gives_the_bits_of_pytorchs_products_and_differences(spot):
    from paperlm_kernels.stored import sgd_update

    # the interpreter rounds to bfloat16 wrongly, and is not asked to; float16 rounds the same way
    narrow = torch.bfloat16 if spot.device == "cuda" else torch.float16
    for dtype, count in ((narrow, 4099), (torch.float32, 1), (torch.float32, 2049)):
        w, g = normal(count, seed=1, dtype=dtype), normal(count, seed=2, dtype=dtype)
        for lr in (0.0, 0.1, 1.0 / 3.0):
            right, mine = w.clone(), w.to(spot.device, copy=True)
            sgd_update(right, g, lr, backend="reference")
            sgd_update(mine, g.to(spot.device), lr, backend=spot.backend)
            assert torch.equal(mine.cpu(), right), (dtype, count, lr)


def test_gradients_of_two_backward_passes_are_refused_and_the_second_changes_nothing():
    model = build("llama")
    convert(model, RawStore)
    optimizer = LomoSgd(model, LR)
    model(**batch(0)).loss.backward()
    before = model_hash(model)
    with pytest.raises(RuntimeError, match=r"before LomoSgd.step\(\).*in place of|instead of accumulating"):
        model(**batch(1)).loss.backward()
    assert model_hash(model) == before
    optimizer.step()
    model(**batch(1)).loss.backward()
    assert model_hash(model) != before


def test_damage_that_a_card_found_while_it_decoded_is_an_error_of_the_next_step():
    """A card leaves a word and does not wait for the host; here the word is written by hand."""
    model = build("llama")
    convert(model, CodedStore)
    optimizer = LomoSgd(model, LR)
    optimizer.step()
    decode_errors.word(torch.device("cpu")).fill_(1)
    with pytest.raises(StreamError, match="the packed tensor is damaged; load it again"):
        optimizer.step()
    optimizer.step()  # said once


def test_a_weight_that_is_used_twice_is_updated_once_with_the_sum_of_its_gradients():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Tanh())
    plain = copy.deepcopy(model)
    convert(model, RawStore)
    LomoSgd(model, LR)
    x = torch.randn(5, 4)
    model(model(x)).sum().backward()
    plain(plain(x)).sum().backward()
    expected = plain[0].weight - LR * plain[0].weight.grad
    torch.testing.assert_close(plain_tensors(model)["0.weight"], expected.detach())


def test_a_gradient_without_an_optimizer_is_an_error_and_frozen_weights_pass_gradients_on():
    model = build("llama")
    convert(model, RawStore)
    with pytest.raises(RuntimeError, match=r"make LomoSgd\(model, lr\) before the backward"):
        model(**batch(0)).loss.backward()
    model.requires_grad_(False)
    x = torch.randn(1, 3, 32, dtype=torch.bfloat16, requires_grad=True)
    model(inputs_embeds=x).logits.sum().backward()
    assert x.grad.abs().sum() > 0


def test_an_optimizer_names_what_it_cannot_train():
    model = build("llama")
    convert(model, RawStore)
    first = LomoSgd(model, LR)
    with pytest.raises(ValueError, match=r"another LomoSgd updates it; call its close\(\)"):
        LomoSgd(model, LR)
    first.close()
    LomoSgd(model, LR).close()
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="0 or above"):
            LomoSgd(model, wrong)
    with pytest.raises(ValueError, match="requires_grad_"):
        LomoSgd(model.requires_grad_(False), LR)
    rounded = build("llama")
    convert(rounded, partial(PackedStore, mant_bits=3, block_norm=512))
    with pytest.warns(UserWarning, match="none of the .* stored weights is trained: they are frozen"):
        LomoSgd(rounded, LR).close()
    with pytest.raises(ValueError, match="that rounds"):
        LomoSgd(rounded.requires_grad_(True), LR)


def test_rates_follow_a_function_a_scheduler_and_a_state_that_was_kept():
    model = build("llama")
    convert(model, RawStore)
    optimizer = LomoSgd(model, rate)
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    assert rates == [rate(0), rate(1), rate(2)]
    state = optimizer.state_dict()
    optimizer.close()
    again = LomoSgd(model, rate)
    again.load_state_dict(state)
    assert again.steps == 3 and again.param_groups[0]["lr"] == rate(3)
    again.close()
    scheduled = LomoSgd(model, 1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(scheduled, 1.0, 0.0, total_iters=4)
    scheduled.step()
    scheduler.step()
    assert scheduled.param_groups[0]["lr"] == 0.75
