"""The data layer: registry, tokenizers, sources, preparation and its restart, shards and their order."""

from __future__ import annotations

import collections
import gzip
import hashlib
import itertools
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
import zstandard
from hypothesis import example as hypothesis_example
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from paperlm.data import registry as registry_module
from paperlm.data.prepare import prepare
from paperlm.data.registry import HERE, DatasetEntry, data_id, registry
from paperlm.data.shards import BatchOrder, TokenShards, load_manifest
from paperlm.data.sources import check_present, documents
from paperlm.data.tokenizer import TextTokenizer, examples, train_bpe
from paperlm.errors import DataError, SpecError

BUNDLED = HERE / "bundled/c4_sample.jsonl.gz"
SETTINGS = {
    "dataset": "bundled:c4_sample",
    "tokenizer": "bpe1024",
    "vocab_size": 1024,
    "seq_len": 64,
    "example": "truncate",
    "train_examples": 150,
    "validation_tokens": 3000,
}
RAW = yaml.safe_load((HERE / "registry.yaml").read_text(encoding="utf-8"))
TOY_TRAIN = [f"Document {n}: " + " ".join(f"word{n * k}" for k in range(1 + 7 * n % 23)) for n in range(9)]
TOY_VALIDATION = [f"Held out {n}. " + "more text follows " * (5 * n % 7) for n in range(6)]


def c4_texts(split):
    """Texts of the bundled corpus without the package: one text in ten, by its hash, is held out."""
    texts = [json.loads(line)["text"] for line in gzip.decompress(BUNDLED.read_bytes()).splitlines()]
    held_out = [int(hashlib.sha256(t.encode()).hexdigest(), 16) % 10 == 0 for t in texts]
    return [t for t, held in zip(texts, held_out, strict=True) if held == (split == "validation")]


def raw_tokenizer(name):
    return Tokenizer.from_file(str(HERE / f"tokenizers/{name}/tokenizer.json"))


def expected_rows(texts, seq_len, example):
    """Rows of bpe1024 from the tokenizers library and plain slicing."""
    raw = raw_tokenizer("bpe1024")
    if example == "truncate":
        raw.enable_truncation(seq_len - 1)
        return [[*e.ids, 1] for e in raw.encode_batch(texts)]
    whole = [[*e.ids, 1] for e in raw.encode_batch(texts)]
    pieces = [ids[k : k + seq_len] for ids in whole for k in range(0, len(ids), seq_len)]
    return [piece for piece in pieces if len(piece) > 1]


