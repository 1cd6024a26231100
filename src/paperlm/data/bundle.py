"""How the bundled sets were drawn: `python -m paperlm.data.bundle FOLDER DIGITS` writes them again.

FOLDER holds the full sets of items (the files of the registry's `local` entries), DIGITS is the file digits.csv.gz of
scikit-learn. A fixed rule draws them, so that anyone with the full sets gets the same; a test does.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paperlm.data.registry import HERE
from paperlm.data.sources import items

Item = dict[str, Any]

EVALUATED = 100
"Items of the evaluated split; of MMLU two of each subject."
FEW_SHOT = 20
"Items of the training split, to draw few-shot examples from; of MMLU the five of each subject that its task names."
SFT_ITEMS = {"train": 4000, "validation": 200}
PAIRS = {"train": 500, "validation": 100}
QUESTIONS = {"train": 1000, "validation": 100}
VALIDATION_DIGITS = 500
"Images, of 1,797."
LONGEST_DIALOGUE = 600
"Characters; about 150 tokens of a vocabulary of 32,000."

# bundled set -> full set, evaluated split, the text by which a training item is recognized as an evaluated one
EVALUATIONS = {
    "arc_challenge": ("arc_challenge_full", "test", "question"),
    "arc_easy": ("arc_easy_full", "test", "question"),
    "boolq": ("boolq_full", "validation", "question"),
    "hellaswag": ("hellaswag_full", "validation", "ctx"),
    "openbookqa": ("openbookqa_full", "test", "question_stem"),
    "piqa": ("piqa_full", "validation", "goal"),
    "squad": ("squad_1000", "validation", "question"),
    "winogrande": ("winogrande_full", "validation", "sentence"),
}


def line(item: Mapping[str, Any]) -> bytes:
    """An item as it is stored, newline included."""
    return json.dumps(item, ensure_ascii=False).encode() + b"\n"


def drawn(candidates: Iterable[Item], count: int) -> list[Item]:
    """The `count` distinct items whose lines have the smallest SHA-256, in that order: whatever order the file has."""
    by_hash = {hashlib.sha256(line(item)).digest(): item for item in candidates}
    return [by_hash[key] for key in sorted(by_hash)[:count]]


def files(folder: str) -> Iterator[tuple[str, list[Item]]]:
    """Path below data/bundled/ -> items of every bundled file; `folder` has the full sets."""
    evaluated: set[str] = set()
    for name, (full, split, text) in EVALUATIONS.items():
        chosen = drawn(items(f"local:{full}", split, folder), EVALUATED)
        evaluated |= {item[text] for item in chosen}
        yield f"eval/{name}.{split}.jsonl.gz", chosen
        if name != "squad":
            yield f"eval/{name}.train.jsonl.gz", drawn(items(f"local:{full}", "train", folder), FEW_SHOT)
    subjects: dict[str, list[Item]] = {}
    for item in items("local:mmlu_full", "test", folder):
        subjects.setdefault(item["subject"], []).append(item)
    test = [item for subject in sorted(subjects) for item in drawn(subjects[subject], 2)]
    evaluated |= {item["question"] for item in test}
    yield "eval/mmlu.test.jsonl.gz", test
    yield "eval/mmlu.dev.jsonl.gz", list(items("local:mmlu_full", "dev", folder))
    for split, count in SFT_ITEMS.items():
        yield f"sft/commonsense_4k.{split}.jsonl.gz", _unseen(split, folder, evaluated, count)
    pairs = drawn(filter(_is_short_pair, items("local:hh_rlhf_harmless", "test", folder)), sum(PAIRS.values()))
    yield "preference/hh_rlhf_600.train.jsonl.gz", pairs[: PAIRS["train"]]
    yield "preference/hh_rlhf_600.validation.jsonl.gz", pairs[PAIRS["train"] :]
    tables = {schema["db_id"]: schema for schema in items("local:spider_full", "tables", folder)}
    for split, count in QUESTIONS.items():
        questions = (_with_tables(item, tables) for item in items("local:spider_full", split, folder))
        yield f"sql/spider_1000.{split}.jsonl.gz", drawn(questions, count)


def _with_tables(item: Item, schemas: Mapping[str, Item]) -> Item:
    """A question in the form of the paper's set: with a CREATE TABLE statement of each table that the answer names."""
    schema, words = schemas[item["db_id"]], set(re.findall(r"\w+", item["query"].lower()))
    statements = []
    for number, table in enumerate(schema["table_names_original"]):
        columns = [
            f"{name} {'INTEGER' if kind == 'number' else 'VARCHAR'}"
            for (of, name), kind in zip(schema["column_names_original"], schema["column_types"], strict=True)
            if of == number
        ]
        if table.lower() in words:
            statements.append(f"CREATE TABLE {table} ({', '.join(columns)})")
    return {"question": item["question"], "context": "; ".join(statements), "answer": item["query"]}


def _unseen(split: str, folder: str, evaluated: set[str], count: int) -> list[Item]:
    """The first items whose instruction contains no evaluated text."""
    training = items("local:commonsense_15k", split, folder)
    unseen = (item for item in training if not any(text in item["instruction"] for text in evaluated))
    return list(itertools.islice(unseen, count))


def _is_short_pair(pair: Item) -> bool:
    """Whether two short dialogues differ in their last answer and in nothing else; in some pairs more differs."""
    heads, answers = zip(*(pair[key].rsplit("\n\nAssistant:", 1) for key in ("chosen", "rejected")), strict=True)
    short = all(len(pair[key]) <= LONGEST_DIALOGUE for key in ("chosen", "rejected"))
    return short and heads[0] == heads[1] and answers[0].strip() != answers[1].strip() and all(map(str.strip, answers))


def compressed(rows: Iterable[Item]) -> bytes:
    """Lines, gzip without time or name."""
    return gzip.compress(b"".join(map(line, rows)), 9, mtime=0)


def digits(path: Path) -> Iterator[tuple[str, bytes]]:
    """Path below data/bundled/ -> content of the files of handwritten digits; `path` is scikit-learn's digits.csv.gz.

    Its lines are 64 counts from 0 to 16 and the digit. Validation are the images whose counts have the smallest
    SHA-256; a count is stored as the nearest whole number to count * 255 / 16, which keeps all 17 apart.
    """
    from PIL import Image

    table = np.loadtxt(path, delimiter=",", dtype=np.float64)
    counts, labels = table[:, :64].astype(np.uint8), table[:, 64].astype(int)
    order = sorted(range(len(counts)), key=lambda number: hashlib.sha256(counts[number].tobytes()).digest())
    for split, chosen in (("validation", order[:VALIDATION_DIGITS]), ("train", order[VALIDATION_DIGITS:])):
        picture = io.BytesIO()
        Image.fromarray(np.round(counts[chosen] * (255 / 16)).astype(np.uint8)).save(picture, "png", optimize=True)
        about = {"labels": labels[chosen].tolist(), "index_in_scikit_learn": chosen, "names": list("0123456789")}
        yield f"images/digits.{split}.png", picture.getvalue()
        yield f"images/digits.{split}.labels.json", json.dumps(about, separators=(",", ":")).encode()


if __name__ == "__main__":
    drawn_items = ((name, compressed(rows)) for name, rows in files(sys.argv[1]))
    for name, data in itertools.chain(drawn_items, digits(Path(sys.argv[2]))):
        path = HERE / "bundled" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        checksum = hashlib.sha256(data).hexdigest()
        print(f"{{path: bundled/{name}, bytes: {len(data)}, sha256: '{checksum}'}}")
