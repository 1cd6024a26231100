"""Weights that a hub has as a pickle alone become safetensors of the same values, and nothing in them is run."""

from __future__ import annotations

import json
import os

import pytest
import torch
import transformers
from pydantic import ValidationError
from safetensors.torch import load_file
from support_hub import COMMIT

from paperlm.data.model_files import ModelData, prepare_model_files
from paperlm.data.pickled import to_safetensors
from paperlm.data.registry import ModelEntry
from paperlm.errors import DataError

NAME = "google-t5/t5-11b"


class Command:
    """What a pickle can do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.fixture
def mirror(tmp_path, monkeypatch, model):
    """The folder of T5 11B in a mirror of the hub, with the configuration of a small one and no weights yet."""
    folder = tmp_path / "mirror" / NAME
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    (folder / "modeling_t5.py").write_text("raise SystemExit")
    monkeypatch.setenv("PAPERLM_HUB_MIRROR", str(tmp_path / "mirror"))
    return folder


def prepared(folder):
    return prepare_model_files(ModelData(model=f"hub:{NAME}"), folder)


@pytest.mark.parametrize("kept", ["of today", "before PyTorch 1.6", "shards"])
def test_the_weights_are_those_that_were_saved(tmp_path, mirror, model, kept):
    weights = model.state_dict()  # several names of one embedding, as published ones have
    if kept == "shards":
        names, index = sorted(weights), {}
        for number, part in enumerate((names[:20], names[20:]), start=1):
            file = f"pytorch_model-{number:05}-of-00002.bin"
            torch.save({name: weights[name] for name in part}, mirror / file)
            index |= dict.fromkeys(part, file)
        (mirror / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    else:
        torch.save(weights, mirror / "pytorch_model.bin", _use_new_zipfile_serialization=kept == "of today")
    manifest = prepared(tmp_path / "data")
    assert {path.suffix for path in manifest.parent.iterdir()} == {".json", ".safetensors"}
    read = transformers.T5ForConditionalGeneration.from_pretrained(manifest.parent)
    assert all(torch.equal(weight, weights[name]) for name, weight in read.state_dict().items())


def test_parts_of_one_tensor_and_views_are_stored_as_what_they_show(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    weights = {"whole": whole, "row": whole[1], "turned": whole.T, "again": whole, "half": whole.bfloat16()[:, ::2]}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    to_safetensors(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("new", [True, False])
def test_what_a_pickle_would_run_is_refused_by_name_and_not_run(tmp_path, mirror, new):
    weights = {"shared.weight": torch.zeros(2), "more": Command(tmp_path / "was here")}
    torch.save(weights, mirror / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    with pytest.raises(DataError, match=r"pytorch_model\.bin: holds more than weights.*use a copy as safetensors"):
        prepared(tmp_path / "data")
    assert not (tmp_path / "was here").exists() and not (tmp_path / "data/manifest.json").exists()
    assert (mirror / "pytorch_model.bin").exists()


@pytest.mark.parametrize(
    "found,said",
    [
        ([torch.zeros(2)], "holds a list, not weights by name"),
        ({"step": 3}, "'step' is a int, not a weight"),
        ({"model": {"w": torch.zeros(2)}}, "'model' is a dict, not a weight"),
        ({7: torch.zeros(2)}, "7 is a Tensor, not a weight with a name"),
    ],
)
def test_a_file_without_named_weights_is_refused(tmp_path, found, said):
    torch.save(found, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match=said):
        to_safetensors(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.98])
def test_a_truncated_file_is_refused(tmp_path, model, share, new):
    path = tmp_path / "pytorch_model.bin"
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=new)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(DataError, match="or is damaged"):
        to_safetensors(tmp_path)


def test_without_any_weights_the_error_says_what_was_looked_for(tmp_path, mirror):
    with pytest.raises(DataError, match=r"t5-11b has no weights as safetensors, nor as pytorch_model\*\.bin"):
        prepared(tmp_path / "data")


def test_files_of_other_sources_are_no_pickles():
    about = dict.fromkeys(("summary", "revision", "licence", "citation", "architecture"), "toy")
    file = {"path": "models/toy.bin", "bytes": 1, "sha256": "0" * 64}
    with pytest.raises(ValidationError, match="`pickled` is for a hub model"):
        ModelEntry(**about, source="local", files=[file], pickled=True)
    assert ModelEntry(**about, source="hub", hub={"name": "a/b", "revision": COMMIT}, pickled=True).pickled
