"""Documents of a text and items of a set, from the package, a local folder or the Hugging Face hub.

Bundled and local files are checked against the registry's byte counts and SHA-256 sums before the first line is used.
Files are JSON lines, gzip or zstandard packed; of a text, with a `text` field.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

from paperlm.data.registry import (
    HERE,
    DatasetEntry,
    FileEntry,
    Part,
    dataset_entry,
    is_model,
    item_splits,
    model_entry,
)
from paperlm.errors import DataError, SpecError

Split = Literal["train", "validation"]


def verify(path: Path, entry: FileEntry) -> None:
    """Raise DataError if the file is missing, truncated or altered."""
    if not path.is_file():
        raise DataError(
            f"{path}: missing data file; restore it, or point config key local_data at the folder that has it"
        )
    size = path.stat().st_size
    if size != entry.bytes:
        raise DataError(f"{path}: {size} bytes instead of {entry.bytes}: truncated or altered; fetch it again")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry.sha256:
        raise DataError(f"{path}: sha256 {found[:12]}… instead of {entry.sha256[:12]}…: altered; fetch it again")


def file_paths(dataset: str, split: str, local_data: str) -> list[tuple[Path, FileEntry]]:
    """Paths of a bundled or local dataset's files, unchecked. A text without a validation file has train's for both."""
    _, entry = dataset_entry(dataset)
    if entry.source == "local" and not local_data:
        below = next(iter(entry.files.values()))[0].path.split("/")[0]
        raise DataError(f"dataset {dataset!r} needs a folder: snakemake … --config local_data=<folder with {below}/>")
    folder = HERE if entry.source == "bundled" else Path(local_data)
    found = entry.files[split if entry.fields or split in entry.files else "train"]
    return [(folder / f.path, f) for f in found]


def model_paths(model: str, local_data: str) -> list[tuple[Path, FileEntry]]:
    """Paths of a bundled or local model's files, unchecked; none of a hub's."""
    _, entry = model_entry(model)
    if entry.source == "local" and not local_data:
        below = entry.files[0].path.split("/")[0]
        raise DataError(f"model {model!r} needs a folder: snakemake … --config local_data=<folder with {below}/>")
    folder = HERE if entry.source == "bundled" else Path(local_data)
    return [(folder / f.path, f) for f in entry.files]


def check_present(name: str, local_data: str) -> None:
    """DataError if a bundled or local file of a dataset or model is missing or has another size.

    The check that can be done before a job.
    """
    if is_model(name):
        paths = model_paths(name, local_data)
    else:
        _, entry = dataset_entry(name)
        paths = [found for split in entry.files for found in file_paths(name, split, local_data)]
    for path, file_entry in paths:
        if not path.is_file():
            raise DataError(f"{name!r}: {path} is missing; restore it or set config key local_data")
        if path.stat().st_size != file_entry.bytes:
            raise DataError(f"{path}: {path.stat().st_size} bytes instead of {file_entry.bytes}: truncated or altered")


def documents(dataset: str, split: Split, local_data: str = "", skip: int = 0) -> Iterator[str]:
    """Texts of a split in their fixed order, the first `skip` left out. Raises DataError as `verify` does."""
    _, entry = dataset_entry(dataset)
    if entry.form != "a text":
        raise SpecError(f"dataset {dataset!r} is {entry.form}, no text to train on; name a text")
    texts = (
        (row[entry.text_field] for row in hub_rows(entry, entry.held_out if split == "validation" else split, skip))
        if entry.hub
        else _file_documents(entry, dataset, split, local_data, skip)
    )
    yield from texts


def items(dataset: str, split: str, local_data: str = "") -> Iterator[dict[str, Any]]:
    """Items of a split of a set in their fixed order, each with all fields that the registry names.

    Raises SpecError for a text or an unknown split, DataError as `verify` does and for an item that lacks a field.
    """
    entry = item_splits(dataset, [split])
    part = entry.parts.get(split, Part(of=split))
    found = _hub_items(entry, part.of) if entry.hub else _file_items(dataset, part.of, local_data)
    stop = None if part.first is None else part.skip + part.first
    for where, item in itertools.islice(found, part.skip, stop):
        if isinstance(item, dict) and entry.columns:
            item |= {field: _below(item, path, where) for field, path in entry.columns.items()}
        if missing := [field for field in entry.fields if not isinstance(item, dict) or field not in item]:
            has = ", ".join(item) if isinstance(item, dict) else "no fields"
            names = ", ".join(map(repr, missing))
            raise DataError(f"{where}: item without {names} (it has {has}), which {dataset} needs")
        yield item


def _below(item: Any, path: str, where: str) -> Any:
    """What lies at keys within keys. Raises DataError if nothing does."""
    for key in path.split("."):
        if not isinstance(item, dict) or item.get(key) is None:
            raise DataError(f"{where}: item without {path!r} (no {key!r} there)")
        item = item[key]
    return item


def _file_items(dataset: str, split: str, local_data: str) -> Iterator[tuple[str, Any]]:
    paths = file_paths(dataset, split, local_data)
    for path, file_entry in paths:
        verify(path, file_entry)
    for path, _ in paths:
        with _open(path) as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield f"{path}, line {number}", json.loads(line)
                except ValueError as error:
                    raise DataError(f"{path}, line {number}: no JSON ({error})") from None


def _hub_items(entry: DatasetEntry, split: str) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(hub_rows(entry, split, 0), start=1):
        yield f"{entry.hub.name}, {split} split, item {number}", row


def _file_documents(entry: DatasetEntry, dataset: str, split: Split, local_data: str, skip: int) -> Iterator[str]:
    paths = file_paths(dataset, split, local_data)
    for path, file_entry in paths:
        verify(path, file_entry)
    seen = 0
    for path, _ in paths:
        with _open(path) as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    text = json.loads(line)[entry.text_field]
                    text_hash = hashlib.sha256(text.encode()).hexdigest()
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise DataError(
                        f"{path}, line {number}: no JSON object with a {entry.text_field} field ({error})"
                    ) from None
                if entry.validation_share is not None:
                    held_out = int(text_hash, 16) % entry.validation_share == 0
                    if held_out != (split == "validation"):
                        continue
                seen += 1
                if seen > skip:
                    yield text


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        # pyarrow comes with datasets, and has zstandard on every platform; Python gets it in 3.14 only.
        import io

        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def hub_rows(entry: DatasetEntry, split: str, skip: int, encoded: str = "") -> Iterator[dict[str, Any]]:
    """Streamed with `datasets`; where the entry has a seed, shard order and a buffer are shuffled by it.

    `encoded`: a column of images that are left as they are stored: {"bytes": ..., "path": ...}.
    """
    import datasets

    hub = entry.hub
    # A folder in the hub's layout, for clusters with a mirror; the name stays part of the run's identity.
    mirror = os.environ.get("PAPERLM_HUB_MIRROR")
    name = str(Path(mirror) / hub.name) if mirror else hub.name
    revision = {} if mirror else {"revision": hub.revision}
    try:
        stream = datasets.load_dataset(name, hub.config, split=split, streaming=True, **revision)
    except Exception as error:
        raise DataError(
            f"dataset {hub.name!r} cannot be opened ({type(error).__name__}: {error}); this scale needs the network, "
            "or a folder in the hub's layout named by the environment variable PAPERLM_HUB_MIRROR"
        ) from error
    if encoded:
        stream = stream.cast_column(encoded, datasets.Image(decode=False))
    if split in hub.shuffle:
        stream = stream.shuffle(seed=hub.shuffle[split].seed, buffer_size=hub.shuffle[split].buffer)
    try:
        yield from stream.skip(skip) if skip else stream
    except Exception as error:
        raise DataError(f"dataset {hub.name!r}, {split} split: broken off ({type(error).__name__}: {error})") from error
