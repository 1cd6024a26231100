"""Stored weights under calls that plain ones answer or refuse: the same answer, or an error that says what to do."""

from __future__ import annotations

import copy
import pickle
import weakref
from types import MethodType

import pytest
import torch
from paperlm_kernels.stored import (
    LomoSgd,
    PackedStore,
    RawStore,
    convert,
    model_hash,
    plain_tensors,
    save_packed,
    sgd_update,
    stored_weights,
)
from support_ternary import normal
from torch import nn
from torch.nn.utils import prune

X = normal(8, 64, dtype=torch.bfloat16)


def layers() -> nn.Sequential:
    """Two layers of 64 x 64 in bfloat16."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64)).bfloat16()


def loss(model, x=X):
    return model(x).float().square().mean()


def stored(store=RawStore, **options):
    model = layers()
    convert(model, store)
    return model, LomoSgd(model, lr=0.5, **options)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("way", ["grad", "inputs"])
@pytest.mark.parametrize("policy", ["paper", "all"])
def test_gradients_of_an_input_alone_leave_no_gradient_at_the_weights(way, policy, fused):
    """As in saliency and adversarial examples: the step behind is the one of a model that was not asked."""
    hashes = []
    for asked in (False, True):
        model = nn.Sequential(nn.Embedding(16, 64).bfloat16(), *layers())
        with torch.no_grad():
            model[0].weight.copy_(normal(16, 64, seed=1))
        convert(model, RawStore, policy)
        optimizer, ids = LomoSgd(model, lr=0.5, fused=fused), torch.arange(8)
        if asked:
            x = X.clone().requires_grad_()
            score = model[1:](x + model[0](ids)).float().square().mean() * 100
            torch.autograd.grad(score, x) if way == "grad" else score.backward(inputs=[x])
            assert all(weight.gradient is None and not weight.rows for weight in stored_weights(model).values())
        loss(model, ids).backward()
        optimizer.step()
        hashes.append(model_hash(model))
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("store", [RawStore, PackedStore])
def test_a_backward_pass_through_weights_that_have_changed_is_refused_as_of_plain_ones(store):
    model, optimizer = stored(store)
    x = X.clone().requires_grad_()
    first, second = loss(model, x), loss(model, x)
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="has changed since the forward pass"):
        second.backward()
    optimizer.zero_grad()
    kept = loss(model, x)
    model.load_state_dict(layers().state_dict())
    with pytest.raises(RuntimeError, match="has changed since the forward pass"):
        kept.backward()


def test_a_head_whose_weight_changed_as_an_embedding_refuses_a_backward_pass_of_before():
    """An embedding's update stores rows alone."""
    embedding, head = nn.Embedding(16, 64).bfloat16(), nn.Linear(64, 16, bias=False).bfloat16()
    head.weight = embedding.weight
    model = nn.ModuleList([embedding, head])
    convert(model, RawStore, "all")
    optimizer = LomoSgd(model, lr=0.5)
    stale = model[1](X.clone().requires_grad_()).float().sum()
    model[0](torch.arange(8)).float().sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="has changed since the forward pass"):
        stale.backward()


def test_the_models_zero_grad_drops_gradients_that_wait_for_a_step():
    hashes = []
    for dropped in (False, True):
        model, optimizer = stored(fused=False)
        if dropped:
            loss(model, X * 2).backward()
            model.zero_grad()
        loss(model).backward()
        optimizer.step()
        hashes.append(model_hash(model))
    assert hashes[0] == hashes[1]


def test_gradients_of_several_passes_add_up_where_they_wait_for_a_step():
    model, optimizer = stored(fused=False)
    plain = layers()
    for x in (X, X * 2):
        loss(model, x).backward()
        loss(plain, x).backward()
    optimizer.step()
    sgd_update(plain[0].weight.data, plain[0].weight.grad, 0.5)
    assert torch.equal(plain_tensors(model)["0.weight"], plain[0].weight)


def test_a_parameter_that_took_the_weights_place_is_refused_and_loading_by_assignment_puts_none_there():
    model, optimizer = stored()
    values = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    assert torch.equal(plain_tensors(model)["0.weight"], values["0.weight"])
    optimizer.close()
    optimizer = LomoSgd(model, lr=0.5)
    loss(model).backward()
    optimizer.step()
    assert not torch.equal(plain_tensors(model)["0.weight"], values["0.weight"])
    zeros = {"0.weight": torch.zeros(64, 64, dtype=torch.bfloat16)}
    with pytest.raises(RuntimeError, match="was replaced or filled"):
        torch.func.functional_call(model, zeros, X)
    model[0].weight.data = zeros["0.weight"]
    with pytest.raises(RuntimeError, match="was replaced or filled"):
        model(X)


