"""The data layer: registry, sources, preparation and its restart, shards and their order."""

import collections
import gzip
import hashlib
import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import yaml
import zstandard
from pydantic import ValidationError
from support_c4 import BPE, c4_texts
from tokenizers import Tokenizer

from paperlm.data import registry as registry_module
from paperlm.data.prepare import prepare
from paperlm.data.registry import HERE, DatasetEntry, ModelEntry, Registry, TokenizerEntry, data_id, registry
from paperlm.data.shards import BatchOrder, TokenShards, load_manifest
from paperlm.data.sources import check_present, documents
from paperlm.data.tokenizer import examples
from paperlm.errors import DataError, SpecError

RAW = yaml.safe_load((HERE / "registry.yaml").read_text(encoding="utf-8"))
SETTINGS = {"dataset": "bundled:c4_sample", "tokenizer": "bpe1024", "vocab_size": 1024, "seq_len": 64}
SETTINGS |= {"example": "truncate", "train_examples": 150, "validation_tokens": 3000}
T5 = {"tokenizer": "t5", "vocab_size": 32000}
TRAIN = [f"Document {n}: " + " ".join(f"word{n * k}" for k in range(1 + 7 * n % 23)) for n in range(9)]
VALIDATION = [f"Held out {n}. " + "more text follows " * (5 * n % 7) for n in range(6)]
IDS = hypothesis.strategies.lists(hypothesis.strategies.integers(2, 1023), max_size=40)
BAD_LINES = [b"not JSON", b"", b'{"txt": "no"}', b'["text"]', b'{"text": 5}', b'{"text": null}', b'{"text": "\xff"}']
BAD_LINES += [b'{"text": "half a pair \\ud800"}']
NO_DATA = [
    ({"vocab_size": 32000}, DataError, r"'bpe1024' has 1024 ids.* 32000: set vocab_size to 1024"),
    ({"dataset": "bundled:c4_sampel"}, SpecError, r"unknown dataset 'c4_sampel'; did you mean 'c4_sample'.*registry"),
    ({"tokenizer": "bpe1042"}, SpecError, r"unknown tokenizer 'bpe1042'; did you mean 'bpe1024'"),
    ({"dataset": "hub:c4_sample"}, SpecError, r"is bundled:c4_sample, not hub:c4_sample"),
]
every_example = pytest.mark.parametrize("example", ["truncate", "split", "packed", "packed_bos"])


def expected_rows(texts, seq_len, example, tokenizer="bpe1024"):
    raw = Tokenizer.from_file(str(HERE / f"tokenizers/{tokenizer}/tokenizer.json"))
    if example == "truncate":
        raw.enable_truncation(seq_len - 1)
    whole = [[*e.ids, 1] for e in raw.encode_batch(texts, add_special_tokens=False)]
    packed, bos = example.startswith("packed"), [1] if example == "packed_bos" else []
    whole, step = [[i for ids in whole for i in ids]] if packed else whole, seq_len - len(bos)
    pieces = [[*bos, *ids[k : k + step]] for ids in whole for k in range(0, len(ids), step)]
    return [piece for piece in pieces if len(piece) >= (seq_len if packed else 2)]


