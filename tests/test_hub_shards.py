"""A model from elsewhere whose weights lie in several files: taken as it is where it can be, read where not."""

import json

import pytest
import safetensors.torch
import torch
import transformers
from support_hub import COMMIT, saved
from support_probe import new_model, register, save

from paperlm.data.model_files import ModelData, prepare_model_files
from paperlm.errors import JobError
from paperlm.models.folder import load_model, load_tokenizer
from paperlm.models.shell import Shell


@pytest.fixture
def sharded(tmp_path, monkeypatch):
    """Puts a model in several files of weights in a mirror, as a hub has a large one; returns the manifest of the data
    rule. `change`: what to do to the folder in the mirror."""

    def make(model, architecture="LlamaForCausalLM", change=lambda folder: None):
        source = save(tmp_path / "mirror/someone/large", model)
        (source / "model.safetensors").unlink()
        model.save_pretrained(source, max_shard_size="20KB")
        change(source)
        hub = {"name": "someone/large", "revision": COMMIT}
        register(monkeypatch, **{"someone/large": {"source": "hub", "architecture": architecture, "hub": hub}})
        monkeypatch.setenv("PAPERLM_HUB_MIRROR", str(tmp_path / "mirror"))
        return prepare_model_files(ModelData(model="hub:someone/large"), tmp_path / "data")

    return make


def test_a_model_in_several_files_comes_out_as_it_went_in_and_none_of_them_is_read(tmp_path, sharded, monkeypatch):
    model = new_model().bfloat16()
    model.generation_config.max_length = 77
    manifest = sharded(model)
    with monkeypatch.context() as patch:
        patch.setattr(Shell, "read", lambda *_: pytest.fail("read"))
        patch.setattr(transformers.LlamaForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("read"))
        found, target = saved(tmp_path, manifest, "hub:someone/large")
    assert found.metrics == {"parameters": sum(p.numel() for p in model.parameters()), "blocks": 3}
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 3 and all(path.samefile(manifest.parent / path.name) for path in files)
    loaded = load_model(target)
    assert loaded.dtype == torch.bfloat16 and loaded.generation_config.max_length == 77
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert load_tokenizer(target)("the")["input_ids"] == load_tokenizer(manifest.parent)("the")["input_ids"]


def of_float32(folder):
    """The configuration says float32 of weights in bfloat16."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))


def with_buffers_of_long_ago(folder):
    """As the second Llama's files were published: transformers computes these."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = "more.safetensors"
    index.write_text(json.dumps(content))
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    safetensors.torch.save_file(more, folder / "more.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("change", "dtype"), [(of_float32, "float32"), (with_buffers_of_long_ago, "bfloat16")])
def test_several_files_that_are_not_the_model_as_it_is_are_read(tmp_path, sharded, change, dtype):
    model = new_model().bfloat16()
    _, target = saved(tmp_path, sharded(model, change=change), "hub:someone/large")
    assert [path.name for path in target.glob("*.safetensors")] == ["model.safetensors"]
    loaded = load_model(target)
    assert loaded.dtype == getattr(torch, dtype)
    assert all(torch.equal(value.bfloat16(), model.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_several_files_of_another_architecture_or_without_a_weight_are_refused(tmp_path, sharded):
    with pytest.raises(JobError, match="the files hold a LlamaForCausalLM"):
        saved(tmp_path, sharded(new_model(), "MistralForCausalLM"), "hub:someone/large")

    def drop(folder):
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"] = {k: v for k, v in content["weight_map"].items() if k != "model.norm.weight"}
        index.write_text(json.dumps(content))
        for path in folder.glob("*.safetensors"):
            weights = safetensors.torch.load_file(path)
            if weights.pop("model.norm.weight", None) is not None:
                safetensors.torch.save_file(weights, path, metadata={"format": "pt"})

    with pytest.raises(JobError, match=r"weights do not fit LlamaForCausalLM: model\.norm\.weight"):
        saved(tmp_path, sharded(new_model(), change=drop), "hub:someone/large")
