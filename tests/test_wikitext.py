"""Texts whose rows are called otherwise, or whose held-out split is, as Wikitext-2's."""

from __future__ import annotations

import json

import pytest
import yaml
from pydantic import ValidationError
from support_items import FULL_SETS, needs_full_sets

from paperlm.data.registry import DatasetEntry, data_fingerprint
from paperlm.data.settings import data_settings
from paperlm.data.sources import documents
from paperlm.data.texts import TextData, prepare_text, read_documents
from paperlm.data.tokenizer import TextTokenizer
from paperlm.errors import DataError

HUB = "hub:Salesforce/wikitext_2"
LOCAL = "local:wikitext2_test"
LINES = {
    "train": [" = A page = \n", " a line .\n"],
    "validation": ["of the other entry\n"],
    "test": [" = B = \n", "", " end .\n"],
}


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """The hub's layout, a file of lines a split."""
    folder = tmp_path / "mirror/Salesforce/wikitext"
    folder.mkdir(parents=True)
    files = []
    for split, lines in LINES.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        files.append({"split": split, "path": f"{split}.jsonl"})
    card = yaml.safe_dump({"configs": [{"config_name": "wikitext-2-raw-v1", "data_files": files}]})
    (folder / "README.md").write_text(f"---\n{card}---\n")
    monkeypatch.setenv("PAPERLM_HUB_MIRROR", str(tmp_path / "mirror"))


def test_the_split_that_an_entry_holds_out_is_read_as_validation(mirror, tmp_path):
    prepared = prepare_text(TextData(dataset=HUB, documents=3), tmp_path / "out")
    assert read_documents(prepared) == LINES["test"]
    assert list(documents(HUB, "train")) == LINES["train"]
    assert data_fingerprint(HUB)["held_out"] == "test", "it is part of what a job's name is made of"
    other = prepare_text(TextData(dataset=f"{HUB}_validation", documents=1), tmp_path / "other")
    assert read_documents(other) == LINES["validation"]


@needs_full_sets
def test_the_test_split_has_its_62_pages_and_241211_words(tmp_path):
    """245,569 tokens are published for the edition with <unk>; 4,358 of them are ends of lines."""
    pages = read_documents(prepare_text(TextData(dataset=LOCAL, documents=62), tmp_path, FULL_SETS))
    assert len("\n".join(pages).split()) == 245_569 - 4_358
    assert all(page.lstrip().startswith("= ") for page in pages)


def test_a_text_without_training_documents_is_refused_to_train_on():
    settings = {
        "dataset": LOCAL, "tokenizer": "bpe1024", "vocab_size": 1024, "seq_len": 32, "example": "split",
        "train_examples": 5, "validation_tokens": 50,
    }  # fmt: skip
    with pytest.raises(DataError, match="wikitext2_test' has validation documents alone, none to train on"):
        data_settings(settings)


def test_what_names_a_texts_rows_and_splits_is_no_key_of_a_set_of_items():
    about = dict.fromkeys(("summary", "revision", "licence", "citation"), "toy")
    file = {"path": "a.jsonl", "sha256": "0" * 64, "bytes": 1}
    with pytest.raises(ValidationError, match="text_field and held_out are of a text"):
        DatasetEntry(source="local", fields=["question"], files={"test": [file]}, text_field="page", **about)


def test_documents_of_an_unknown_text_are_refused_with_the_nearest_name():
    with pytest.raises(ValidationError, match="unknown dataset 'c4_sampel'; did you mean 'c4_sample'"):
        TextData(dataset="bundled:c4_sampel", documents=1)


@needs_full_sets
def test_the_pieces_of_t5_spell_its_words(tmp_path):
    pages = read_documents(prepare_text(TextData(dataset=LOCAL, documents=62), tmp_path, FULL_SETS))
    tokenizer = TextTokenizer("t5")
    assert tokenizer.words(tokenizer.encode(pages)) == 245_569 - 4_358