def stored_rows(folder, split):
    return np.concatenate([np.load(path) for path in sorted(folder.glob(f"{split}-*.npy"))])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def pack(path, lines):
    """Lines (a str is a text, bytes are taken as they are) in the file's packing; returns its registry entry."""
    data = b"".join((x if isinstance(x, bytes) else json.dumps({"text": x}).encode()) + b"\n" for x in lines)
    if path.suffix == ".zst":  # two frames, as parallel packers write them
        data = b"".join(zstandard.compress(part) for part in (data[: len(data) // 2], data[len(data) // 2 :]))
    elif path.suffix == ".gz":
        data = gzip.compress(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return {"path": path.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Registers dataset local:toy, whose files lie in tmp_path, and tokenizer toy; returns settings that use both."""

    def make(train=TRAIN, validation=VALIDATION, suffix=".jsonl.gz", **settings):
        lines = {"train": train, "validation": validation} if validation else {"train": train}
        files = {split: [pack(tmp_path / f"toy.{split}{suffix}", lines[split])] for split in lines}
        about = dict.fromkeys(("summary", "revision", "licence", "citation"), "toy")
        entry = DatasetEntry(source="local", files=files, validation_share=None if validation else 2, **about)
        (tmp_path / "toy.json").write_bytes(BPE.read_bytes())
        bpe = registry().tokenizers["bpe1024"]
        copy = bpe.model_copy(update={"file": bpe.file.model_copy(update={"path": str(tmp_path / "toy.json")})})
        toy = Registry(datasets={"toy": entry}, tokenizers={"toy": copy, "t5": registry().tokenizers["t5"]})
        monkeypatch.setattr(registry_module, "registry", lambda: toy)
        return {**SETTINGS, "dataset": "local:toy", "tokenizer": "toy", "seq_len": 16, **settings}

    return make


ABOUT = ("summary", "revision", "licence", "citation")


@pytest.mark.parametrize("field", ABOUT)
@pytest.mark.parametrize("kind", [DatasetEntry, TokenizerEntry, ModelEntry])
def test_an_entry_of_any_kind_that_does_not_say_what_it_is_is_refused(kind, field):
    part = {DatasetEntry: "datasets", TokenizerEntry: "tokenizers", ModelEntry: "models"}[kind]
    entry = next(iter(RAW[part].values()))
    kind(**entry)
    for changed in ({key: value for key, value in entry.items() if key != field}, entry | {field: " "}):
        with pytest.raises(ValidationError, match=field) as error:
            kind(**changed)
        assert field not in changed or "where it is not known, say so in words" in str(error.value)


def test_every_registry_entry_says_where_it_is_from_and_bundled_files_have_their_bytes_and_checksum():
    assert all(entry[field].strip() for part in RAW.values() for entry in part.values() for field in ABOUT)
    for entry in RAW["datasets"].values():
        pins = [f["sha256"] for files in entry.get("files", {}).values() for f in files] or [entry["hub"]["revision"]]
        assert all(len(pin) in (40, 64) and int(pin, 16) for pin in pins)
    for entry in RAW["tokenizers"].values():
        commit = re.search(r"\bcommit (of \S+ is not known|[0-9a-f]{40})", entry["revision"])
        assert commit or "train_bpe" in entry["revision"], "a commit that nobody has compared is not made up"
    bundled = [entry for entry in RAW["datasets"].values() if entry["source"] == "bundled"]
    files = [file for entry in bundled for split in entry["files"].values() for file in split]
    for entry in [*files, *(t["file"] for t in RAW["tokenizers"].values())]:
        data = (HERE / entry["path"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["bytes"], entry["sha256"]), entry["path"]


def test_the_bundled_splits_have_1959_and_219_documents_and_no_text_in_common():
    train, validation = (list(documents("bundled:c4_sample", split)) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (1959, 219)
    assert (train, validation) == (c4_texts("train"), c4_texts("validation"))
    hashes = {hashlib.sha256(text.encode()).digest() for text in train + validation}
    assert len(hashes) == 2178 == RAW["datasets"]["c4_sample"]["documents"]


def test_a_t5_sentinel_in_a_text_is_refused_by_dataset_and_token(corpus, tmp_path):
    settings = corpus([*TRAIN, "Thank you <extra_id_0> me"], **T5)
    with pytest.raises(DataError, match=r"'<extra_id_0>' has id 32099") as error:
        prepare(settings, tmp_path / "out", str(tmp_path))
    assert not (tmp_path / "out/manifest.json").exists()
    assert "local:toy" in str(error.value) or "toy.train" in str(error.value), "nobody can find that text"


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(IDS, hypothesis.strategies.integers(2, 12))
@hypothesis.example([7] * 8, 4)
def test_truncate_keeps_the_first_ids_and_eos_and_split_every_id_once_but_a_lone_last_one(body, seq_len):
    expected = [*body, 1] if len(body) < seq_len else [*body[: seq_len - 1], 1]
    assert not body or list(examples([*body, 1], seq_len, "truncate")) == [expected]
    rows, lone = list(examples([*body, 1], seq_len, "split")), len(body) % seq_len == 0
    assert list(itertools.chain(*rows)) == (body if lone else [*body, 1])
    assert all(len(row) == seq_len for row in rows[:-1]) and all(2 <= len(row) <= seq_len for row in rows)


@every_example
@pytest.mark.parametrize("shard_rows", [7, 65536])
def test_shards_of_any_size_hold_the_tokens_in_order_and_their_manifest_counts_them(example, shard_rows, tmp_path):
    settings, labels, numbers = {**SETTINGS, "example": example}, {}, np.random.default_rng(0).permutation(40)
    manifest = load_manifest(prepare(settings, tmp_path, shard_rows=shard_rows))
    for split in ("train", "validation"):
        stored, about = stored_rows(tmp_path, split), manifest[split]
        rows = expected_rows(c4_texts(split), 64, example)[: len(stored)]
        assert stored.dtype == np.uint16 and stored.tolist() == [row + [0] * (64 - len(row)) for row in rows]
        shards, tokens = TokenShards(tmp_path / "manifest.json", split), sum(map(len, rows))
        assert (about["rows"], about["tokens"]) == (len(shards), shards.tokens) == (len(rows), tokens)
        assert len(about["shards"]) == math.ceil(len(rows) / shard_rows) and shards.pad_id == 0
        assert shards.rows(numbers).dtype == np.int64 and np.array_equal(shards.rows(numbers), stored[numbers])
        labels[split] = collections.Counter(itertools.chain(*(row[1:] for row in rows)))
    assert manifest["train"]["rows"] == 150 and about["tokens"] - len(rows[-1]) < 3000 <= about["tokens"]
    total = labels["train"].total() + 1024
    loss = -sum(n * math.log((labels["train"][i] + 1) / total) for i, n in labels["validation"].items())
    assert manifest["unigram_perplexity"] == pytest.approx(math.exp(loss / labels["validation"].total()), rel=1e-12)
    assert (manifest["pad_id"], manifest["eos_id"], manifest["data_id"]) == (0, 1, data_id(settings))


@pytest.mark.parametrize("ends", ["at the limits", "with the texts"])
@every_example
def test_preparation_stopped_after_any_write_goes_on_to_the_same_bytes(example, ends, corpus, tmp_path, monkeypatch):
    limits = {"train_examples": 8, "validation_tokens": 60} if ends == "at the limits" else {"validation_tokens": 9999}
    settings = corpus(example=example, **limits)
    replace, writes, different = os.replace, [], []
    monkeypatch.setattr(os, "replace", lambda *names: (writes.append(names), replace(*names)))
    prepare(settings, tmp_path / "unbroken", str(tmp_path), shard_rows=3)
    assert len(writes) >= 8 and not [*(tmp_path / "unbroken").glob("*.progress.json")]
    for last in range(len(writes)):
        folder, calls = tmp_path / f"stopped-{last}", itertools.count()

        def stop(*names, last=last, calls=calls):
            replace(*names)
            if next(calls) == last:
                raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(settings, folder, str(tmp_path), shard_rows=3)
        monkeypatch.setattr(os, "replace", replace)
        prepare(settings, folder, str(tmp_path), shard_rows=3)
        if contents(folder) != contents(tmp_path / "unbroken"):
            different.append(f"write {last} of {len(writes)}: {Path(writes[last][1]).name}")
    assert different == []


@pytest.mark.parametrize(("example", "validation_tokens"), [("split", 10**9), ("truncate", 3000)])
def test_preparation_killed_by_sigkill_goes_on_where_it_was(example, validation_tokens, tmp_path):
    settings = {**SETTINGS, "example": example, "validation_tokens": validation_tokens, "train_examples": 1500}
    code = "import json, pathlib, sys; from paperlm.data.prepare import prepare\n"
    code += "prepare(json.loads(sys.argv[1]), pathlib.Path(sys.argv[2]), shard_rows=10)"
    command = [sys.executable, "-c", code, json.dumps(settings), str(tmp_path / "killed")]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE.parents[2] / 'kernels'}"},
        stderr=subprocess.DEVNULL,
    )
    while not (tmp_path / "killed/train-00007.npy").exists() and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "killed/manifest.json").exists()
    finished = [tmp_path / f"killed/train-{number:05d}.npy" for number in range(7)]
    stamps = [path.stat().st_mtime_ns for path in finished]
    for name in ("killed", "unbroken"):
        prepare(settings, tmp_path / name, shard_rows=10)
    assert contents(tmp_path / "killed") == contents(tmp_path / "unbroken")
    assert stamps == [path.stat().st_mtime_ns for path in finished], "finished shards were written again"


@pytest.mark.parametrize("example", ["truncate", "split"])
def test_an_empty_document_does_not_disturb_the_others(example, corpus, tmp_path):
    prepare(corpus([TRAIN[0], "", *TRAIN[1:]], example=example), tmp_path / "out", str(tmp_path))
    stored = [[i for i in row if i] for row in stored_rows(tmp_path / "out", "train").tolist()]
    assert [row for row in stored if row != [1]] == expected_rows(TRAIN, 16, example)


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def alter(path):
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])


DAMAGE = [(Path.unlink, r"missing.*restore it"), (cut, r"bytes instead of .*truncated.*fetch it again")]
DAMAGE += [(alter, r"sha256 .*altered; fetch it again")]


@pytest.mark.parametrize("name", ["toy.train.jsonl.gz", "toy.validation.jsonl.gz", "toy.json"])
@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_text_or_tokenizer_is_refused_and_earlier_shards_stay(damage, message, name, corpus, tmp_path):
    settings = corpus()
    prepare(settings, tmp_path / "out", str(tmp_path))
    before = contents(tmp_path / "out")
    damage(tmp_path / name)
    with pytest.raises(DataError, match=message) as error:
        prepare(settings, tmp_path / "out", str(tmp_path))
    assert str(tmp_path / name) in str(error.value)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("validation", [VALIDATION, None], ids=["validation file", "validation by hash"])
@pytest.mark.parametrize("line", BAD_LINES)
def test_a_line_without_a_text_is_refused_by_file_and_number(line, validation, corpus, tmp_path):
    settings = corpus([*TRAIN[:4], line, *TRAIN[4:]], validation, suffix=".jsonl")
    with pytest.raises(DataError, match=r"toy\.train\.jsonl, line 5: "):
        prepare(settings, tmp_path / "out", str(tmp_path))
    assert not (tmp_path / "out/manifest.json").exists()


@pytest.mark.parametrize(("change", "error", "message"), NO_DATA)
def test_settings_that_name_no_data_are_refused_before_anything_is_written(change, error, message, tmp_path):
    with pytest.raises(error, match=message):
        prepare({**SETTINGS, **change}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("check", [check_present, lambda name, folder: next(documents(name, "train", folder))])
def test_a_local_dataset_without_its_folder_or_file_says_how_to_name_it(check, tmp_path):
    with pytest.raises(DataError, match=r"local:wikipedia_en.*local_data=<folder"):
        check("local:wikipedia_en", "")
    with pytest.raises(DataError, match=r"wikipedia_en\.train-00-of-05\.jsonl\.zst.*missing.*local_data"):
        check("local:wikipedia_en", str(tmp_path))


def test_a_split_without_documents_is_refused(corpus, tmp_path):
    with pytest.raises(DataError, match="local:toy: the train split has no documents"):
        prepare(corpus([]), tmp_path / "out", str(tmp_path))


@pytest.mark.parametrize("name", ["train-00000.npy", "train-00002.npy"])
@pytest.mark.parametrize("damage", [Path.unlink, cut, alter])
def test_a_damaged_shard_or_manifest_is_refused_by_name(name, damage, corpus, tmp_path):
    manifest = prepare(corpus(), tmp_path / "out", str(tmp_path), shard_rows=3)
    damage(tmp_path / "out" / name)
    with pytest.raises(DataError, match=rf"out/{name}: .*delete the folder .* and start again"):
        TokenShards(manifest, "train")
    for change, message in (
        (cut, "truncated or altered; delete .* and start again"),
        (Path.unlink, "no prepared data; run "),
    ):
        change(manifest)
        with pytest.raises(DataError, match=rf"out/manifest.json: {message}"):
            TokenShards(manifest, "train")


@pytest.mark.parametrize(("n", "batch"), [(10, 5), (10, 4), (7, 3), (3, 8), (1, 2)])
def test_each_epoch_visits_every_example_once_by_seed_and_update_alone_in_batches_of_any_size(n, batch):
    order = BatchOrder(n, batch, seed=3)
    batches = [order.indices(update).tolist() for update in range(4 * n)]
    epochs = np.concatenate(batches).reshape(4 * batch, n).tolist()
    assert all(len(b) == batch for b in batches) and all(sorted(epoch) == list(range(n)) for epoch in epochs)
    again, updates = BatchOrder(n, batch, seed=3), np.random.default_rng(0).permutation(4 * n).tolist()
    assert all(again.indices(update).tolist() == batches[update] for update in updates)
    assert n < 7 or (epochs[0] != epochs[1] and BatchOrder(n, batch, seed=4).indices(0).tolist() != batches[0])


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".jsonl"])
def test_gzip_zstandard_and_plain_files_read_alike(suffix, corpus, tmp_path):
    texts = [*TRAIN, "caf\u00e9 \u2028 \U0001f600\nsecond line"]
    corpus(texts, suffix=suffix)
    for skip in (0, 8):
        assert list(documents("local:toy", "train", str(tmp_path), skip)) == texts[skip:]
    assert list(documents("local:toy", "validation", str(tmp_path))) == VALIDATION


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """C4 in the hub's layout, two shards a split; no connection is allowed. Returns the texts and the folder."""
    folder, calls = tmp_path / "mirror/allenai/c4/en", []
    texts = {"train": c4_texts("train")[:40], "validation": c4_texts("train")[40:80]}
    for split, part in itertools.product(texts, range(2)):
        half = [{"text": text, "timestamp": "2019", "url": "u"} for text in texts[split][20 * part : 20 * part + 20]]
        pack(folder / f"c4-{split}.0000{part}-of-00002.json.gz", [json.dumps(row).encode() for row in half])
    files = [{"split": split, "path": f"en/c4-{split}.*.json.gz"} for split in texts]
    card = yaml.safe_dump({"configs": [{"config_name": "en", "data_files": files}]})
    (folder.parent / "README.md").write_text(f"---\n{card}---\n")
    monkeypatch.setenv("PAPERLM_HUB_MIRROR", str(tmp_path / "mirror"))
    monkeypatch.setattr(socket.socket, "connect", lambda *address: calls.append(address))
    yield texts, folder
    assert calls == []


def test_the_hub_is_streamed_from_a_mirror_and_prepared_in_a_fixed_shuffled_order(mirror, tmp_path):
    settings = {**SETTINGS, **T5, "dataset": "hub:allenai/c4", "train_examples": 30, "validation_tokens": 500}
    manifest = load_manifest(prepare(settings, tmp_path / "out", shard_rows=8))
    assert manifest["train"]["rows"] == 30 and manifest["validation"]["tokens"] >= 500
    for split, texts in mirror[0].items():
        order = list(documents("hub:allenai/c4", split))
        assert sorted(order) == sorted(texts) and order != texts
        for skip in (0, 1, len(order) // 2, len(order)):
            assert list(documents("hub:allenai/c4", split, skip=skip)) == order[skip:]
        rows = [[i for i in row if i] for row in stored_rows(tmp_path / "out", split).tolist()]
        assert rows == expected_rows(order, 64, "truncate", "t5")[: manifest[split]["rows"]]


@pytest.mark.parametrize("mirrored", [True, False])
def test_the_hub_is_asked_for_the_registered_revision_and_a_mirror_for_none(mirrored, monkeypatch, tmp_path):
    """Another version of the set would train the same job id; a folder holds one version alone."""
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *where, **how: asked.append((where, how)) or iter(()))
    monkeypatch.delenv("PAPERLM_HUB_MIRROR", raising=False)
    if mirrored:
        monkeypatch.setenv("PAPERLM_HUB_MIRROR", str(tmp_path))
    assert list(documents("hub:allenai/c4_in_order", "train")) == []
    revision = {"revision": "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"}  # of the hub's history; also in the registry
    name = str(tmp_path / "allenai/c4") if mirrored else "allenai/c4"
    assert asked == [((name, "en"), {"split": "train", "streaming": True, **({} if mirrored else revision)})]


def test_a_truncated_shard_of_a_mirror_is_refused_by_a_message(mirror):
    cut(mirror[1] / "c4-train.00001-of-00002.json.gz")
    with pytest.raises(DataError, match="allenai/c4"):
        list(documents("hub:allenai/c4", "train"))


def test_without_network_and_mirror_the_command_says_what_to_do(tmp_path):
    settings = json.dumps({**SETTINGS, **T5, "dataset": "hub:allenai/c4"})
    environment = {k: v for k, v in os.environ.items() if k != "PAPERLM_HUB_MIRROR"}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE.parents[2] / 'kernels'}",
    }
    command = [sys.executable, "-m", "paperlm", "prepare-data", "--settings", settings, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and list((tmp_path / "out").glob("*")) == []
    assert "'allenai/c4' cannot be opened" in done.stderr and "PAPERLM_HUB_MIRROR" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bar_counts_examples_where_so_many_are_wanted_and_tokens_elsewhere(tmp_path, capsys):
    prepare(SETTINGS, tmp_path)
    bars = capsys.readouterr().err
    assert re.search(r"tokenize train:[^\r]* 150/150 [^\r]* examples/s", bars)
    assert re.search(r"tokenize validation:[^\r]*/3000 [^\r]* tokens/s", bars) or "3.00k" in bars
