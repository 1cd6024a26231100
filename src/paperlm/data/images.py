"""Sets of images with one class each: `python -m paperlm prepare-data`, for image classification.

Bundled and local splits are two files: a PNG, grey or in colour, whose rows are the images (height x width pixels
each), and JSON with `labels` and the classes' `names`. A hub's have columns `image` and `label`.

Layout of results/data/<data id>/: train-00000.bin, ... and validation-00000.bin, encoded images one after the other (as
the hub has them, PNG of the others); <the same>.npy, (images, 3) int64, a row (start, length, class) for each; and
manifest.json, written last. A killed job goes on after its last whole shard.
"""

from __future__ import annotations

import io
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field, model_validator
from tqdm import tqdm

from paperlm.data.registry import DatasetEntry, data_fingerprint, dataset_entry
from paperlm.data.shards import load_manifest, read_progress, write_manifest, write_progress
from paperlm.data.sources import file_paths, hub_rows, verify
from paperlm.errors import DataError, SpecError
from paperlm.files import check_file, sha256_of, write_atomic
from paperlm.frozen import Frozen, digest

if TYPE_CHECKING:
    from PIL.Image import Image

SHARD_IMAGES = 32_768
CACHE_BYTES = 2**28
"Decoded pixels that a reader keeps: all of a small set, so that it is decoded once."

Example = tuple[bytes, int]
"An encoded image and its class."


class ImageData(Frozen):
    """Images of a set, encoded, and their classes."""

    dataset: str = Field(pattern=r"^(bundled|local|hub):[\w./-]+$")
    images: dict[Literal["train", "validation"], int | None] = Field(min_length=1)
    "split -> at most so many of its first images; None: all"

    @model_validator(mode="after")
    def is_a_set_of_images(self) -> ImageData:
        try:
            _, entry = dataset_entry(self.dataset)
        except SpecError as error:
            raise ValueError(str(error)) from None
        if entry.images is None:
            raise ValueError(f"dataset {self.dataset!r} is {entry.form}, no set of images")
        if wrong := [split for split, count in self.images.items() if count is not None and count < 1]:
            raise ValueError(f"images: {', '.join(wrong)}: at least one image, or null for all")
        return self

    @property
    def classes(self) -> int:
        """How many there are."""
        return dataset_entry(self.dataset)[1].images.classes

    def fingerprint(self) -> dict[str, Any]:
        """Checksums of the set's files."""
        return data_fingerprint(self.dataset)

    @property
    def data_id(self) -> str:
        """Folder name below results/data/."""
        name, _ = dataset_entry(self.dataset)
        content = {**self.model_dump(mode="json"), "data": self.fingerprint()}
        return f"{name.replace('/', '_').lower()}-{digest(content)}"


def prepare_images(settings: ImageData, folder: Path, local_data: str = "", shard_images: int = SHARD_IMAGES) -> Path:
    """Write the splits that the settings name into `folder`; returns the manifest's path.

    Raises DataError if a file fails its checksum or is not what the registry says, for an image that cannot be read, a
    class that there is not, and an empty split.
    """
    name, entry = dataset_entry(settings.dataset)
    folder.mkdir(parents=True, exist_ok=True)
    names = {split: _names(settings, split, local_data) for split in settings.images}
    splits = {split: _write_split(settings, split, folder, local_data, shard_images) for split in settings.images}
    manifest = {
        "data_id": settings.data_id,
        "settings": settings.model_dump(mode="json"),
        "dataset": name,
        "licence": entry.licence,
        "citation": entry.citation,
        "checksums": settings.fingerprint(),
        "names": next(iter(names.values())),
        "splits": splits,
    }
    path = write_manifest(folder, manifest)
    for leftover in folder.glob("*.progress.json"):
        leftover.unlink()
    return path


def _write_split(
    settings: ImageData, split: str, folder: Path, local_data: str, shard_images: int
) -> list[dict[str, Any]]:
    """Shards of one split; the progress file after each says where to go on."""
    progress_path = folder / f"{split}.progress.json"
    shards: list[dict[str, Any]] = (read_progress(progress_path, settings.data_id) or {"shards": []})["shards"]
    done, limit = sum(shard["images"] for shard in shards), settings.images[split]
    found = itertools.islice(
        examples(settings.dataset, split, local_data, done), None if limit is None else limit - done
    )
    bar = tqdm(found, desc=f"{settings.dataset} {split}", unit=" images", initial=done)
    while batch := list(itertools.islice(bar, shard_images)):
        shards.append(_store(batch, folder, f"{split}-{len(shards):05d}"))
        write_progress(progress_path, settings.data_id, {"shards": shards})
    if not shards:
        raise DataError(f"{settings.dataset}: the {split} split has no images")
    return shards


def _store(batch: list[Example], folder: Path, stem: str) -> dict[str, Any]:
    lengths = np.array([len(content) for content, _ in batch], dtype=np.int64)
    index = np.stack([np.cumsum(lengths) - lengths, lengths, np.array([label for _, label in batch])], axis=1)
    paths = folder / f"{stem}.bin", folder / f"{stem}.npy"
    write_atomic(paths[0], lambda file: file.writelines(content for content, _ in batch))
    write_atomic(paths[1], lambda file: np.save(file, index.astype(np.int64)))
    return {"images": len(batch), "files": [{"file": path.name, "sha256": sha256_of(path)} for path in paths]}


