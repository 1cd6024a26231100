"""Published T5s: what they write and read behind the hub's door, with fewer bits, and with an adapter beside them."""

from __future__ import annotations

import importlib.util
import json
import math

import pytest
import torch
import transformers
from paperlm_kernels.stored import model_hash
from pydantic import ValidationError
from support_probe import register
from support_small_jobs import job

from paperlm.data import registry
from paperlm.data.items import prepare_items
from paperlm.data.model_files import _commit
from paperlm.data.tokenizer import TextTokenizer
from paperlm.errors import DataError, Interrupted
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.hub_model import HubModel
from paperlm.jobs.hub_model import run as read_from_hub
from paperlm.jobs.stored_answers import run as answer
from paperlm.jobs.text_to_sql import SHAPE, run
from paperlm.models.folder import load_model, save_model, transformers_tokenizer
from paperlm.plan.estimate import expectation
from paperlm.plan.project import Project
from paperlm.plan.workflow import Workflow
from paperlm.record.places import Places
from paperlm.record.record import read_record
from paperlm.run import Maker

QUIET = Machine(device="cpu", progress=False)
T5 = HubModel(name="hub:google-t5/t5-large")
ELEVEN = HubModel(name="hub:google-t5/t5-11b")
NO_SHAPE = dict.fromkeys(SHAPE)
TRANSLATION = {
    "dataset": "hub:wmt/wmt14", "split": "test", "items": 5, "prefix": "translate English to German: ",
    "tokenizer": "bpe1024", "source_length": 60, "target_length": 40,
}  # fmt: skip
AS_IT_IS = {"store": "plain", "mant_bits": 7, "block_norm": None, "questions": TRANSLATION}
PAIRS = [{"en": f"Number {i} is a house.", "de": f"Nummer {i} ist ein Haus."} for i in range(7)]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A small T5 with random weights, as hub_model leaves one."""
    torch.manual_seed(3)
    tokenizer = TextTokenizer("bpe1024")
    config = transformers.T5Config(
        vocab_size=1024, d_model=192, d_ff=256, d_kv=64, num_layers=1, num_heads=3, pad_token_id=tokenizer.pad,
        eos_token_id=tokenizer.eos, decoder_start_token_id=tokenizer.pad,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("published")
    model = transformers.T5ForConditionalGeneration(config).bfloat16()
    save_model(folder, model, transformers_tokenizer("bpe1024", 512))
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return prepare_items(job("text_to_sql").data()[0], tmp_path_factory.mktemp("sql"))


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    """The test split of WMT14 in a mirror of the hub."""
    folder = tmp_path / "mirror/wmt/wmt14/de-en"
    folder.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        lines = [json.dumps({"translation": pair}) for pair in (PAIRS if split == "test" else PAIRS[:1])]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    head = "---\nconfigs:\n- config_name: de-en\n  data_files:\n"
    splits = "".join(f"  - split: {s}\n    path: de-en/{s}.jsonl\n" for s in ("train", "validation", "test"))
    (folder.parent / "README.md").write_text(f"{head}{splits}---\n")
    monkeypatch.setenv("PAPERLM_HUB_MIRROR", str(tmp_path / "mirror"))
    return tmp_path


def trained(questions, published, work, model=None, machine=QUIET, **changes):
    one = job("text_to_sql", of=T5, **NO_SHAPE, **changes)
    return run(one, Inputs(data=(questions,), models={"of": published}, work=work, model=model), machine)


def test_training_begins_with_the_published_weights(questions, published, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    found = trained(questions, published, tmp_path / "work", model, peak_lr=1e-30)
    before, after = (load_model(folder, head="own", dtype=torch.bfloat16).bfloat16() for folder in (published, model))
    assert model_hash(before) == model_hash(after)
    assert found.metrics["parameters"] == sum(p.numel() for p in before.parameters())
    moved = trained(questions, published, tmp_path / "other", peak_lr=0.1)
    assert moved.metrics["weights_hash"] != found.metrics["weights_hash"]


def test_packed_and_raw_weights_of_a_published_model_end_in_the_same_bits(questions, published, tmp_path):
    one, other = (trained(questions, published, tmp_path / way, weights=way).metrics for way in ("raw", "packed"))
    assert one["weights_hash"] == other["weights_hash"] and one["bleu"] == other["bleu"]
    assert other["state_bytes"] < one["state_bytes"]


def test_a_published_model_has_its_own_shape_and_fresh_weights_need_one():
    with pytest.raises(ValidationError, match=r"n_heads: a trained model .of. has its own; leave n_heads out"):
        job("text_to_sql", of=T5, **{**NO_SHAPE, "n_heads": 3})
    with pytest.raises(ValidationError, match="fresh weights need a shape; give hidden_size, vocab_size, or a model"):
        job("text_to_sql", hidden_size=None, vocab_size=None)


def test_a_model_that_answers_no_text_by_another_is_refused():
    with pytest.raises(ValidationError, match=r"LlamaForCausalLM, which is no encoder with a decoder.*t5-large"):
        job("text_to_sql", of=HubModel(name="hub:meta-llama/Llama-2-7b-hf"), **NO_SHAPE)
    with pytest.raises(ValidationError, match=r"is a T5ForConditionalGeneration, which predicts no next token"):
        job("lm_eval", of=T5)


def test_pairs_of_sentences_are_read_from_within_an_item_and_translated(pairs, published, tmp_path):
    wanted = job("stored_answers", of=T5, **AS_IT_IS)
    data = prepare_items(wanted.data()[0], tmp_path / "data")
    found = answer(wanted, Inputs(data=(data,), models={"of": published}, work=tmp_path), QUIET)
    assert found.metrics["questions"] == 5

    tokenizer, model = TextTokenizer("bpe1024"), load_model(published, head="own", dtype=torch.bfloat16).bfloat16()
    losses = []
    for start in range(0, 5, 3):  # as written out, one batch after the other
        some = PAIRS[start : min(start + 3, 5)]
        sources = [torch.tensor(ids) for ids in tokenizer.encode([TRANSLATION["prefix"] + one["en"] for one in some])]
        targets = [torch.tensor(ids) for ids in tokenizer.encode([one["de"] for one in some])]
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(sources, batch_first=True, padding_value=tokenizer.pad)
        mask = pad([torch.ones_like(one) for one in sources], batch_first=True)
        labels = pad(targets, batch_first=True, padding_value=-100)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask, labels=labels).logits.double()
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())
    assert found.metrics["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


def test_an_item_without_what_the_registry_promises_is_named(pairs, tmp_path):
    (pairs / "mirror/wmt/wmt14/de-en/test.jsonl").write_text(json.dumps({"translation": {"en": "One."}}))
    wanted = job("stored_answers", of=T5, **AS_IT_IS)
    with pytest.raises(DataError, match=r"wmt/wmt14, test split, item 1: item without 'translation\.de'"):
        prepare_items(wanted.data()[0], tmp_path / "data")


def test_questions_are_of_a_model_from_elsewhere_alone():
    with pytest.raises(ValidationError, match="questions say what a hub_model reads: set them"):
        job("stored_answers", of=T5)
    with pytest.raises(ValidationError, match="this one reads those of its own set: leave them out"):
        job("stored_answers", questions=TRANSLATION)
    with pytest.raises(ValidationError, match="no field 'question'"):
        job("stored_answers", of=T5, questions={**TRANSLATION, "dataset": "bundled:hellaswag"})


def test_a_t5_is_read_with_the_blocks_of_encoder_and_decoder(published, tmp_path, monkeypatch):
    from paperlm.data.model_files import prepare_model_files

    (tmp_path / "google-t5").mkdir()
    (tmp_path / "google-t5/t5-large").symlink_to(published)
    monkeypatch.setenv("PAPERLM_HUB_MIRROR", str(tmp_path))
    manifest = prepare_model_files(T5.data()[0], tmp_path / "data")
    target = tmp_path / "model"
    target.mkdir()
    found = read_from_hub(T5, Inputs(data=(manifest,), work=tmp_path, model=target), QUIET)
    assert found.metrics["blocks"] == 2
    assert model_hash(load_model(target, head="own")) == model_hash(load_model(published, head="own"))


@pytest.fixture
def unread(monkeypatch):
    """T5 11B, as if nothing here could read it."""
    said = {
        "source": "hub",
        "architecture": "T5ForConditionalGeneration",
        "unreadable": "T5 11B is in a foreign format",
    }
    hub = registry.registry().models["google-t5/t5-11b"].hub
    register(monkeypatch, **{"google-t5/t5-11b": said | {"hub": hub}})


def test_a_model_that_cannot_be_read_is_blocked_with_the_reason(tmp_path, unread):
    assert ELEVEN.data() == []
    found = read_from_hub(ELEVEN, Inputs(work=tmp_path), QUIET)
    assert found.outcome == "blocked" and "foreign format" in found.reason


def test_jobs_that_wait_for_it_in_vain_are_counted_with_the_reason_before_any_starts(unread):
    project = Project({"scale": "paper", "run_missing": "yes"})
    jobs = [job for job in project.jobs_of("neuzip_table3b") if "t5-11b" in json.dumps(job.canonical())]
    said = expectation(Workflow(project), ["neuzip_table3b"], None, 4)
    assert f"{len(jobs) + 1} of these jobs end as blocked, without a number: T5 11B is in a foreign format" in said
    assert not [job for job in project.jobs_of("neuzip_table3b") if job.out_of_reach() and job not in jobs]


def test_a_job_on_it_is_blocked_with_the_reason(pairs, unread):
    wanted, places = job("stored_answers", of=ELEVEN, **AS_IT_IS), Places(pairs / "root", "smoke")
    Maker(places, QUIET).with_parents(wanted)
    record = read_record(places.root / places.made(wanted), wanted.job_id)
    assert record.outcome == "blocked" and "no model to work on (T5 11B is in a foreign format" in record.reason


def test_weights_of_a_pull_request_are_fetched_at_the_commit_that_is_declared(monkeypatch):
    import huggingface_hub

    commit = "0123456789ab" + "c" * 28
    api = type("Api", (), {"model_info": lambda self, name, revision: type("Info", (), {"sha": at[revision]})})
    monkeypatch.setattr(huggingface_hub, "HfApi", api)
    at = {"refs/pr/7": commit}
    hub = registry.ModelRepository(name="a/b", revision=commit, ref="refs/pr/7")
    assert _commit(hub) == commit
    at["refs/pr/7"] = "d" * 40
    with pytest.raises(DataError, match=f"refs/pr/7 is commit {'d' * 40} on the hub, not {commit}"):
        _commit(hub)
    for other in ("main", "refs/heads/x", "refs/pr/"):
        with pytest.raises(ValidationError):
            registry.ModelRepository(name="a/b", revision=commit, ref=other)


def test_columns_that_are_no_fields_of_a_set_are_refused():
    entry = registry.dataset_entry("hub:wmt/wmt14")[1]
    with pytest.raises(ValidationError, match=r"columns: answers is none of the set's `fields`"):
        registry.DatasetEntry(**{**entry.model_dump(), "columns": {"answers": "translation.de"}})
    assert registry.data_fingerprint("hub:wmt/wmt14")["columns"] == entry.columns


def test_an_adapter_without_bitsandbytes_is_blocked_with_the_remedy(questions, published, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = trained(questions, published, tmp_path, adapter="nf4")
    assert found.outcome == "blocked" and "pip install bitsandbytes" in found.reason


@pytest.mark.parametrize("types", ["int8", "fp4", "nf4", "nf4_double"])
def test_an_adapter_is_trained_beside_frozen_weights_and_goes_on_behind_a_kill(questions, published, tmp_path, types):
    unbroken = trained(questions, published, tmp_path / "unbroken", adapter=types)
    assert unbroken.outcome == "trained" and math.isfinite(unbroken.metrics["loss"])
    wanted = {"int8": (8, 8.2), "fp4": (4.25, 4.6), "nf4": (4.25, 4.6), "nf4_double": (4.125, 4.4)}[types]
    assert wanted[0] <= unbroken.metrics["bits_per_weight"] <= wanted[1]
    plain = load_model(published, head="own")
    assert unbroken.metrics["parameters"] == sum(p.numel() for p in plain.parameters())
    raw = trained(questions, published, tmp_path / "raw", optimizer="sgd")
    assert unbroken.metrics["state_bytes"] < raw.metrics["state_bytes"]
    stopped = Machine(device="cpu", progress=False, checkpoint_updates=1, stop_after=2)
    with pytest.raises(Interrupted):
        trained(questions, published, tmp_path / "killed", machine=stopped, adapter=types)
    again = trained(questions, published, tmp_path / "killed", adapter=types)
    assert again.metrics == unbroken.metrics and again.series == unbroken.series
