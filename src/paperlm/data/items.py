"""Items of a set as plain JSON lines: `python -m paperlm prepare-data`, for fine-tuning, preference and evaluation.

Layout of results/data/<data id>/: <split>.jsonl, one item a line as the source has it, and manifest.json, written last.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from paperlm.data.images import ImageData, prepare_images
from paperlm.data.model_files import ModelData, prepare_model_files
from paperlm.data.prepare import prepare
from paperlm.data.registry import dataset_entry
from paperlm.data.settings import DataSettings, ItemData, TokenData
from paperlm.data.shards import load_manifest, write_manifest
from paperlm.data.sources import items
from paperlm.data.texts import TextData, prepare_text
from paperlm.errors import DataError
from paperlm.files import check_file, sha256_of, write_atomic
from paperlm.locks import held


def prepare_any(settings: DataSettings, folder: Path, local_data: str = "") -> Path:
    """What the settings describe, in `folder`; returns the manifest's path. Raises DataError as each kind does.

    Two processes never prepare one set at once; the second waits, and finds it done.
    """
    with held(folder.parent / "locks" / folder.name, folder.name):
        manifest = folder / "manifest.json"
        return manifest if manifest.is_file() else _prepare(settings, folder, local_data)


def _prepare(settings: DataSettings, folder: Path, local_data: str) -> Path:
    if isinstance(settings, TokenData):
        return prepare(settings.model_dump(mode="json"), folder, local_data)
    if isinstance(settings, TextData):
        return prepare_text(settings, folder, local_data)
    if isinstance(settings, ModelData):
        return prepare_model_files(settings, folder, local_data)
    if isinstance(settings, ImageData):
        return prepare_images(settings, folder, local_data)
    return prepare_items(settings, folder, local_data)


def prepare_items(settings: ItemData, folder: Path, local_data: str = "") -> Path:
    """Write the splits that the settings name into `folder`; returns the manifest's path.

    Raises DataError if a file fails its checksum, an item lacks a field that the registry names, or a split is empty.
    """
    name, entry = dataset_entry(settings.dataset)
    manifest = {
        "data_id": settings.data_id,
        "settings": settings.model_dump(mode="json"),
        "dataset": name,
        "licence": entry.licence,
        "citation": entry.citation,
        "checksums": settings.fingerprint(),
        "splits": {split: _write_split(settings, split, folder, local_data) for split in settings.splits},
    }
    return write_manifest(folder, manifest)


def _write_split(settings: ItemData, split: str, folder: Path, local_data: str) -> dict[str, Any]:
    chosen = itertools.islice(items(settings.dataset, split, local_data), settings.splits[split])
    lines = [
        json.dumps(item).encode() + b"\n"  # ASCII: some characters end a line for str.splitlines
        for item in tqdm(chosen, desc=f"{settings.dataset} {split}", unit=" items")
    ]
    if not lines:
        raise DataError(f"{settings.dataset}: the {split} split has no items")
    path = folder / f"{split}.jsonl"
    write_atomic(path, lambda file: file.writelines(lines))
    return {"file": path.name, "rows": len(lines), "sha256": sha256_of(path)}


def read_items(manifest_path: Path, split: str) -> list[dict[str, Any]]:
    """The prepared items of one split. Raises DataError if the file is missing, truncated or altered."""
    manifest = load_manifest(manifest_path)
    splits = manifest.get("splits", {})
    if split not in splits:
        raise DataError(f"{manifest_path}: no split {split!r} was prepared; it has {', '.join(splits) or 'no items'}")
    path = manifest_path.parent / splits[split]["file"]
    remedy = f"delete the folder {path.parent} and start again: it is rebuilt"
    check_file(path, splits[split]["sha256"], DataError, remedy)
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
