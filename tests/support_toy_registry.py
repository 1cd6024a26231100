"""Small sets and models of every kind of job, in a registry of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support_probe import file_entry, new_model, save
from transformers import BertForQuestionAnswering

from paperlm.data import registry as registry_module
from paperlm.data.registry import DatasetEntry, ModelEntry, Registry, registry


def text(start: int, count: int) -> list[dict]:
    """Documents of different lengths; some are shorter than an example, so that it is padded."""
    return [{"text": " ".join(f"word{n * k}" for k in range(2 + 5 * n % 13))} for n in range(start, start + count)]


def instructions(start: int, count: int) -> list[dict]:
    words = ("red", "green", "blue and black", "white")
    return [
        {"instruction": f"Name colour {n}.", "input": "a list" if n % 3 else "", "output": words[n % 4]}
        for n in range(start, start + count)
    ]


def pairs(start: int, count: int) -> list[dict]:
    return [
        {"prompt": f"Say {n}" + " now" * (n % 4), "chosen": "good " * (1 + n % 3) + str(n), "rejected": "bad " * 4}
        for n in range(start, start + count)
    ]


def both(start: int, count: int) -> list[dict]:
    return [a | b for a, b in zip(instructions(start, count), pairs(start, count), strict=True)]


def toy_registry(folder: Path) -> Registry:
    """The registry with small sets and models below `folder`, the `local_data` of the jobs here."""
    about = dict.fromkeys(("summary", "revision", "licence", "citation"), "toy")

    def entry(name: str, make: Any, start: int, splits: dict[str, int]) -> DatasetEntry:
        files = {}
        for split, count in splits.items():
            path = folder / f"{name}.{split}.jsonl"
            items = make(start, count)
            path.write_text("".join(json.dumps(item) + "\n" for item in items))
            files[split], start = [file_entry(path, folder)], start + count
        return DatasetEntry(source="local", files=files, fields=[] if make is text else list(items[0]), **about)

    folder.mkdir()
    three = {"train": 24, "validation": 16, "more": 26}
    datasets = {"both": entry("both", both, 0, three)}
    for kind, make in (("text", text), ("instructions", instructions), ("pairs", pairs)):
        splits = {"train": 70, "validation": 40} if make is text else three
        datasets |= {f"{kind}_{x}": entry(f"{kind}_{x}", make, start, splits) for x, start in (("a", 0), ("b", 200))}
    models = {}
    for seed, name in enumerate(("model_a", "model_b")):
        files = sorted(save(folder / name, new_model(seed=seed)).iterdir())
        entries = [file_entry(path, folder) for path in files]
        models[name] = ModelEntry(source="local", architecture="LlamaForCausalLM", files=entries, **about)
    for seed, name in enumerate(("answers_a", "answers_b")):
        made = new_model(BertForQuestionAnswering, seed, max_position_embeddings=256, initializer_range=0.5)
        entries = [file_entry(path, folder) for path in sorted(save(folder / name, made).iterdir())]
        models[name] = ModelEntry(source="local", architecture="BertForQuestionAnswering", files=entries, **about)
    known = registry()
    datasets["digits_of_12"] = with_more_classes(known.datasets["digits"], folder, 12)
    return Registry(datasets=known.datasets | datasets, tokenizers=known.tokenizers, models=known.models | models)


def with_more_classes(entry: DatasetEntry, folder: Path, classes: int) -> DatasetEntry:
    """The same images as a set whose labels, below `folder`, are of more classes."""
    files = {}
    for split, (image, labels) in entry.files.items():
        content = json.loads((registry_module.HERE / labels.path).read_text())
        path = folder / f"{split}.labels.json"
        path.write_text(json.dumps(content | {"names": [str(n) for n in range(classes)]}))
        files[split] = [image, file_entry(path, folder) | {"path": str(path)}]
    about = entry.model_dump() | {"images": entry.images.model_dump() | {"classes": classes}}
    return DatasetEntry.model_validate(about | {"files": {split: list(pair) for split, pair in files.items()}})
