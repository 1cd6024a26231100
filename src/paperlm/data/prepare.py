"""Tokenize a dataset once into memory-mapped shards: `python -m paperlm prepare-data`.

Layout of results/data/<data id>/: train-00000.npy, ... and validation-00000.npy, each (examples, seq_len) uint16,
right-padded (packed examples are full), and manifest.json, written last. A killed job goes on after its last whole
shard.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from paperlm.data.registry import data_fingerprint, data_id, dataset_entry
from paperlm.data.sources import Split, documents
from paperlm.data.tokenizer import NO_PADDING, TextTokenizer, examples, packed
from paperlm.errors import DataError
from paperlm.files import sha256_of, write_atomic, write_json

SHARD_ROWS = 65_536
BATCH_DOCUMENTS = 512


def prepare(settings: dict[str, Any], folder: Path, local_data: str = "", shard_rows: int = SHARD_ROWS) -> Path:
    """Write the shards of `RunConfig.data_settings()` into `folder`; returns the manifest's path.

    Raises DataError if a text file fails its checksum, an id does not fit, or a split comes out empty.
    """
    identity = data_id(settings)
    tokenizer = TextTokenizer(settings["tokenizer"])
    if tokenizer.pad == NO_PADDING and settings["example"] != "packed":
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
        "checksums": data_fingerprint(settings["dataset"], settings["tokenizer"]),
        "pad_id": tokenizer.pad,
        "eos_id": tokenizer.eos,
        "unigram_perplexity": unigram_perplexity(np.array(counts), np.array(validation_counts)),
        **splits,
    }
    write_json(folder / "manifest.json", manifest)
    for leftover in folder.glob("*.progress.json"):
        leftover.unlink()
    return folder / "manifest.json"


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
    progress = {"data_id": identity, "shards": [], "documents": 0, "carried": 0, "left": [], "rows": 0, "tokens": 0}
    progress["counts"] = [0] * settings["vocab_size"]
    if progress_path.is_file():
        stored = json.loads(progress_path.read_text())
        if stored["data_id"] == identity and all((folder / s["file"]).is_file() for s in stored["shards"]):
            progress |= stored
    limit = settings["train_examples"] if split == "train" else None
    tokens_wanted = settings["validation_tokens"] if split == "validation" else None
    seq_len = settings["seq_len"]
    bar = tqdm(total=limit or tokens_wanted, desc=f"tokenize {split}", unit=" examples" if limit else " tokens")
    bar.update(progress["rows"] if limit else progress["tokens"])

    def is_enough() -> bool:
        return progress["rows"] == limit or (tokens_wanted is not None and progress["tokens"] >= tokens_wanted)

    rows: list[list[int]] = []
    enough = is_enough()  # a restart may find the split finished
    # `documents` counts those whose examples are all stored; `carried` of the next one's are stored already, the first
    # of which began with the ids `left` (packed examples).
    start, carried = progress["documents"], progress["carried"]
    encoded = [] if enough else _encoded(settings, split, tokenizer, local_data, start, progress["left"])
    for number, (left, pieces) in enumerate(encoded, start=start):
        for index, piece in enumerate(pieces):
            if number == start and index < carried:
                continue
            rows.append(piece)
            progress["rows"] += 1
            progress["tokens"] += len(piece)
            bar.update(1 if limit else len(piece))
            enough = is_enough()
            if len(rows) == shard_rows or enough:
                progress["documents"], progress["carried"], progress["left"] = number, index + 1, left
                _store_shard(rows, progress, split, folder, tokenizer.pad, seq_len)
                write_json(progress_path, progress)
                rows = []
            if enough:
                break
        if enough:
            break
    if rows:
        _store_shard(rows, progress, split, folder, tokenizer.pad, seq_len)
    bar.close()
    if not progress["rows"]:
        raise DataError(f"{settings['dataset']}: the {split} split has no documents")
    counts = ("shards", "rows", "tokens", "counts")
    return {key: progress[key] for key in counts}


def _encoded(
    settings: dict[str, Any], split: Split, tokenizer: TextTokenizer, local_data: str, skip: int, left: list[int]
) -> Iterator[tuple[list[int], list[list[int]]]]:
    """For each document, tokenized in batches: what the documents before left over, and its examples."""
    texts = documents(settings["dataset"], split, local_data, skip)
    while batch := list(itertools.islice(texts, BATCH_DOCUMENTS)):
        try:
            encoded = tokenizer.encode(batch)
        except DataError as error:
            raise DataError(f"{settings['dataset']}, {split} split: {error}") from None
        for ids in encoded:
            if settings["example"] == "packed":
                pieces, rest = packed(ids, left, settings["seq_len"])
                yield left, pieces
                left = rest
            else:
                yield left, list(examples(ids, settings["seq_len"], settings["example"]))


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