def stored_rows(folder, split):
    """All rows of a split straight from its .npy files."""
    return np.concatenate([np.load(path) for path in sorted(folder.glob(f"{split}-*.npy"))])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def pack(path, lines):
    """Lines (a str is a text, bytes are taken as they are) in the file's packing; returns its registry entry."""
    data = b"".join((x if isinstance(x, bytes) else json.dumps({"text": x}).encode()) + b"\n" for x in lines)
    if path.suffix == ".zst":  # two frames, as parallel packers write them
        packer = zstandard.ZstdCompressor()
        data = packer.compress(data[: len(data) // 2]) + packer.compress(data[len(data) // 2 :])
    elif path.suffix == ".gz":
        data = gzip.compress(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return {"path": path.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.fixture
def texts_folder(tmp_path):
    return tmp_path / "texts"


@pytest.fixture
def corpus(texts_folder, monkeypatch):
    """Registers the dataset local:toy and returns settings that use it."""

    def make(train=TOY_TRAIN, validation=TOY_VALIDATION, suffix=".jsonl.gz", **settings):
        files = {"train": train} if validation is None else {"train": train, "validation": validation}
        entry = DatasetEntry(
            source="local",
            summary="toy",
            revision="1",
            licence="CC0",
            citation="none",
            files={split: [pack(texts_folder / f"toy.{split}{suffix}", lines)] for split, lines in files.items()},
            validation_share=2 if validation is None else None,
        )
        extended = registry().model_copy(update={"datasets": {**registry().datasets, "toy": entry}})
        monkeypatch.setattr(registry_module, "registry", lambda: extended)
        return {**SETTINGS, "dataset": "local:toy", "seq_len": 16, **settings}

    return make


# The bundled corpus and the registry.


def test_the_bundled_files_have_the_registered_bytes_and_checksums():
    c4 = RAW["datasets"]["c4_sample"]
    for entry in [*c4["files"]["train"], *(t["file"] for t in RAW["tokenizers"].values())]:
        data = (HERE / entry["path"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["bytes"], entry["sha256"]), entry["path"]
    assert len(gzip.decompress(BUNDLED.read_bytes()).splitlines()) == c4["documents"] == 2178


def test_the_bundled_splits_have_1959_and_219_documents_and_no_text_in_common():
    train, validation = (list(documents("bundled:c4_sample", split)) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (1959, 219)
    assert (train, validation) == (c4_texts("train"), c4_texts("validation"))
    hashes = [{hashlib.sha256(t.encode()).digest() for t in texts} for texts in (train, validation)]
    assert not hashes[0] & hashes[1]
    assert len(hashes[0] | hashes[1]) == 2178


def test_every_registry_entry_names_its_licence_its_origin_and_what_pins_it():
    assert RAW["datasets"].keys() == registry().datasets.keys()
    assert RAW["tokenizers"].keys() == registry().tokenizers.keys()
    for entry in RAW["datasets"].values():
        assert entry["licence"].strip() and entry["citation"].strip() and entry["summary"].strip()
        pins = [f["sha256"] for files in entry.get("files", {}).values() for f in files] or [entry["hub"]["revision"]]
        assert all(len(pin) in (40, 64) and int(pin, 16) for pin in pins)
    for entry in RAW["tokenizers"].values():
        assert entry["licence"].strip() and entry["origin"].strip() and int(entry["file"]["sha256"], 16)


def test_bpe1024_comes_out_bit_equal_when_trained_again_on_the_training_documents(tmp_path):
    train_bpe(c4_texts("train"), 1024).save(str(tmp_path / "again.json"), pretty=False)
    assert (tmp_path / "again.json").read_bytes() == (HERE / "tokenizers/bpe1024/tokenizer.json").read_bytes()


# Tokenizers.


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.text())
@hypothesis_example("\r\n\t \u00a0\u2028\u200d\ufeff\x00")
@hypothesis_example("e\u0301 \u00e9 👩‍👩‍👧 𝔘𝔫𝔦 العربية 漢字 {\\<|>}")
def test_bpe1024_gives_every_text_back(text):
    tokenizer = TextTokenizer("bpe1024")
    (ids,) = tokenizer.encode([text])
    assert ids[-1] == 1 and ids.count(1) == 1 and 0 not in ids
    assert tokenizer.inner.decode(ids[:-1], skip_special_tokens=False) == text


def test_t5_gives_the_ids_known_from_its_documentation():
    tokenizer = TextTokenizer("t5")
    assert (tokenizer.pad, tokenizer.eos) == (0, 1)
    encoded = tokenizer.encode(["translate English to German: The house is wonderful.", ""])
    assert encoded == [[13959, 1566, 12, 2968, 10, 37, 629, 19, 1627, 5, 1], [1]]


def test_t5_puts_one_eos_after_each_real_document_and_no_sentinel_or_padding_into_it():
    texts = c4_texts("train")[::10]
    encoded = TextTokenizer("t5").encode(texts)
    assert len(encoded) == len(texts) == 196
    for ids in encoded:
        assert ids[-1] == 1 and ids.count(1) == 1 and 0 < min(ids) and max(ids) < 32000


def test_truncation_is_that_of_the_authors_tokenizer_call():
    """Their call lets the tokenizer append eos itself and truncate to max_length with it."""
    texts, raw = c4_texts("train")[:60], raw_tokenizer("t5")
    raw.enable_truncation(256)
    theirs = [e.ids for e in raw.encode_batch(texts, add_special_tokens=True)]
    ours = [row for ids in TextTokenizer("t5").encode(texts) for row in examples(ids, 256, "truncate")]
    assert ours == theirs
    assert {len(row) < 256 for row in ours} == {True, False}


def test_t5_reads_a_newline_as_a_blank_and_braces_backslash_and_less_as_unknown():
    tokenizer = TextTokenizer("t5")
    assert tokenizer.inner.token_to_id("<unk>") == 2
    newline, blank, *others = tokenizer.encode(["one\ntwo", "one two", "{", "}", "\\", "<"])
    assert newline == blank and 2 not in blank
    assert others == [[3, 2, 1]] * 4
    odd = [piece for piece in tokenizer.inner.get_vocab() if set(piece) & set("\n{}\\<")]
    assert sorted(odd) == sorted(["<pad>", "</s>", "<unk>", *(f"<extra_id_{n}>" for n in range(100))])


@pytest.mark.parametrize("name", ["bpe1024", "t5"])
def test_no_text_produces_the_padding_id(name):
    """Padding is told by its id: a padding id inside a document would be masked out of loss and attention."""
    tokenizer = TextTokenizer(name)
    try:
        (ids,) = tokenizer.encode(["an HTML page may say <pad> in its text"])
    except DataError:
        return
    assert tokenizer.pad not in ids


def test_a_t5_sentinel_in_a_text_is_refused(corpus, texts_folder, tmp_path):
    settings = corpus([*TOY_TRAIN, "Thank you <extra_id_0> me"], tokenizer="t5", vocab_size=32000)
    with pytest.raises(DataError, match=r"'<extra_id_0>' has id 32099"):
        prepare(settings, tmp_path / "out", str(texts_folder))
    assert not (tmp_path / "out/manifest.json").exists()


def test_the_refusal_of_a_sentinel_says_in_which_dataset_it_stands(corpus, texts_folder, tmp_path):
    settings = corpus(["Thank you <extra_id_0> me"], tokenizer="t5", vocab_size=32000)
    with pytest.raises(DataError, match=r"(local:|toy\.train)"):
        prepare(settings, tmp_path / "out", str(texts_folder))


# Examples.


@hypothesis_settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, 1023), max_size=40), st.integers(2, 12))
def test_truncate_keeps_the_first_ids_and_eos_and_leaves_short_documents_alone(body, seq_len):
    document = [*body, 1]
    (row,) = examples(list(document), seq_len, "truncate")
    if len(document) <= seq_len:
        assert row == document
    else:
        assert len(row) == seq_len and row[:-1] == document[: seq_len - 1] and row[-1] == 1


@hypothesis_settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, 1023), max_size=40), st.integers(2, 12))
def test_split_covers_every_id_once_in_order_but_for_a_lone_last_one(body, seq_len):
    document = [*body, 1]
    rows = list(examples(list(document), seq_len, "split"))
    lone = len(document) % seq_len == 1
    assert list(itertools.chain(*rows)) == document[: len(document) - lone]
    assert all(len(row) == seq_len for row in rows[:-1]) and all(2 <= len(row) <= seq_len for row in rows)