# -- sources --


def examples(dataset: str, split: str, local_data: str = "", skip: int = 0) -> Iterator[Example]:
    """Encoded images of a split and their classes in their fixed order, the first `skip` left out.

    Raises DataError as `prepare_images` does.
    """
    from PIL import Image, UnidentifiedImageError

    _, entry = dataset_entry(dataset)
    found = _hub_examples(entry, split, skip) if entry.hub else _strip(dataset, entry, split, local_data, skip)
    for number, (content, label) in enumerate(found, start=skip):
        where = f"{dataset}, {split} split, image {number}"
        if type(label) is not int or not 0 <= label < entry.images.classes:
            raise DataError(f"{where}: class {label!r}; classes are 0 to {entry.images.classes - 1}")
        try:
            with Image.open(io.BytesIO(content)) as image:
                image.verify()
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{where}: no image that can be read ({error}); fetch the set again") from None
        yield content, label


def _hub_examples(entry: DatasetEntry, split: str, skip: int) -> Iterator[tuple[bytes, Any]]:
    for number, row in enumerate(hub_rows(entry, split, skip, encoded="image"), start=skip):
        try:
            yield row["image"]["bytes"], row["label"]
        except (KeyError, TypeError):
            has = ", ".join(row)
            raise DataError(
                f"{entry.hub.name}, {split} split, image {number}: needs columns image and label, it has {has}"
            ) from None


def _strip(dataset: str, entry: DatasetEntry, split: str, local_data: str, skip: int) -> Iterator[tuple[bytes, Any]]:
    from PIL import Image, UnidentifiedImageError

    (path, file), _ = file_paths(dataset, split, local_data)
    verify(path, file)
    try:
        with Image.open(path) as image:
            rows = np.asarray(image)
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: no PNG that can be read ({error})") from None
    labels, (height, width, channels) = _labels(dataset, split, local_data)["labels"], entry.images.shape
    colours = (channels,) if channels > 1 else ()
    expected = (len(labels), height * width, *colours)
    if rows.dtype != np.uint8 or rows.shape != expected:
        raise DataError(
            f"{path}: {rows.dtype} of shape {rows.shape}; {len(labels)} labels and images of {height} x {width} pixels "
            f"need uint8 of shape {expected}: a row an image"
        )
    pixels = rows.reshape(-1, height, width, *colours)
    for values, label in zip(pixels[skip:], labels[skip:], strict=True):
        content = io.BytesIO()
        Image.fromarray(values).save(content, "png")
        yield content.getvalue(), label


def _labels(dataset: str, split: str, local_data: str) -> dict[str, Any]:
    _, (path, file) = file_paths(dataset, split, local_data)
    verify(path, file)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        _ = [list(content[key]) for key in ("labels", "names")]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no JSON object with lists `labels` and `names` ({error})") from None
    return content


def _names(settings: ImageData, split: str, local_data: str) -> list[str]:
    """Names of the classes; numbers where the source has none here."""
    _, entry = dataset_entry(settings.dataset)
    if entry.hub:
        return [str(number) for number in range(entry.images.classes)]
    names = _labels(settings.dataset, split, local_data)["names"]
    if len(names) != entry.images.classes:
        raise DataError(f"{settings.dataset}, {split} split: names of {len(names)} classes, not {entry.images.classes}")
    return [str(name) for name in names]


# -- reading --


class ImageShards:
    """The prepared images of one split, in file order."""

    def __init__(self, manifest_path: Path, split: str, channels: int) -> None:
        """`channels`: 1 or 3, what images are converted to. Raises DataError if a file is missing or altered."""
        self.manifest = load_manifest(manifest_path)
        self.mode = {1: "L", 3: "RGB"}[channels]
        self.name = f"{self.manifest['dataset']}, {split} split"
        folder, self._data, index = manifest_path.parent, [], []
        if split not in self.manifest["splits"]:
            raise DataError(f"{manifest_path}: no split {split!r} was prepared; run the data rule again")
        for shard in self.manifest["splits"][split]:
            for stored in shard["files"]:
                remedy = f"delete the folder {folder} and start again: it is rebuilt"
                check_file(folder / stored["file"], stored["sha256"], DataError, remedy)
            content, places = (folder / stored["file"] for stored in shard["files"])
            self._data.append(np.memmap(content, dtype=np.uint8, mode="r"))
            rows = np.load(places, allow_pickle=False)
            index.append(np.concatenate([np.full((len(rows), 1), len(index)), rows], axis=1))
        self._index = np.concatenate(index)
        self.labels: np.ndarray = self._index[:, 3]
        "(images,) int64"
        self._cache: dict[int, Image] = {}
        self._room, self._lock = CACHE_BYTES, threading.Lock()

    def __len__(self) -> int:
        return len(self._index)

    def image(self, number: int) -> Image:
        """An image, decoded. DataError if it is no whole image. Threads may call it."""
        from PIL import Image

        if number in self._cache:
            return self._cache[number]
        shard, start, length, _ = self._index[number]
        try:
            with Image.open(io.BytesIO(self._data[shard][start : start + length].tobytes())) as stored:
                image = stored.convert(self.mode)
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{self.name}, image {number}: cannot be decoded ({error}); fetch the set again") from None
        with self._lock:
            size = image.width * image.height * len(self.mode)
            if size <= self._room:
                self._room -= size
                self._cache[number] = image
        return image
