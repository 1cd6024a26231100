"""Sets of items: the registry's entries, the bundled subsets and how they were drawn, preparation, bad input."""

import gzip
import hashlib
import json
import socket
from pathlib import Path

import pytest
import yaml
from support_items import FULL_SETS, bundled, needs_full_sets

from paperlm.data import registry as registry_module
from paperlm.data.bundle import LONGEST_DIALOGUE, _is_short_pair, drawn, files, line
from paperlm.data.items import prepare_any, prepare_items, read_items
from paperlm.data.registry import HERE, DatasetEntry, ItemSets, data_id, registry
from paperlm.data.settings import ItemData, TokenData, data_settings
from paperlm.data.sources import check_present, documents, items
from paperlm.data.texts import read_documents
from paperlm.errors import DataError, SpecError
from paperlm.evaluate.tasks import TASKS
from paperlm.load import parse

SETS = {name: entry for name, entry in registry().datasets.items() if entry.fields}
ROWS = [{"question": f"Which is {n}?\u2028", "options": ["a", "b" * n], "right": n % 2} for n in range(7)]
FIELDS = ["question", "options", "right"]


def store(path, rows):
    data = gzip.compress(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))
    path.write_bytes(data)
    return {"path": path.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Registers the set local:toy with two files of split test and one of dev, below tmp_path; returns its settings."""

    def make(second=ROWS[4:], examples=ROWS[:2], **splits):
        parts = {"test": [ROWS[:4], second], "dev": [examples]}
        entries = {s: [store(tmp_path / f"{s}{n}.jsonl.gz", p) for n, p in enumerate(parts[s])] for s in parts}
        about = dict.fromkeys(("summary", "revision", "licence", "citation"), "toy")
        entry = DatasetEntry(source="local", files=entries, fields=FIELDS, **about)
        changed = registry().model_copy(update={"datasets": {**registry().datasets, "toy": entry}})
        monkeypatch.setattr(registry_module, "registry", lambda: changed)
        return ItemData(dataset="local:toy", splits=splits or {"test": None})

    return make


def test_every_set_names_its_licence_and_bundled_files_have_their_bytes_and_checksum():
    total = 0
    for name, entry in SETS.items():
        assert entry.licence.strip() and entry.citation.strip() and entry.revision.strip(), name
        assert entry.hub is None or entry.hub.revision == entry.revision == "main" or int(entry.revision, 16), name
        for files_of_split in entry.files.values() if entry.source == "bundled" else ():
            for file in files_of_split:
                data = (HERE / file.path).read_bytes()
                assert (len(data), hashlib.sha256(data).hexdigest()) == (file.bytes, file.sha256), file.path
                total += len(data)
    bundled_sets = [entry for entry in registry().datasets.values() if entry.source == "bundled"]
    named = {HERE / f.path for e in bundled_sets if e.form != "a text" for fs in e.files.values() for f in fs}
    models = [entry for entry in registry().models.values() if entry.source == "bundled"]
    for file in (file for entry in models for file in entry.files):
        assert hashlib.sha256((HERE / file.path).read_bytes()).hexdigest() == file.sha256
        named.add(HERE / file.path)
        total += file.bytes
    assert named == set((HERE / "bundled").glob("*/*")) and total < 3 * 2**20


def test_every_task_has_its_set_in_three_places_with_the_fields_and_splits_that_it_reads():
    for task in TASKS.values():
        for source, name in task.datasets.items():
            entry = SETS[name]
            assert entry.source == source and set(task.fields) <= set(entry.fields)
            assert {task.split, task.few_shot_split} <= {*(entry.splits or entry.files), *entry.parts}


def test_every_set_to_train_on_has_items_for_training_and_validation():
    for name, entry in SETS.items():
        if "output" in entry.fields or "chosen" in entry.fields:
            assert {"train", "validation"} <= {*(entry.splits or entry.files), *entry.parts}, name


def test_a_part_is_a_piece_of_the_sources_split_and_part_of_the_datas_name(toy, tmp_path, monkeypatch):
    before = toy().data_id
    entry = registry_module.registry().datasets["toy"]
    parts = {
        "test": {"of": "test", "skip": 2},
        "start": {"of": "test", "first": 2},
        "mid": {"of": "test", "skip": 1, "first": 4},
    }
    changed = DatasetEntry(**entry.model_dump() | {"parts": parts})
    sets = registry().model_copy(update={"datasets": {"toy": changed}})
    monkeypatch.setattr(registry_module, "registry", lambda: sets)
    found = {split: list(items("local:toy", split, str(tmp_path))) for split in ("test", "start", "mid", "dev")}
    assert found == {"test": ROWS[2:], "start": ROWS[:2], "mid": ROWS[1:5], "dev": ROWS[:2]}
    assert ItemData(dataset="local:toy", splits={"test": None}).data_id != before
    with pytest.raises(ValueError, match="parts: the source has no split tset"):
        DatasetEntry(**entry.model_dump() | {"parts": {"test": {"of": "tset"}}})


def test_the_bundled_subsets_have_the_documented_sizes_and_mmlu_two_items_and_five_examples_of_each_subject():
    for name, task in TASKS.items():
        evaluated, examples = (bundled(f"eval/{name}.{split}") for split in (task.split, task.few_shot_split))
        texts = {json.dumps(item, sort_keys=True) for item in evaluated}
        assert len(texts) == len(evaluated) == (114 if name == "mmlu" else 100)
        assert len(examples) == (285 if name == "mmlu" else 20)
        assert not texts & {json.dumps(item, sort_keys=True) for item in examples}
        if name == "mmlu":
            for count, rows in ((2, evaluated), (5, examples)):
                subjects = [item["subject"] for item in rows]
                assert len(set(subjects)) == 57 and {subjects.count(s) for s in subjects} == {count}
    assert [len(bundled(f"sft/commonsense_4k.{split}")) for split in ("train", "validation")] == [4000, 200]
    assert len(bundled("eval/squad.validation")) == 100
    assert [len(bundled(f"preference/hh_rlhf_600.{split}")) for split in ("train", "validation")] == [500, 100]


def test_no_fine_tuning_instruction_contains_a_bundled_evaluation_text():
    keys = {"arc_easy.test": "question", "boolq.validation": "question", "hellaswag.validation": "ctx"}
    keys |= {"mmlu.test": "question", "openbookqa.test": "question_stem", "piqa.validation": "goal"}
    keys |= {"squad.validation": "question", "winogrande.validation": "sentence", "arc_challenge.test": "question"}
    texts = {item[key] for name, key in keys.items() for item in bundled(f"eval/{name}")}
    instructions = "\n".join(
        item["instruction"] for s in ("train", "validation") for item in bundled(f"sft/commonsense_4k.{s}")
    )
    assert len(texts) > 800 and [text for text in texts if text in instructions] == []


def test_preference_pairs_differ_in_their_last_answer_only_and_are_short():
    for pair in [*bundled("preference/hh_rlhf_600.train"), *bundled("preference/hh_rlhf_600.validation")]:
        heads = {dialogue.rpartition("\n\nAssistant:")[0] for dialogue in pair.values()}
        assert len(heads) == 1 and heads.pop().startswith("\n\nHuman:")
        assert pair["chosen"] != pair["rejected"] and max(map(len, pair.values())) <= 600


@needs_full_sets
def test_drawing_the_bundled_sets_again_from_the_full_ones_gives_the_same_lines():
    for name, rows in files(FULL_SETS):
        assert gzip.decompress((HERE / "bundled" / name).read_bytes()) == b"".join(map(line, rows)), name


def test_a_draw_does_not_depend_on_the_order_of_the_file():
    assert drawn(ROWS, 3) == drawn(ROWS[::-1], 3) != ROWS[:3] and drawn(ROWS, 99) == drawn(ROWS, 7)


@pytest.mark.parametrize("limits", [{"test": None}, {"test": 5, "dev": 1}, {"dev": 9}])
def test_prepared_items_are_the_sources_first_ones_in_order_and_the_manifest_counts_them(limits, toy, tmp_path):
    manifest = prepare_any(toy(**limits), tmp_path / "out", str(tmp_path))
    content, source = json.loads(manifest.read_text()), {"test": ROWS, "dev": ROWS[:2]}
    assert set(content["splits"]) == set(limits) and content["dataset"] == content["licence"] == "toy"
    assert content["data_id"] == data_settings(content["settings"]).data_id
    for split, limit in limits.items():
        assert read_items(manifest, split) == source[split][:limit]
        assert content["splits"][split]["rows"] == len(source[split][:limit])
        data = (tmp_path / "out" / content["splits"][split]["file"]).read_bytes()
        assert content["splits"][split]["sha256"] == hashlib.sha256(data).hexdigest()


def test_documents_are_prepared_by_the_same_call_whatever_ends_a_line_in_them(tmp_path):
    settings = data_settings({"dataset": "bundled:c4_sample", "documents": 219})
    manifest = prepare_any(settings, tmp_path)
    assert read_documents(manifest) == list(documents("bundled:c4_sample", "validation"))


def test_rows_of_tokens_and_items_are_prepared_by_one_call(tmp_path):
    settings = {"dataset": "bundled:c4_sample", "tokenizer": "bpe1024", "vocab_size": 1024, "seq_len": 64}
    settings |= {"example": "truncate", "train_examples": 20, "validation_tokens": 500}
    content = json.loads(prepare_any(data_settings(settings), tmp_path).read_text())
    assert content["train"]["rows"] == 20 and content["data_id"] == data_settings(settings).data_id


WIKIPEDIA = {"dataset": "local:wikipedia_en", "validation_tokens": 400000}
T5 = {"tokenizer": "t5", "vocab_size": 32000, "seq_len": 256, "example": "split", "train_examples": 1000000}
GPT2 = {"tokenizer": "gpt2", "vocab_size": 50257, "seq_len": 512, "example": "packed", "train_examples": 96000}


@pytest.mark.parametrize(
    ("settings", "name"),
    [(WIKIPEDIA | T5, "wikipedia_en-t5-256-0138b28c"), (WIKIPEDIA | GPT2, "wikipedia_en-gpt2-512-c841c03c")],
)
def test_committed_records_keep_the_name_of_their_tokens(settings, name):
    assert TokenData(**settings).data_id == data_id(settings) == name


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def alter(path):
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [(Path.unlink, "missing.*restore it"), (cut, "bytes instead of"), (alter, "sha256 .*altered; fetch it again")],
)
@pytest.mark.parametrize("name", ["test0.jsonl.gz", "test1.jsonl.gz"])
def test_a_damaged_file_is_refused_by_name_and_earlier_items_stay(damage, message, name, toy, tmp_path):
    settings = toy()
    prepare_items(settings, tmp_path / "out", str(tmp_path))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    damage(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}: .*{message}|{message}.*{name}"):
        prepare_items(settings, tmp_path / "out", str(tmp_path))
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    if damage is not alter:
        with pytest.raises(DataError, match=name):
            check_present("local:toy", str(tmp_path))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "?", "options": []},
            r"test1.jsonl.gz, line 1: item without 'right' \(it has question, options\)",
        ),
        ([1], r"test1.jsonl.gz, line 1: item without 'question', 'options', 'right' \(it has no fields\)"),
        (b"no JSON\n", "test1.jsonl.gz, line 1: no JSON"),
    ],
)
def test_an_item_that_lacks_a_field_is_refused_by_file_line_and_field(row, message, toy, tmp_path):
    with pytest.raises(DataError, match=message):
        prepare_items(toy(second=[row]), tmp_path / "out", str(tmp_path))
    assert not (tmp_path / "out/manifest.json").exists()


def test_a_split_without_items_is_refused(toy, tmp_path):
    with pytest.raises(DataError, match="local:toy: the dev split has no items"):
        prepare_items(toy(examples=[], test=None, dev=None), tmp_path / "out", str(tmp_path))


@pytest.mark.parametrize("damage", [cut, alter, Path.unlink])
def test_damaged_prepared_items_are_refused_by_name(damage, toy, tmp_path):
    manifest = prepare_items(toy(), tmp_path / "out", str(tmp_path))
    damage(tmp_path / "out/test.jsonl")
    with pytest.raises(DataError, match=r"out/test.jsonl: missing, truncated or altered.*delete the folder"):
        read_items(manifest, "test")
    with pytest.raises(DataError, match="no split 'dev' was prepared; it has test"):
        read_items(manifest, "dev")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "bundled:arc_eazy", "splits": {"test": None}}, "did you mean 'arc_easy'.*items.yaml"),
        (
            {"dataset": "bundled:arc_easy", "splits": {"tset": None}},
            "'bundled:arc_easy': unknown split 'tset'; did you",
        ),
        ({"dataset": "hub:cais/mmlu", "splits": {"train": None}}, "'hub:cais/mmlu': unknown split 'train'"),
        ({"dataset": "local:arc_easy", "splits": {"test": None}}, "is bundled:arc_easy, not local:arc_easy"),
        ({"dataset": "bundled:c4_sample", "splits": {"train": None}}, "'bundled:c4_sample' is a text, no set of items"),
        ({"dataset": "bundled:arc_easy", "splits": {"test": 0}}, "splits: test: at least one item"),
        ({"dataset": "bundled:arc_easy", "splits": {}}, "at least 1 item"),
    ],
)
def test_settings_that_name_no_items_are_refused(settings, message):
    with pytest.raises(DataError, match=message):
        data_settings(settings)


def test_a_set_of_items_is_no_text_and_a_text_no_set_of_items():
    with pytest.raises(SpecError, match="'bundled:arc_easy' is a set of items, no text"):
        next(documents("bundled:arc_easy", "train"))
    with pytest.raises(SpecError, match="'bundled:c4_sample' is a text"):
        next(items("bundled:c4_sample", "train"))
    tokens = {"tokenizer": "bpe1024", "vocab_size": 1024, "seq_len": 64, "example": "truncate"}
    with pytest.raises(ValueError, match="'bundled:arc_easy' is a set of items"):
        TokenData(dataset="bundled:arc_easy", train_examples=1, validation_tokens=1, **tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fields": []}, "at least 1 item"),
        ({"places": {"x": {"source": "hub", "revision": "main"}}}, "a hub dataset has `hub`"),
        ({"places": {"x": {"source": "local", "revision": "r", "files": {}}}}, "the others have `files`"),
        ({"places": {"x": {"source": "mirror", "revision": "r"}}}, "bundled"),
    ],
)
def test_an_incomplete_entry_is_refused(change, message):
    entry = {"summary": "s", "licence": "l", "citation": "c", "fields": ["a"], "places": {}} | change
    with pytest.raises(SpecError, match=message):
        parse({"items": [entry]}, ItemSets, "items.yaml")


def test_a_hub_set_is_read_from_a_mirror_and_prepared_as_lm_eval_would_see_it(tmp_path, monkeypatch):
    calls, rows = [], bundled("eval/arc_easy.test")[:9]
    folder = tmp_path / "mirror/allenai/ai2_arc"
    (folder / "ARC-Easy").mkdir(parents=True)
    (folder / "ARC-Easy/test.jsonl").write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    data_files = [{"split": "test", "path": "ARC-Easy/test.jsonl"}]
    card = yaml.safe_dump({"configs": [{"config_name": "ARC-Easy", "data_files": data_files}]})
    (folder / "README.md").write_text(f"---\n{card}---\n")
    monkeypatch.setenv("PAPERLM_HUB_MIRROR", str(tmp_path / "mirror"))
    monkeypatch.setattr(socket.socket, "connect", lambda *address: calls.append(address))
    settings = ItemData(dataset="hub:allenai/ai2_arc/ARC-Easy", splits={"test": 7})
    assert read_items(prepare_items(settings, tmp_path / "out"), "test") == rows[:7] and calls == []
    with pytest.raises(DataError, match="allenai/ai2_arc"):
        prepare_items(ItemData(dataset="hub:allenai/ai2_arc/ARC-Easy", splits={"train": 7}), tmp_path / "out")


def test_a_short_pair_differs_in_its_last_answer_and_nowhere_else():
    def pair(chosen: str, rejected: str, before: str = "Human: Why?", other: str | None = None) -> dict[str, str]:
        heads = before, before if other is None else other
        texts = (f"{head}\n\nAssistant:{answer}" for head, answer in zip(heads, (chosen, rejected), strict=True))
        return dict(zip(("chosen", "rejected"), texts, strict=True))

    assert _is_short_pair(pair(" Because.", " No."))
    assert not _is_short_pair(pair(" Because.", " Because. ")), "the same answer"
    assert not _is_short_pair(pair(" Because.", " ")), "an empty answer"
    assert not _is_short_pair(pair(" Because.", " No.", other="Human: How?")), "another question"
    assert not _is_short_pair(pair(" Because.", " No.", before="Human: " + "Why? " * LONGEST_DIALOGUE)), "long"