# Preparation.


@pytest.mark.parametrize("example", ["truncate", "split"])
def test_prepared_shards_hold_the_tokens_and_their_manifest_counts_them(example, tmp_path):
    settings = {**SETTINGS, "example": example}
    manifest = json.loads(prepare(settings, tmp_path, shard_rows=40).read_text())
    real, labels = {}, {}
    for split in ("train", "validation"):
        stored = stored_rows(tmp_path, split)
        rows = expected_rows(c4_texts(split), 64, example)[: len(stored)]
        assert stored.dtype == np.uint16 and stored.shape == (len(rows), 64)
        assert stored.tolist() == [row + [0] * (64 - len(row)) for row in rows]
        real[split] = [len(row) for row in rows]
        labels[split] = collections.Counter(itertools.chain(*(row[1:] for row in rows)))
        assert manifest[split]["rows"] == len(rows) and manifest[split]["tokens"] == sum(real[split])
        for shard in manifest[split]["shards"]:
            assert hashlib.sha256((tmp_path / shard["file"]).read_bytes()).hexdigest() == shard["sha256"]
            assert len(np.load(tmp_path / shard["file"])) == shard["rows"] <= 40
    assert len(real["train"]) == 150
    assert sum(real["validation"][:-1]) < 3000 <= sum(real["validation"])
    total = labels["train"].total() + 1024
    bits = sum(n * math.log((labels["train"][i] + 1) / total) for i, n in labels["validation"].items())
    assert manifest["unigram_perplexity"] == pytest.approx(math.exp(-bits / labels["validation"].total()), rel=1e-12)
    assert manifest["pad_id"] == 0 and manifest["eos_id"] == 1 and manifest["data_id"] == data_id(settings)
    assert not list(tmp_path.glob("*.progress.json"))


