"""Where a model cannot be stored or saved, nothing of it is lost."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from paperlm_kernels.stored import LomoSgd, PackedStore, RawStore, convert, model_hash, save_packed
from support_stored import batch, build


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_store_that_cannot_be_made_leaves_a_model_that_computes_and_loses_no_value(architecture):
    model = build(architecture)
    given, before = batch(0), {name: p.detach().clone() for name, p in model.named_parameters()}
    last = [name for name in convert(copy.deepcopy(model), RawStore).names][-1]
    with torch.no_grad():
        dict(model.named_parameters())[last][0, 0] = torch.inf
    with pytest.raises(ValueError, match="NaN or infinity") as refused:
        convert(model, partial(PackedStore, mant_bits=3, block_norm=512))
    assert f"{last} could not be stored" in refused.value.__notes__[0]
    assert sum(p.numel() for p in model.parameters()) > 0
    model(**given)
    plain = {name: p for name, p in model.named_parameters() if p.numel()}
    assert last in plain and torch.equal(plain[last][1:], before[last][1:]), "what was not stored is as it was"
    with torch.no_grad():
        plain[last][0, 0] = 0.0
    assert convert(model, partial(PackedStore, mant_bits=3, block_norm=512)).names == (last,), "the rest is stored then"
    model(**given)


def test_a_save_that_is_broken_off_leaves_the_file_before(tmp_path, monkeypatch):
    model, path = build("llama"), tmp_path / "model.safetensors"
    convert(model, PackedStore)
    save_packed(model, path)
    before = path.read_bytes()

    def full(tensors, target, metadata):
        target.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="no space"):
        save_packed(model, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_names_to_leave_are_a_list_of_names_that_there_are():
    with pytest.raises(TypeError, match=r"leave=\['down_proj'\]"):
        convert(build("llama"), RawStore, leave="down_proj")
    with pytest.raises(ValueError, match="did you mean 'down_proj'"):
        convert(build("llama"), RawStore, leave=["down_prj"])


def test_a_policy_in_the_place_of_a_store_is_named_and_nothing_is_stored():
    model = build("llama")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError, match="the store 'all' is a str; give PackedStore"):
        convert(model, "all")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bool])
def test_ids_of_another_type_are_named_where_nn_embedding_refuses_them_too(dtype):
    model, ids = build("llama"), torch.ones(1, 4, dtype=dtype)
    with pytest.raises(RuntimeError):
        model.get_input_embeddings()(ids)
    convert(model, RawStore, "all")
    with pytest.raises(TypeError, match=rf"ids of {dtype}; .* ids.long\(\)"):
        model.get_input_embeddings()(ids)
    assert model.get_input_embeddings()(ids.int()).shape == (1, 4, model.config.hidden_size)


def test_an_update_under_autocast_has_the_weight_in_its_own_dtype():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16()
    other = copy.deepcopy(model)
    results = []
    for one, store in ((model, partial(PackedStore, raw="never")), (other, RawStore)):
        convert(one, store)
        optimizer = LomoSgd(one, 0.1)
        with torch.autocast("cpu", torch.float16):
            one(torch.ones(4, 64, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        results.append(model_hash(one))
    assert results[0] == results[1]


def test_a_save_that_fails_at_the_last_step_leaves_the_old_file(tmp_path, monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16()
    convert(model, partial(PackedStore, raw="never"), "all")
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"old")

    def fails(part):
        raise KeyError

    monkeypatch.setattr("paperlm_kernels.neuzip.safetensors_file.sort_metadata", fails)
    with pytest.raises(KeyError):
        save_packed(model, path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
