"""Models from elsewhere: files checked, architecture and weights accounted for, and what comes out is what went in."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
import yaml
from gguf import GGUFWriter, TokenType
from pydantic import ValidationError
from support_hub import COMMIT, saved
from support_probe import file_entry, new_model, register, save

from paperlm.data.items import prepare_any
from paperlm.data.model_files import ModelData, model_files, prepare_model_files
from paperlm.data.registry import HERE
from paperlm.data.settings import data_settings
from paperlm.data.shards import load_manifest
from paperlm.data.sources import check_present
from paperlm.data.texts import TextData
from paperlm.errors import DataError, JobError
from paperlm.jobs.hub_model import HubModel
from paperlm.models import bitnet_checkpoint, llama2c
from paperlm.models.folder import load_model, load_tokenizer
from paperlm.record.record import DataUsed

RAW = yaml.safe_load((HERE / "registry.yaml").read_text(encoding="utf-8"))["models"]
SMOLLM2 = RAW["smollm2_135m_instruct"]
IDS = torch.tensor([[5, 9, 2, 77]])


@pytest.fixture
def local(tmp_path, monkeypatch):
    """Puts a model below local_data and registers it as local:toy; returns the folder of the data rule."""

    def make(model=None, **entry):
        folder = save(tmp_path / "local/models/toy", model or new_model())
        files = [file_entry(path, tmp_path / "local") for path in sorted(folder.iterdir())]
        entry = {"source": "local", "architecture": "LlamaForCausalLM", "files": files} | entry
        register(monkeypatch, toy=entry)
        return tmp_path / "data"

    return make


def prepared(folder, local_data):
    return prepare_model_files(ModelData(model="local:toy"), folder, str(local_data))


OF_NO_CLASS = [e["architecture"] for e in RAW.values() if "transformers has no class" in e.get("unreadable", "")]


def test_every_entry_names_licence_citation_architecture_and_a_pin_of_its_files():
    for entry in RAW.values():
        assert entry["licence"].strip() and entry["citation"].strip()
        if entry["architecture"] not in (bitnet_checkpoint.ARCHITECTURE, llama2c.ARCHITECTURE, *OF_NO_CLASS):
            assert issubclass(getattr(transformers, entry["architecture"]), transformers.PreTrainedModel)
        pins = [file["sha256"] for file in entry.get("files", [])] or [entry["hub"]["revision"]]
        assert all(len(pin) in (12, 40, 64) and int(pin, 16) for pin in pins)
        assert all(len(pin) != 12 or "first 12 digits" in entry["revision"] for pin in pins), "and says so"


def test_a_local_model_comes_out_as_it_went_in_with_its_tokenizer(tmp_path, local):
    model = new_model().bfloat16()
    manifest = prepared(local(model, labels=["a label"]), tmp_path / "local")
    found, target = saved(tmp_path, manifest)
    assert found.outcome == "measured" and found.labels == ["a label"]
    assert found.metrics == {"parameters": sum(p.numel() for p in model.parameters()), "blocks": 3}
    loaded = load_model(target)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    text = "Some text, of course."
    assert load_tokenizer(target).encode(text) == load_tokenizer(tmp_path / "local/models/toy").encode(text)
    stored = json.loads(manifest.read_text())
    assert stored["licence"] == "toy" and {f["file"] for f in stored["files"]} >= {"model.safetensors", "config.json"}


def test_preparing_again_replaces_what_is_there(tmp_path, local):
    folder = local()
    first = prepared(folder, tmp_path / "local").read_bytes()
    assert prepared(folder, tmp_path / "local").read_bytes() == first


def test_what_a_kill_left_of_a_manifest_is_no_file_of_the_model(tmp_path, local):
    folder = local()
    whole = prepared(folder, tmp_path / "local")
    text = whole.read_bytes()
    whole.rename(folder / ".manifest.json.tmp")
    assert prepared(folder, tmp_path / "local").read_bytes() == text
    assert {path.name for path in model_files(whole)} == {p.name for p in (tmp_path / "local/models/toy").iterdir()}


def test_a_local_model_without_its_folder_or_with_an_altered_file_is_refused_by_name(tmp_path, local):
    folder = local()
    with pytest.raises(DataError, match=r"local:toy' needs a folder.*local_data=<folder with models/>"):
        prepared(folder, "")
    path = tmp_path / "local/models/toy/config.json"
    path.write_text(path.read_text().replace("3", "4", 1))
    with pytest.raises(DataError, match=r"config\.json: sha256 .* altered"):
        prepared(folder, tmp_path / "local")
    path.unlink()
    with pytest.raises(DataError, match=r"config\.json: missing data file"):
        prepared(folder, tmp_path / "local")
    assert not (folder / "manifest.json").exists()


def test_a_prepared_file_that_was_altered_or_lost_is_found_before_it_is_read(tmp_path, local):
    manifest = prepared(local(), tmp_path / "local")
    path = manifest.parent / "model.safetensors"
    data = path.read_bytes()
    path.unlink()
    with pytest.raises(DataError, match=r"model\.safetensors: missing.*delete the folder"):
        model_files(manifest)
    path.write_bytes(data[:-1])
    with pytest.raises(DataError, match=r"model\.safetensors: .* truncated or altered.*delete the folder"):
        saved(tmp_path, manifest)


REFUSED = [
    ({"architecture": "MistralForCausalLM"}, r"hold a LlamaForCausalLM \(llama\), the registry declares Mistral"),
    ({"architecture": "LlamaForSequenceClassification"}, r"hold a LlamaForCausalLM \(llama\), the registry declares"),
    ({"architecture": "LlamaForCausalML"}, r"declares architecture 'LlamaForCausalML', unknown to transformers"),
]


@pytest.mark.parametrize(("entry", "message"), REFUSED, ids=[e["architecture"] for e, _ in REFUSED])
def test_another_architecture_than_the_declared_one_is_refused(tmp_path, local, entry, message):
    manifest = prepared(local(**entry), tmp_path / "local")
    with pytest.raises(JobError, match=message):
        saved(tmp_path, manifest)
    assert not list((tmp_path / "made").iterdir())


def change_weights(tmp_path, monkeypatch, change, **entry):
    """local:toy with weights that `change` altered."""
    path = tmp_path / "local/models/toy/model.safetensors"
    weights = safetensors.torch.load_file(path)
    change(weights)
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    files = [file_entry(path, tmp_path / "local") for path in sorted(path.parent.iterdir())]
    register(monkeypatch, toy={"source": "local", "architecture": "LlamaForCausalLM", "files": files} | entry)


def test_missing_weights_are_refused(tmp_path, local, monkeypatch):
    folder = local()
    change_weights(tmp_path, monkeypatch, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(JobError, match=r"do not fit LlamaForCausalLM: model\.layers\.1\.mlp\.up_proj\.weight"):
        saved(tmp_path, prepared(folder, tmp_path / "local"))


def test_weights_without_a_place_are_refused_unless_the_entry_says_that_they_are_unused(tmp_path, local, monkeypatch):
    folder = local()
    add = lambda w: w.update({"extra.head.weight": torch.ones(2)})  # noqa: E731
    change_weights(tmp_path, monkeypatch, add)
    with pytest.raises(JobError, match=r"do not fit LlamaForCausalLM: extra\.head\.weight"):
        saved(tmp_path, prepared(folder, tmp_path / "local"))
    change_weights(tmp_path, monkeypatch, add, unused_weights=["extra.*"])
    _, target = saved(tmp_path, prepared(folder, tmp_path / "local"))
    assert load_model(target).config.num_hidden_layers == 3


def test_a_hub_model_is_taken_from_a_mirror_and_pickles_and_code_stay_there(tmp_path, monkeypatch):
    source = save(tmp_path / "mirror/someone/bert", new_model(transformers.BertForMaskedLM))
    for name in ("pytorch_model.bin", "modeling.py"):
        (source / name).write_text("never read")
    hub = {"name": "someone/bert", "revision": COMMIT}
    register(monkeypatch, **{"someone/bert": {"source": "hub", "architecture": "BertForMaskedLM", "hub": hub}})
    monkeypatch.setenv("PAPERLM_HUB_MIRROR", str(tmp_path / "mirror"))
    manifest = prepare_model_files(ModelData(model="hub:someone/bert"), tmp_path / "data")
    assert {p.suffix for p in manifest.parent.iterdir()} == {".json", ".safetensors"}
    found, target = saved(tmp_path, manifest, "hub:someone/bert")
    assert found.metrics["blocks"] == 3 and load_model(target, head="own").config.model_type == "bert"
    (source / "model.safetensors").unlink()
    with pytest.raises(
        DataError, match="someone/bert has no weights as safetensors; `pickled: true` in the registry reads others"
    ):
        prepare_model_files(ModelData(model="hub:someone/bert"), tmp_path / "other")


def test_without_a_network_the_hub_is_named_with_the_way_around_it(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"bert-large-uncased' cannot be fetched.*PAPERLM_HUB_MIRROR"):
        prepare_model_files(ModelData(model="hub:google-bert/bert-large-uncased"), tmp_path / "data")
    assert not (tmp_path / "data/manifest.json").exists()


def test_the_name_of_a_model_says_its_files_and_how_they_are_read(local, monkeypatch):
    def names():
        job = HubModel(name="local:toy")
        assert job.slug() == "toy" and job.data()[0].data_id.startswith("toy-")
        return {job.job_id, job.data()[0].data_id}

    local()
    found = names()
    local(new_model(seed=1))
    found |= names()
    register(monkeypatch, toy={"source": "local", "architecture": "GPT2LMHeadModel", "files": SMOLLM2["files"]})
    found |= names()
    register(monkeypatch, toy={"source": "local", "architecture": "LlamaForCausalLM", "files": SMOLLM2["files"]})
    assert len(found | names()) == 8
    hub = HubModel(name="hub:google-bert/bert-large-uncased")
    assert hub.slug() == "bert-large-uncased" and "/" not in hub.job_id + hub.data()[0].data_id


UNKNOWN = [
    ("local:smollm2_135m_instrukt", r"unknown model 'smollm2_135m_instrukt'; did you mean 'smollm2_135m_instruct'"),
    ("hub:smollm2_135m_instruct", "is local:smollm2_135m_instruct, not hub:smollm2_135m_instruct"),
    ("smollm2_135m_instruct", "String should match pattern"),
]


@pytest.mark.parametrize(("name", "message"), UNKNOWN)
def test_an_unknown_model_is_refused_with_the_nearest_name(name, message):
    with pytest.raises(ValidationError, match=message):
        HubModel(name=name)


def write_gguf(path, model, architecture="llama"):
    """The model as llama.cpp stores it: query and key rows of each head interleaved for its rotary embedding."""
    c = model.config
    head = c.hidden_size // c.num_attention_heads
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_attention_heads)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [chr(0x100 + i) for i in range(c.vocab_size)]
    tokens[2] = tokens[0] + tokens[1]
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    names |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    weights = {k: v.float().numpy() for k, v in model.state_dict().items()}
    for ours, theirs in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")):
        writer.add_tensor(f"{theirs}.weight", weights[f"{ours}.weight"])
    for block in range(c.num_hidden_layers):
        for ours, theirs in names.items():
            w = weights[f"model.layers.{block}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                w = w.reshape(-1, 2, head // 2, c.hidden_size).swapaxes(1, 2).reshape(w.shape)
            writer.add_tensor(f"blk.{block}.{theirs}.weight", np.ascontiguousarray(w))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_gives_the_model_that_it_was_written_from(tmp_path, monkeypatch):
    model = new_model()
    folder = tmp_path / "local/models"
    folder.mkdir(parents=True)
    write_gguf(folder / "toy.gguf", model)
    files = [file_entry(folder / "toy.gguf", tmp_path / "local")]
    register(monkeypatch, toy={"source": "local", "architecture": "LlamaForCausalLM", "files": files})
    _, target = saved(tmp_path, prepared(tmp_path / "data", tmp_path / "local"))
    loaded = load_model(target)
    assert loaded.dtype == torch.float32 and not any(p.suffix == ".gguf" for p in target.iterdir())
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("qwen2", r"hold a \w+ \(qwen2\), the registry declares LlamaForCausalLM"),
        ("nosuch", "cannot read it as Llama.*nosuch"),
    ],
)
def test_a_gguf_file_of_another_architecture_is_refused(tmp_path, monkeypatch, architecture, message):
    path = tmp_path / "local/models/toy.gguf"
    path.parent.mkdir(parents=True)
    write_gguf(path, new_model(), architecture)
    files = [file_entry(path, tmp_path / "local")]
    register(monkeypatch, toy={"source": "local", "architecture": "LlamaForCausalLM", "files": files})
    with pytest.raises(JobError, match=message):
        saved(tmp_path, prepared(tmp_path / "data", tmp_path / "local"))
    assert not list((tmp_path / "made").iterdir())


def test_data_settings_of_models_and_texts_survive_json_and_are_prepared_by_kind(tmp_path, local):
    local()
    for settings in (ModelData(model="local:toy"), TextData(dataset="bundled:c4_sample", documents=3)):
        again = data_settings(json.loads(settings.model_dump_json()))
        assert again == settings and again.data_id == settings.data_id
        manifest = load_manifest(prepare_any(again, tmp_path / settings.data_id, str(tmp_path / "local")))
        assert manifest["data_id"] == settings.data_id and manifest["checksums"] == settings.fingerprint()
        assert set(DataUsed.model_fields) <= set(manifest) and manifest["settings"] == settings.model_dump()


def test_a_local_model_that_is_not_there_is_found_before_any_job(tmp_path, local):
    local()
    check_present("local:toy", str(tmp_path / "local"))
    check_present("hub:google-bert/bert-large-uncased", "")
    with pytest.raises(DataError, match=r"needs a folder.*local_data=<folder with models/>"):
        check_present("local:toy", "")
    (tmp_path / "local/models/toy/config.json").write_text("{}")
    with pytest.raises(DataError, match=r"config\.json: 2 bytes instead of \d+: truncated or altered"):
        check_present("local:toy", str(tmp_path / "local"))
    (tmp_path / "local/models/toy/config.json").unlink()
    with pytest.raises(DataError, match=r"'local:toy': .*config\.json is missing"):
        check_present("local:toy", str(tmp_path / "local"))


def test_a_folder_that_is_no_model_or_lacks_weights_is_refused_by_name(tmp_path):
    own = lambda folder: load_model(folder, head="own")  # noqa: E731
    with pytest.raises(JobError, match="nothing: no model folder"):
        own(tmp_path / "nothing")
    folder = save(tmp_path / "bert", new_model(transformers.BertForMaskedLM))
    assert type(own(folder)) is transformers.BertForMaskedLM
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    del weights["bert.encoder.layer.2.output.dense.weight"]
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(JobError, match=r"do not fit.*: bert\.encoder\.layer\.2\.output\.dense\.weight"):
        own(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertForWhatever"]}))
    with pytest.raises(JobError, match="names the architecture 'BertForWhatever', which neither"):
        own(folder)