@pytest.mark.parametrize("example", ["truncate", "split"])
def test_small_shards_hold_the_rows_of_one_large_shard(example, tmp_path):
    settings = {**SETTINGS, "example": example}
    small, large = tmp_path / "small", tmp_path / "large"
    of_small, of_large = (load_manifest(prepare(settings, f, shard_rows=n)) for f, n in ((small, 7), (large, 65536)))
    for split in ("train", "validation"):
        assert len(of_large[split].pop("shards")) == 1 < len(of_small[split].pop("shards"))
        assert np.array_equal(stored_rows(small, split), stored_rows(large, split))
    assert of_small == of_large


class Killed(BaseException):
    """Not an Exception, so that nothing on the way mends it."""


@pytest.mark.parametrize("renamed", [True, False], ids=["after a rename", "before a rename"])
@pytest.mark.parametrize("ends", ["at the limits", "with the texts"])
@pytest.mark.parametrize("example", ["truncate", "split"])
def test_preparation_stopped_at_any_write_and_restarted_equals_an_unbroken_one(
    example, ends, renamed, corpus, texts_folder, tmp_path, monkeypatch
):
    limits = {"train_examples": 8, "validation_tokens": 60} if ends == "at the limits" else {"validation_tokens": 10**6}
    settings = corpus(example=example, **limits)
    replace, writes = os.replace, []
    monkeypatch.setattr(os, "replace", lambda *names: (writes.append(names), replace(*names)))
    prepare(settings, tmp_path / "unbroken", str(texts_folder), shard_rows=3)
    unbroken = contents(tmp_path / "unbroken")
    assert len(writes) >= 8
    different = []
    for last in range(len(writes)):
        folder, calls = tmp_path / f"stopped-{last}", itertools.count()

        def stop(source, target, last=last, calls=calls):
            stopped = next(calls) == last
            if renamed or not stopped:
                replace(source, target)
            if stopped:
                raise Killed

        monkeypatch.setattr(os, "replace", stop)
        with pytest.raises(Killed):
            prepare(settings, folder, str(texts_folder), shard_rows=3)
        monkeypatch.setattr(os, "replace", replace)
        prepare(settings, folder, str(texts_folder), shard_rows=3)
        if contents(folder) != unbroken:
            different.append(f"write {last} of {len(writes)}: {Path(writes[last][1]).name}")
    assert different == []


@pytest.mark.parametrize(("example", "validation_tokens"), [("split", 10**9), ("truncate", 10**9), ("truncate", 3000)])
def test_preparation_killed_by_sigkill_goes_on_where_it_was(example, validation_tokens, tmp_path):
    settings = {**SETTINGS, "example": example, "validation_tokens": validation_tokens, "train_examples": 1900}
    code = "import json, pathlib, sys; from paperlm.data.prepare import prepare\n"
    code += "prepare(json.loads(sys.argv[1]), pathlib.Path(sys.argv[2]), shard_rows=10)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(settings), str(tmp_path / "killed")],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        stderr=subprocess.DEVNULL,
    )
    while not (tmp_path / "killed/train-00007.npy").exists() and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    left = contents(tmp_path / "killed")
    assert "manifest.json" not in left
    finished = [tmp_path / f"killed/train-{number:05d}.npy" for number in range(7)]
    stamps = [path.stat().st_mtime_ns for path in finished]
    for name in ("killed", "unbroken"):
        prepare(settings, tmp_path / name, shard_rows=10)
    assert contents(tmp_path / "killed") == contents(tmp_path / "unbroken")
    assert stamps == [path.stat().st_mtime_ns for path in finished], "finished shards were written again"