@pytest.mark.parametrize("write", [nn.init.zeros_, nn.init.normal_, lambda weight: weight.copy_(X)])
def test_writing_into_the_parameter_of_a_stored_weight_is_refused(write):
    model, _ = stored()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"0\.weight is in a store"):
        write(model[0].weight)


def test_copies_in_the_middle_of_a_training_wait_for_an_optimizer_of_their_own():
    model, optimizer = stored(fused=False)
    loss(model).backward()
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 (its own)
        assert torch.equal(made(X), model(X)) and type(made[0].weight) is type(model[0].weight)
        with pytest.raises(RuntimeError, match=r"0\.weight is in a store"):
            made[0].weight.sum()
        with pytest.raises(RuntimeError, match="no optimizer takes"):
            loss(made).backward()
        own = LomoSgd(made, lr=0.5, fused=False)
        loss(made).backward()
        own.step()
    optimizer.step()
    assert model_hash(made) == model_hash(model)


def test_layers_that_are_not_what_their_class_says_are_left_and_named():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 64))
    model[0].forward = MethodType(lambda layer, x: 2 * nn.functional.linear(x, layer.weight, layer.bias), model[0])
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(model[1])
    prune.l1_unstructured(model[2], "weight", amount=0.5)
    right = model(X.float())
    result = convert(model, RawStore)
    assert result.names == ("3.weight",) and torch.equal(model(X.float()), right)
    assert result.left["0"] == "its forward was replaced" and "remove_weight_norm" in result.left["1"]
    assert "prune.remove" in result.left["2"]


@pytest.mark.parametrize("hook", ["backward_pre", "weight", "accumulated"])
def test_hooks_that_would_be_lost_are_refused(hook):
    model = layers()
    if hook == "backward_pre":
        model[0].register_full_backward_pre_hook(lambda *_: None)
    elif hook == "weight":
        model[0].weight.register_hook(lambda g: g)
    else:
        model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match="hooks, which would be lost"):
        convert(model, RawStore)


def test_a_gradient_of_another_shape_is_refused_before_anything_is_read():
    for shape in ((3, 2), (1,), (6,)):
        with pytest.raises(ValueError, match="a gradient of shape"):
            sgd_update(torch.zeros(2, 3), torch.ones(shape), 1.0)


@pytest.mark.parametrize("store", [RawStore, PackedStore])
def test_a_compiled_model_computes_what_its_layers_compute(store):
    model, optimizer = stored(store)
    other, its = stored(store)
    compiled = torch.compile(other, backend="aot_eager")
    for _ in range(3):
        loss(model).backward()
        optimizer.step()
        loss(compiled).backward()
        its.step()
    assert model_hash(other) == model_hash(model)


def test_a_layer_without_inputs_has_a_line_about_it():
    model = nn.Sequential(nn.Linear(0, 5))
    assert "0 values" in str(convert(model, RawStore))


def test_hashing_decodes_one_weight_after_the_other(monkeypatch):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))).bfloat16()
    convert(model, PackedStore)
    read, alive, counts = PackedStore.read, weakref.WeakSet(), []

    def counted(store):
        values = read(store)
        alive.add(values)
        counts.append(len(alive))
        return values

    monkeypatch.setattr(PackedStore, "read", counted)
    model_hash(model)
    assert counts == [1] * 4


@pytest.mark.parametrize("policy", ["paper", "all"])
@pytest.mark.parametrize("store", [RawStore, PackedStore])
def test_a_model_that_was_converted_within_inference_mode_trains_as_any_other(store, policy):
    hashes = []
    for mode in (False, True):
        model = nn.Sequential(nn.Embedding(16, 64).bfloat16(), *layers())
        with torch.no_grad():
            model[0].weight.copy_(normal(16, 64, seed=1))
        with torch.inference_mode(mode):
            convert(model, store, policy)
        optimizer = LomoSgd(model, lr=0.5)
        for _ in range(2):
            loss(model, torch.arange(8)).backward()
            optimizer.step()
        hashes.append(model_hash(model))
    assert hashes[0] == hashes[1]


def test_a_frozen_weight_stays_frozen_and_a_layer_in_evaluation_stays_in_it():
    model = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 32)).bfloat16()
    model[0].weight.requires_grad_(False)
    model[1].eval()
    convert(model, RawStore, "all")
    assert [layer.weight.requires_grad for layer in model] == [False, True]
    assert [layer.training for layer in model] == [True, False]


def test_a_parameter_that_is_called_as_a_block_of_a_packed_weight_is_not_saved_over_it(tmp_path):
    model, inner = nn.Sequential(nn.Linear(64, 64, bias=False).bfloat16()), nn.Module()
    convert(model, PackedStore, "all")
    inner.register_parameter("0", nn.Parameter(torch.ones(3)))
    model[0]._modules["weight"] = inner
    with pytest.raises(ValueError, match=r"0\.weight\.0 is called as a block of a packed weight is"):
        save_packed(model, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
