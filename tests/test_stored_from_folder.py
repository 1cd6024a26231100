"""A model folder whose weights are stored one by one as they are read: bit by bit what reading it whole leaves."""

from __future__ import annotations

import gc
import json
import shutil
import weakref

import pytest
import torch
import transformers
from paperlm_kernels.stored import RawStore, StoredLinear, convert, stored_weights, weight_bytes
from safetensors.torch import load_file, save_file
from support import smoke_run
from support_model import tiny_folder
from support_models import fresh
from support_stored import MODELS
from torch import nn

from paperlm.errors import JobError
from paperlm.evaluate import stores
from paperlm.evaluate.stores import load_into_stores, put_into_stores
from paperlm.jobs.stored_perplexity import StoredPerplexity
from paperlm.models.folder import load_model
from paperlm.models.shell import Shell, parameters_on_meta, shell_of

WIDE = {
    "llama": {"hidden_size": 192, "intermediate_size": 256},
    "gpt2": {"n_embd": 192},
    "gpt_neo": {"hidden_size": 192},
}
"Wide enough that matrices are coded."
STORES = [
    {"store": "plain"},
    {"store": "packed"},
    {"store": "packed", "policy": "all"},
    {"store": "packed", "mant_bits": 3, "block_norm": 512},
    {"store": "packed", "mant_bits": 0, "block_norm": 64, "norm_semantics": "authors_v1"},
    {"store": "int8"},
    {"store": "nf4"},
    {"store": "fp4_double"},
]


def job(**settings):
    return StoredPerplexity(of=smoke_run(), text="bundled:c4_sample", documents=4, window=32, **settings)


def folder_of(root, name="llama", dtype=torch.bfloat16, shards="5GB", **changes):
    cls, settings = MODELS[name]
    model = fresh(cls, **settings | WIDE[name] | changes).to(dtype)
    model.save_pretrained(root, max_shard_size=shards)
    return root


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    return {
        "llama": folder_of(root / "llama", shards="200KB"),
        "tied llama": folder_of(root / "tied", tie_word_embeddings=True),
        "llama in float32": folder_of(root / "float32", dtype=torch.float32),
        "gpt2": folder_of(root / "gpt2", "gpt2", shards="300KB"),
        "gpt_neo": folder_of(root / "gpt_neo", "gpt_neo"),
        "decoder": tiny_folder(root / "decoder"),
    }


def whole(folder, settings):
    return put_into_stores(load_model(folder, dtype=torch.bfloat16), job(**settings), "cpu")


def parts(model):
    """Name -> values of all that a model has, stored weights and buffers included."""
    stored = {weight.handle: weight.store for weight in stored_weights(model).values()}
    found = {n: stored[p].read() if p in stored else p for n, p in model.named_parameters(remove_duplicate=False)}
    return found | dict(model.named_buffers())