@pytest.mark.parametrize("example", ["truncate", "split"])
def test_an_empty_document_does_not_disturb_the_others(example, corpus, texts_folder, tmp_path):
    settings = corpus([TOY_TRAIN[0], "", *TOY_TRAIN[1:]], example=example)
    prepare(settings, tmp_path / "out", str(texts_folder))
    stored = [[i for i in row if i] for row in stored_rows(tmp_path / "out", "train").tolist()]
    assert [row for row in stored if row != [1]] == expected_rows(TOY_TRAIN, 16, example)


# Bad input.


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def alter(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = [
    pytest.param(Path.unlink, "missing.*restore it", id="missing"),
    pytest.param(cut, "bytes instead of .*truncated.*fetch it again", id="truncated"),
    pytest.param(alter, "sha256 .*altered; fetch it again", id="altered"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_text_file_is_refused_and_an_earlier_preparation_stays(
    damage, message, corpus, texts_folder, tmp_path
):
    settings, file = corpus(), texts_folder / "toy.validation.jsonl.gz"
    prepare(settings, tmp_path / "out", str(texts_folder))
    check_present("local:toy", str(texts_folder))
    before = contents(tmp_path / "out")
    damage(file)
    with pytest.raises(DataError, match=message) as error:
        prepare(settings, tmp_path / "out", str(texts_folder))
    assert str(file) in str(error.value)
    assert contents(tmp_path / "out") == before
    if damage is not alter:  # sizes and names are what can be seen without reading everything
        with pytest.raises(DataError, match="toy.validation.jsonl.gz"):
            check_present("local:toy", str(texts_folder))


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_tokenizer_is_refused(damage, message, tmp_path, monkeypatch):
    file = tmp_path / "tokenizer.json"
    file.write_bytes((HERE / "tokenizers/bpe1024/tokenizer.json").read_bytes())
    entry = registry().tokenizers["bpe1024"]
    entry = entry.model_copy(update={"file": entry.file.model_copy(update={"path": str(file)})})
    monkeypatch.setattr(
        registry_module, "registry", lambda real=registry(): real.model_copy(update={"tokenizers": {"bpe1024": entry}})
    )
    assert TextTokenizer("bpe1024").path == file
    damage(file)
    with pytest.raises(DataError, match=message) as error:
        TextTokenizer("bpe1024")
    assert str(file) in str(error.value)


@pytest.mark.parametrize("validation", [TOY_VALIDATION, None], ids=["validation file", "validation by hash"])
@pytest.mark.parametrize(
    "line",
    [b"not JSON", b"", b'{"txt": "no text"}', b'["text"]', b'{"text": 5}', b'{"text": null}', b'{"text": "\xff"}',
     b'{"text": "half a pair \\ud800"}'],
)  # fmt: skip
def test_a_line_without_a_text_is_refused_by_file_and_number(line, validation, corpus, texts_folder, tmp_path):
    settings = corpus([*TOY_TRAIN[:4], line, *TOY_TRAIN[4:]], validation, suffix=".jsonl")
    with pytest.raises(DataError, match=r"toy\.train\.jsonl, line 5: "):
        prepare(settings, tmp_path / "out", str(texts_folder))
    assert not (tmp_path / "out/manifest.json").exists()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"vocab_size": 32000}, DataError, "'bpe1024' has 1024 ids.* 32000: set vocab_size to 1024"),
        (
            {"dataset": "bundled:c4_sampel"},
            SpecError,
            "unknown dataset 'c4_sampel'; did you mean 'c4_sample'.*registry",
        ),
        ({"tokenizer": "bpe1042"}, SpecError, "unknown tokenizer 'bpe1042'; did you mean 'bpe1024'"),
        ({"dataset": "hub:c4_sample"}, SpecError, "is bundled:c4_sample, not hub:c4_sample"),
    ],
)
def test_settings_that_name_no_data_are_refused_before_anything_is_written(change, error, message, tmp_path):
    with pytest.raises(error, match=message):
        prepare({**SETTINGS, **change}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_local_dataset_without_its_folder_or_file_says_how_to_name_it(tmp_path):
    for check in (lambda folder: next(documents("local:wikipedia_en", "train", folder)),
                  lambda folder: check_present("local:wikipedia_en", folder)):  # fmt: skip
        with pytest.raises(DataError, match="local:wikipedia_en.*local_data=<folder"):
            check("")
        with pytest.raises(DataError, match=r"wikipedia_en\.train-00-of-05\.jsonl\.zst.*missing.*local_data"):
            check(str(tmp_path))


@pytest.mark.parametrize("empty", ["train", "validation"])
def test_a_split_without_documents_is_refused(empty, corpus, texts_folder, tmp_path):
    settings = corpus(**{empty: []})
    with pytest.raises(DataError, match=f"local:toy: the {empty} split has no documents"):
        prepare(settings, tmp_path / "out", str(texts_folder))
    assert not (tmp_path / "out/manifest.json").exists()


# Shards and their order.


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare({**SETTINGS, "example": "split"}, tmp_path_factory.mktemp("prepared"), shard_rows=40)


def test_token_shards_give_rows_by_number_across_shards(prepared):
    shards, stored = TokenShards(prepared, "train"), stored_rows(prepared.parent, "train")
    assert len(shards) == len(stored) == 150
    wanted = np.array([0, 39, 40, 149, 79, 80, 40, *np.random.default_rng(0).integers(0, 150, 50)])
    assert shards.rows(wanted).dtype == np.int64
    assert np.array_equal(shards.rows(wanted), stored[wanted])
    assert shards.tokens == int((stored != 0).sum()) and shards.pad_id == 0


@pytest.mark.parametrize("damage", [Path.unlink, cut, alter])
@pytest.mark.parametrize("name", ["train-00002.npy", "manifest.json"])
def test_damaged_shards_are_refused_by_name(name, damage, prepared, tmp_path):
    if (name, damage) == ("manifest.json", alter):
        return
    for path in prepared.parent.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path / name)
    if (name, damage) == ("manifest.json", cut):
        cut(tmp_path / name)  # the first byte lost is the newline
    with pytest.raises(DataError, match="delete|run the data rule") as error:
        TokenShards(tmp_path / "manifest.json", "train")
    assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize(("examples_", "batch"), [(10, 5), (10, 4), (7, 3), (3, 8), (1, 2)])
