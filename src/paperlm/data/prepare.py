"""Tokenize a dataset once into memory-mapped shards: `python -m paperlm prepare-data`.

Layout of results/data/<data id>/: train-00000.npy, ... and validation-00000.npy, each (examples, seq_len) uint16,
right-padded (packed examples are full), and manifest.json, written last. A killed job goes on after its last whole
shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from paperlm.data.registry import data_fingerprint, data_id, dataset_entry
from paperlm.data.shards import read_progress, write_manifest, write_progress
from paperlm.data.sources import Split, documents
from paperlm.data.tokenizer import NO_PADDING, TextTokenizer, examples, packed
from paperlm.errors import DataError
from paperlm.files import sha256_of, write_atomic

PACKED = ("packed", "packed_bos")
"Of paperlm.data.settings.Example, those whose rows are full."
SHARD_ROWS = 65_536
BATCH_DOCUMENTS = 512


def prepare(settings: dict[str, Any], folder: Path, local_data: str = "", shard_rows: int = SHARD_ROWS) -> Path:
    """Write the shards of `TokenData` settings, as plain values, into `folder`; returns the manifest's path.

    Raises DataError if a text file fails its checksum, an id does not fit, or a split comes out empty.
    """
    identity = data_id(settings)
    tokenizer = TextTokenizer(settings["tokenizer"])
    if tokenizer.pad == NO_PADDING and settings["example"] not in PACKED:
        raise DataError(
            f"tokenizer {settings['tokenizer']!r} has no padding token, which example: {settings['example']} needs; "
            "use example: packed, or another tokenizer"
        )
    folder.mkdir(parents=True, exist_ok=True)
    splits: dict[str, Any] = {}
    for split in ("validation", "train"):
        splits[split] = _write_split(settings, split, tokenizer, folder, identity, local_data, shard_rows)
    name, entry = dataset_entry(settings["dataset"])
    counts = splits["train"].pop("counts")
    validation_counts = splits["validation"].pop("counts")
    manifest = {
        "data_id": identity,
        "settings": settings,
        "dataset": name,
        "licence": entry.licence,
        "citation": entry.citation,
        "tokenizer": {"licence": tokenizer.entry.licence, "citation": tokenizer.entry.citation},
        "checksums": data_fingerprint(settings["dataset"], settings["tokenizer"]),
        "pad_id": tokenizer.pad,
        "eos_id": tokenizer.eos,
        "bos_id": tokenizer.bos,
        "unigram_perplexity": unigram_perplexity(np.array(counts), np.array(validation_counts)),
        **splits,
    }
    path = write_manifest(folder, manifest)
    for leftover in folder.glob("*.progress.json"):
        leftover.unlink()
    return path


def unigram_perplexity(train_counts: np.ndarray, validation_counts: np.ndarray) -> float:
    """Perplexity of the validation labels under the training labels' add-one unigram distribution.

    A model that learned nothing but token frequencies sits here; the papers' diverged runs do.
    """
    log_p = np.log((train_counts + 1.0) / (train_counts.sum() + len(train_counts)))
    return float(np.exp(-(validation_counts * log_p).sum() / validation_counts.sum()))


def _write_split(
    settings: dict[str, Any],
    split: Split,
    tokenizer: TextTokenizer,
    folder: Path,
    identity: str,
    local_data: str,
    shard_rows: int,
) -> dict[str, Any]:
    """Shards of one split; the progress file after each shard says where to go on."""
    progress_path = folder / f"{split}.progress.json"
    progress = {"shards": [], "rows": 0, "tokens": 0, "counts": [0] * settings["vocab_size"]}
    progress["next"] = {"document": 0, "left": [], "example": 0}
    stored = read_progress(progress_path, identity) or progress
    if stored.keys() == progress.keys() and all((folder / s["file"]).is_file() for s in stored["shards"]):
        progress |= stored
    limit = settings["train_examples"] if split == "train" else None
    tokens_wanted = settings["validation_tokens"] if split == "validation" else None
    bar = tqdm(total=limit or tokens_wanted, desc=f"tokenize {split}", unit=" examples" if limit else " tokens")
    bar.update(progress["rows"] if limit else progress["tokens"])

    def is_enough() -> bool:
        return progress["rows"] == limit or (tokens_wanted is not None and progress["tokens"] >= tokens_wanted)

    rows: list[list[int]] = []
    # a restart may find the split finished
    found = () if is_enough() else _examples(settings, split, tokenizer, local_data, progress["next"])
    for row, after in found:
        rows.append(row)
        progress["rows"] += 1
        progress["tokens"] += len(row)
        bar.update(1 if limit else len(row))
        if len(rows) == shard_rows or is_enough():
            progress["next"] = after
            _store_shard(rows, progress, split, folder, tokenizer.pad, settings["seq_len"])
            write_progress(progress_path, identity, progress)
            rows = []
        if is_enough():
            break
    if rows:
        _store_shard(rows, progress, split, folder, tokenizer.pad, settings["seq_len"])
    bar.close()
    if not progress["rows"]:
        raise DataError(f"{settings['dataset']}: the {split} split has no documents")
    return {key: progress[key] for key in ("shards", "rows", "tokens", "counts")}


def _examples(
    settings: dict[str, Any], split: Split, tokenizer: TextTokenizer, local_data: str, start: dict[str, Any]
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Examples from `start` on, each with the place after it, from which it goes on the same.

    A place is the number of a document, the ids that the documents before it left over (packed examples), and how many
    of its own examples are behind.
    """
    left, behind = start["left"], start["example"]
    texts = documents(settings["dataset"], split, local_data, start["document"])
    encoded = itertools.chain.from_iterable(_encoded(texts, settings["dataset"], split, tokenizer))
    for number, ids in enumerate(encoded, start=start["document"]):
        if settings["example"] in PACKED:
            head = (tokenizer.bos,) if settings["example"] == "packed_bos" else ()
            rows, rest = packed(ids, left, settings["seq_len"], head)
        else:
            rows, rest = list(examples(ids, settings["seq_len"], settings["example"])), []
        for index in range(behind, len(rows)):
            yield rows[index], {"document": number, "left": left, "example": index + 1}
        left, behind = rest, 0


def _encoded(texts: Iterator[str], dataset: str, split: Split, tokenizer: TextTokenizer) -> Iterator[list[list[int]]]:
    """Ids of the documents, a batch at a time."""
    while batch := list(itertools.islice(texts, BATCH_DOCUMENTS)):
        try:
            yield tokenizer.encode(batch)
        except DataError as error:
            raise DataError(f"{dataset}, {split} split: {error}") from None


def _store_shard(
    rows: list[list[int]], progress: dict[str, Any], split: Split, folder: Path, pad: int, seq_len: int
) -> None:
    array = np.full((len(rows), seq_len), max(pad, 0), dtype=np.uint16)  # without padding, every row is full
    for i, row in enumerate(rows):
        array[i, : len(row)] = row
    labels = np.array([i for row in rows for i in row[1:]], dtype=np.int64)
    progress["counts"] = (
        np.array(progress["counts"]) + np.bincount(labels, minlength=len(progress["counts"]))
    ).tolist()
    path = folder / f"{split}-{len(progress['shards']):05d}.npy"
    write_atomic(path, lambda file: np.save(file, array))
    progress["shards"].append({"file": path.name, "rows": len(rows), "sha256": sha256_of(path)})