NAMES = ["llama", "tied llama", "llama in float32", "gpt2", "gpt_neo", "decoder"]
CASES = [
    pytest.param(name, settings, id="-".join(map(str, [name, *settings.values()])))
    for name in NAMES
    for settings in STORES
    if (name, settings["store"]) != ("gpt2", "int8")  # INT8 multiplies by matrices (out, in), and gpt2's are (in, out)
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_every_bit_and_every_byte_is_that_of_a_model_that_was_read_whole(name, settings, folders, monkeypatch):
    if settings["store"] not in ("plain", "packed"):
        pytest.importorskip("bitsandbytes")
    expected = whole(folders[name], settings)
    monkeypatch.setattr("paperlm.models.folder.load_model", lambda *given, **options: pytest.fail("read whole"))
    found = load_into_stores(folders[name], job(**settings), "cpu")
    ours, theirs = parts(found), parts(expected)
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for key, value in theirs.items():
        assert (ours[key].dtype, ours[key].device) == (value.dtype, value.device), key
        assert torch.equal(ours[key], value), key
    assert weight_bytes(found) == weight_bytes(expected)
    assert [m.training for m in found.modules()] == [m.training for m in expected.modules()]
    assert [p.requires_grad for p in found.parameters()] == [p.requires_grad for p in expected.parameters()]
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        assert torch.equal(found(input_ids=ids).logits, expected(input_ids=ids).logits)


def test_a_head_that_is_the_embedding_is_read_once_and_stays_it(folders):
    for settings in ({"store": "plain"}, {"store": "packed"}):
        model = load_into_stores(folders["tied llama"], job(**settings), "cpu")
        assert model.lm_head.weight is model.model.embed_tokens.weight
    stored = load_into_stores(folders["tied llama"], job(store="packed", policy="all"), "cpu")
    assert len({weight.store for weight in stored_weights(stored).values()}) == 2 * 7 + 1


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_beside_stored_weights_no_more_than_one_plain_one_is_there_and_what_stays_plain(name, folders, monkeypatch):
    living: list[weakref.ref] = []
    most, read = [], Shell.read

    def watched(shell, weight, device):
        gc.collect()
        there = sum(ref() is not None for ref in living)
        made = sum(p.nbytes for p in shell.model.parameters() if not p.is_meta)
        values = read(shell, weight, device)
        memory = values.view(torch.int16).numpy().copy()  # an array is there as long as a tensor lies in it
        living.append(weakref.ref(memory))
        most.append((there, made, values.nbytes))
        return torch.from_numpy(memory).view(torch.bfloat16)

    monkeypatch.setattr(Shell, "read", watched)
    model = load_into_stores(folders[name], job(store="packed", policy="all"), "cpu")
    assert living[-1]() is not None, "what stays plain stays there"
    sizes = weight_bytes(model)
    stored = len(stored_weights(model))
    assert stored > 8 and all(there == 0 for there, _, _ in most[:stored]), "a value is gone when the next is read"
    assert all(made == 0 for _, made, _ in most[:stored]), "and no parameter has been made"
    assert sum(size for _, _, size in most[stored:]) < 0.02 * sizes.total, "the rest are norms and biases"


def test_a_shell_has_no_weights_and_the_buffers_of_the_model(folders):
    model = shell_of(folders["llama"], torch.bfloat16).model
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    theirs = dict(load_model(folders["llama"], dtype=torch.bfloat16).named_buffers())
    assert theirs and all(torch.equal(b, theirs[name]) for name, b in model.named_buffers())
    assert nn.Linear(2, 2).weight.device.type == "cpu", "modules that are made later have values"


def test_modules_have_values_again_behind_an_error():
    with pytest.raises(ZeroDivisionError), parameters_on_meta():
        assert nn.Linear(2, 2).weight.is_meta
        1 / 0  # noqa: B018
    assert not nn.Linear(2, 2).weight.is_meta


def test_an_architecture_that_keeps_some_weights_in_float32_is_read_whole(folders, monkeypatch):
    """As transformers' mixtures of experts keep their routers: read one by one they would be bfloat16."""
    monkeypatch.setattr(transformers.LlamaPreTrainedModel, "_keep_in_fp32_modules_strict", {"input_layernorm"})
    model = load_model(folders["llama"], dtype=torch.bfloat16)
    assert model.model.layers[0].input_layernorm.weight.dtype == torch.float32
    assert shell_of(folders["llama"], torch.bfloat16) is None


def edited(folder, root, edit):
    copy = shutil.copytree(folder, root)
    weights = load_file(copy / "model.safetensors")
    edit(weights)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_a_folder_that_holds_a_head_beside_the_embedding_that_it_is_tied_to_is_read_whole(folders, tmp_path):
    embedding = "model.embed_tokens.weight"
    folder = edited(folders["tied llama"], tmp_path / "both", lambda w: w.update({"lm_head.weight": w[embedding] + 0}))
    assert shell_of(folder, torch.bfloat16) is None
    ours, theirs = load_into_stores(folder, job(store="packed"), "cpu"), whole(folder, {"store": "packed"})
    assert all(torch.equal(parts(ours)[name], value) for name, value in parts(theirs).items())


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda w: w.pop("model.norm.weight"), r"weights do not fit the model: model\.norm\.weight"),
        (lambda w: w.update(extra=torch.ones(1)), "weights do not fit the model: extra"),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(3)}),
            r"do not fit the model: model\.norm\.weight is \(3,\) and",
        ),
    ],
    ids=["missing", "left over", "of another size"],
)
def test_weights_that_do_not_fit_are_told_as_of_a_model_that_is_read_whole(edit, words, folders, tmp_path):
    with pytest.raises(JobError, match=words):
        load_into_stores(edited(folders["tied llama"], tmp_path / "edited", edit), job(store="packed"), "cpu")


def test_files_that_are_cut_or_missing_are_told_with_the_remedy(folders, tmp_path):
    copy = shutil.copytree(folders["llama"], tmp_path / "cut")
    shard = (
        copy / sorted(set(json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"].values()))[1]
    )
    shard.write_bytes(shard.read_bytes()[:-8])
    for break_further in (lambda: None, shard.unlink):
        break_further()
        with pytest.raises(JobError, match="make it again"):
            load_into_stores(copy, job(store="packed"), "cpu")
    with pytest.raises(JobError, match="make the model first"):
        load_into_stores(tmp_path / "nowhere", job(store="packed"), "cpu")


def on_meta():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def test_a_model_on_the_meta_device_is_stored_from_values_that_are_given_by_name():
    values = {"0.weight": torch.randn(3, 4), "2.weight": torch.randn(2, 3)}
    model, asked = on_meta(), []
    done = convert(model, RawStore, values=lambda name: asked.append(name) or values[name])
    assert done.names == ("0.weight", "2.weight") == tuple(asked) and isinstance(model[0], StoredLinear)
    assert all(torch.equal(weight.store.read(), values[name]) for name, weight in stored_weights(model).items())
    assert model[0].bias.is_meta, "what stays plain is the caller's to load"


def test_values_of_another_shape_or_none_are_refused_with_the_weights_name():
    with pytest.raises(ValueError, match=r"values of shape \(4, 3\) for 0\.weight of \(3, 4\)") as told:
        convert(on_meta(), RawStore, values=lambda name: torch.ones(4, 3))
    assert "0.weight could not be stored; 0 weights before it are" in told.value.__notes__[0]
    with pytest.raises(ValueError, match="load the checkpoint before it is stored"):
        convert(on_meta(), RawStore)


def test_jobs_about_stored_weights_read_their_folder_one_weight_after_the_other(folders):
    from paperlm.jobs import stored_lm_eval, stored_perplexity, stored_speed

    assert {module.load_into_stores for module in (stored_perplexity, stored_lm_eval, stored_speed)} == {
        stores.load_into_stores
    }