def test_each_epoch_visits_every_example_once_across_batches_of_any_size(examples_, batch):
    order = BatchOrder(examples_, batch, seed=3)
    seen = np.concatenate([order.indices(update) for update in range(4 * examples_)])
    assert len(seen) == 4 * examples_ * batch
    epochs = seen.reshape(-1, examples_)
    assert all(sorted(epoch) == list(range(examples_)) for epoch in epochs.tolist())
    assert examples_ < 7 or len(set(map(tuple, epochs.tolist()))) > 1, "every epoch has the same order"


def test_the_batch_order_depends_on_seed_and_update_alone():
    forwards = [BatchOrder(50, 8, seed=1).indices(update).tolist() for update in range(40)]
    order, updates = BatchOrder(50, 8, seed=1), list(range(40))
    random.Random(0).shuffle(updates)
    assert {update: order.indices(update).tolist() for update in updates} == dict(enumerate(forwards))
    assert BatchOrder(50, 8, seed=2).indices(0).tolist() != forwards[0]


# Local files and the hub.


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".jsonl"])
def test_gzip_zstandard_and_plain_files_read_alike(suffix, corpus, texts_folder):
    train = [*TOY_TRAIN, "caf\u00e9 \u2028 \U0001f600\nsecond line"]
    corpus(train, suffix=suffix)
    assert list(documents("local:toy", "train", str(texts_folder))) == train
    assert list(documents("local:toy", "train", str(texts_folder), skip=8)) == train[8:]
    assert list(documents("local:toy", "validation", str(texts_folder))) == TOY_VALIDATION


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """C4 in the hub's layout, two shards a split; no connection is allowed. Returns the texts and the folder."""
    folder, texts = tmp_path / "mirror/allenai/c4/en", c4_texts("train")
    texts = {"train": texts[:40], "validation": texts[40:55]}
    for split, part in itertools.product(texts, range(2)):
        lines = [json.dumps({"text": t, "timestamp": "2019-04-25", "url": "u"}).encode() for t in texts[split][part::2]]
        pack(folder / f"c4-{split}.0000{part}-of-00002.json.gz", lines)
    files = {split: f"en/c4-{split}.*.json.gz" for split in texts}
    card = {"configs": [{"config_name": "en", "data_files": [{"split": s, "path": p} for s, p in files.items()]}]}
    (folder.parent / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
    monkeypatch.setenv("PAPERLM_HUB_MIRROR", str(tmp_path / "mirror"))
    calls = []
    monkeypatch.setattr(socket.socket, "connect", lambda *address: calls.append(address))
    yield texts, folder
    assert calls == []


def test_the_hub_is_streamed_from_a_mirror_in_a_fixed_shuffled_order_that_skips_exactly(mirror):
    for split, texts in mirror[0].items():
        order = list(documents("hub:allenai/c4", split))
        assert sorted(order) == sorted(texts) and order != texts
        assert list(documents("hub:allenai/c4", split)) == order
        for skip in (1, len(order) // 2, len(order) - 1, len(order)):
            assert list(documents("hub:allenai/c4", split, skip=skip)) == order[skip:]


def test_preparation_from_the_hub_with_t5_holds_the_streamed_documents(mirror, tmp_path):
    t5 = {"dataset": "hub:allenai/c4", "tokenizer": "t5", "vocab_size": 32000, "train_examples": 30}
    settings = {**SETTINGS, **t5, "seq_len": 128, "validation_tokens": 500}
    manifest = load_manifest(prepare(settings, tmp_path / "out", shard_rows=8))
    raw = raw_tokenizer("t5")
    raw.enable_truncation(128)
    for split in ("train", "validation"):
        encoded = [e.ids for e in raw.encode_batch(list(documents("hub:allenai/c4", split)))]
        rows = [[i for i in row if i] for row in stored_rows(tmp_path / "out", split).tolist()]
        assert rows == encoded[: manifest[split]["rows"]]
    assert manifest["train"]["rows"] == 30 and manifest["validation"]["tokens"] >= 500


def test_a_truncated_shard_of_a_mirror_is_refused_by_a_message(mirror, tmp_path):
    shard = mirror[1] / "c4-train.00001-of-00002.json.gz"
    shard.write_bytes(shard.read_bytes()[:-2000])
    with pytest.raises(DataError, match="allenai/c4"):
        list(documents("hub:allenai/c4", "train"))


def test_without_network_and_mirror_the_command_says_what_to_do(tmp_path):
    settings = {**SETTINGS, "dataset": "hub:allenai/c4", "tokenizer": "t5", "vocab_size": 32000}
    environment = {k: v for k, v in os.environ.items() if k != "PAPERLM_HUB_MIRROR"}
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-m", "paperlm", "prepare-data", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--settings", json.dumps(settings)], env=environment | offline, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "'allenai/c4' cannot be opened" in done.stderr and "PAPERLM_HUB_MIRROR" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").glob("*.npy")) and not (tmp_path / "out/manifest.json").exists()
