"""Sets of images: the bundled digits, preparation from files and from a hub's layout, reading, bad input."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import socket

import numpy as np
import pytest
import sklearn.datasets
from PIL import Image
from support_items import FULL_SETS, needs_full_sets

import paperlm.data.images as images_module
from paperlm.data import registry as registry_module
from paperlm.data.images import ImageData, ImageShards, examples, prepare_images
from paperlm.data.items import prepare_any
from paperlm.data.registry import HERE, DatasetEntry, ImageFormat, registry
from paperlm.data.settings import ItemData, TokenData, data_settings
from paperlm.data.texts import TextData
from paperlm.errors import DataError

DIGITS = ImageData(dataset="bundled:digits", images={"train": None, "validation": None})
CIFAR = ImageData(dataset="local:cifar10_6000", images={"validation": 200})


def png(pixels):
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "png")
    return content.getvalue()


def arrays(shards):
    return np.stack([np.asarray(shards.image(number)) for number in range(len(shards))])


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Registers local:toy, colour images of 2 x 3 pixels in three classes; returns its pixels by split."""
    random = np.random.default_rng(0)

    def make(labels=(0, 1, 2, 1, 0, 2, 1), shape=(2, 3, 3), names="abc", rows=None, raw=None):
        pixels, files = {}, {}
        for split in ("train", "validation"):
            pixels[split] = random.integers(0, 256, (rows or len(labels), *shape), dtype=np.uint8)
            about = json.dumps({"labels": list(labels), "names": list(names)}).encode()
            contents = {"png": raw or png(pixels[split].reshape(len(pixels[split]), -1, 3)), "labels.json": about}
            files[split] = []
            for suffix, content in contents.items():
                path = tmp_path / f"{split}.{suffix}"
                path.write_bytes(content)
                checksum = hashlib.sha256(content).hexdigest()
                files[split].append({"path": path.name, "bytes": len(content), "sha256": checksum})
        about = dict.fromkeys(("summary", "revision", "licence", "citation"), "toy")
        entry = DatasetEntry(source="local", files=files, images=ImageFormat(classes=3, shape=(2, 3, 3)), **about)
        changed = registry().model_copy(update={"datasets": {**registry().datasets, "toy": entry}})
        monkeypatch.setattr(registry_module, "registry", lambda: changed)
        return pixels

    return make


def settings_of_toy(**images):
    return ImageData(dataset="local:toy", images=images or {"train": None, "validation": None})


# -- the bundled digits --


def test_the_bundled_digits_are_all_of_scikit_learns_each_once_with_its_class(tmp_path):
    theirs = sklearn.datasets.load_digits()
    manifest = prepare_any(DIGITS, tmp_path / DIGITS.data_id)
    seen = []
    for split, count in (("train", 1297), ("validation", 500)):
        shards = ImageShards(manifest, split, channels=1)
        index = json.loads((HERE / f"bundled/images/digits.{split}.labels.json").read_text())["index_in_scikit_learn"]
        assert len(shards) == count == len(index)
        assert np.array_equal(np.round(arrays(shards) * (16 / 255)), theirs.images[index])
        assert np.array_equal(shards.labels, theirs.target[index])
        seen += index
    assert sorted(seen) == list(range(1797))
    assert json.loads(manifest.read_text())["names"] == list("0123456789")


def test_drawing_the_digits_again_gives_the_same_images_and_labels():
    from paperlm.data.bundle import digits

    source = next(iter(sklearn.datasets.__path__))
    for name, content in digits(f"{source}/data/digits.csv.gz"):
        stored = (HERE / "bundled" / name).read_bytes()
        if name.endswith(".json"):
            assert content == stored
        else:  # another zlib compresses otherwise
            assert np.array_equal(*(np.asarray(Image.open(io.BytesIO(data))) for data in (content, stored)))


@needs_full_sets
def test_cifar_is_read_from_its_folder_and_its_classes_look_different(tmp_path):
    shards = ImageShards(prepare_any(CIFAR, tmp_path / "c", FULL_SETS), "validation", channels=3)
    assert arrays(shards).shape == (200, 32, 32, 3) and set(shards.labels.tolist()) == set(range(10))
    with Image.open(f"{FULL_SETS}/images/cifar10/test.png") as strip:
        assert np.array_equal(arrays(shards)[7], np.asarray(strip)[7].reshape(32, 32, 3))


# -- preparation --


@pytest.mark.parametrize("shard_images", [1, 3, 100])
def test_prepared_images_are_the_sources_in_order_in_shards_of_any_size(toy, tmp_path, shard_images):
    pixels = toy()
    manifest = prepare_images(settings_of_toy(), tmp_path / "out", str(tmp_path), shard_images)
    for split in pixels:
        shards = ImageShards(manifest, split, channels=3)
        assert np.array_equal(arrays(shards), pixels[split])
        assert shards.labels.tolist() == [0, 1, 2, 1, 0, 2, 1]
    grey = ImageShards(manifest, "train", channels=1)
    assert grey.image(0).mode == "L" and grey.image(0) is grey.image(0), "decoded once"


def test_a_limit_takes_the_first_images_and_is_part_of_the_datas_name(toy, tmp_path):
    pixels = toy()
    few = settings_of_toy(train=5)
    shards = ImageShards(prepare_images(few, tmp_path / "out", str(tmp_path), 2), "train", channels=3)
    assert np.array_equal(arrays(shards), pixels["train"][:5]) and few.data_id != settings_of_toy().data_id
    assert data_settings(few.model_dump()) == few


@pytest.mark.parametrize("writes", range(1, 9))
def test_preparation_that_was_stopped_after_any_write_ends_in_the_same_files(toy, tmp_path, monkeypatch, writes):
    toy()
    whole = prepare_images(settings_of_toy(train=None), tmp_path / "whole", str(tmp_path), 3)
    left = iter(range(writes))
    write = images_module.write_atomic

    def stopping(*arguments):
        if next(left, None) is None:
            raise KeyboardInterrupt
        write(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(images_module, "write_atomic", stopping)
        prepare_images(settings_of_toy(train=None), tmp_path / "out", str(tmp_path), 3)
        raise KeyboardInterrupt  # there are six writes of shards in all
    again = prepare_images(settings_of_toy(train=None), tmp_path / "out", str(tmp_path), 3)
    assert again.read_text() == whole.read_text()
    contents = [{p.name: p.read_bytes() for p in sorted(m.parent.iterdir())} for m in (whole, again)]
    assert contents[0] == contents[1]


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """ImageNet in the hub's layout with four images of different sizes a split; no connection is allowed."""
    import datasets

    folder, random, calls = tmp_path / "mirror/ILSVRC/imagenet-1k/data", np.random.default_rng(0), []
    folder.mkdir(parents=True)
    found = {}
    for split in ("train", "validation"):
        rows = [png(random.integers(0, 256, (5 + n, 4 + 2 * n, 3), dtype=np.uint8)) for n in range(4)]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        columns = {"image": [{"bytes": row, "path": None} for row in rows], "label": [3, 999, 0, 7]}
        datasets.Dataset.from_dict(columns, features).to_parquet(folder / f"{split}-00000-of-00001.parquet")
        found[split] = rows
    monkeypatch.setenv("PAPERLM_HUB_MIRROR", str(tmp_path / "mirror"))
    monkeypatch.setattr(socket.socket, "connect", lambda *address: calls.append(address))
    yield found
    assert calls == []


def test_imagenet_is_prepared_from_a_mirror_byte_by_byte_as_the_hub_has_it(mirror, tmp_path):
    settings = ImageData(dataset="hub:ILSVRC/imagenet-1k", images={"train": 3, "validation": None})
    manifest = prepare_images(settings, tmp_path / "out", shard_images=2)
    for split, count in (("train", 3), ("validation", 4)):
        assert list(examples(settings.dataset, split)) == list(zip(mirror[split], [3, 999, 0, 7], strict=True))
        shards = ImageShards(manifest, split, channels=3)
        assert shards.labels.tolist() == [3, 999, 0, 7][:count]
        for number in range(count):
            with Image.open(io.BytesIO(mirror[split][number])) as image:
                assert np.array_equal(np.asarray(shards.image(number)), np.asarray(image))


# -- bad input --


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": (0, 1, 3)}, r"local:toy, train split, image 2: class 3; classes are 0 to 2"),
        ({"labels": (0, -1, 2)}, r"image 1: class -1; classes are 0 to 2"),
        ({"labels": (0, "1", 2)}, r"image 1: class '1'"),
        (
            {"rows": 5},
            r"train.png: uint8 of shape \(5, 6, 3\); 7 labels and images of 2 x 3 pixels need .* \(7, 6, 3\)",
        ),
        ({"shape": (2, 2, 3)}, r"train.png: uint8 of shape \(7, 4, 3\); .* need uint8 of shape \(7, 6, 3\)"),
        ({"raw": png(np.zeros((7, 6), np.uint8))}, r"train.png: uint8 of shape \(7, 6\); .* of shape \(7, 6, 3\)"),
        ({"names": "ab"}, r"names of 2 classes, not 3"),
        ({"raw": b"no image at all"}, r"train.png: no PNG that can be read"),
        ({"raw": png(np.eye(64, dtype=np.uint8))[:70]}, r"train.png: no PNG that can be read"),
    ],
)
def test_a_set_that_is_not_what_the_registry_says_is_refused_with_file_and_place(toy, tmp_path, change, message):
    toy(**change)
    with pytest.raises(DataError, match=message):
        prepare_images(settings_of_toy(), tmp_path / "out", str(tmp_path))
    assert not (tmp_path / "out/manifest.json").exists()


def test_a_truncated_source_is_refused_before_anything_is_read(toy, tmp_path):
    toy()
    path = tmp_path / "train.png"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"train.png: \d+ bytes instead of \d+: truncated or altered"):
        prepare_images(settings_of_toy(), tmp_path / "out", str(tmp_path))


def test_a_broken_image_of_a_hub_is_named(mirror, tmp_path, monkeypatch):
    broken = mirror["train"][1][:40]
    monkeypatch.setattr(images_module, "hub_rows", lambda *a, **k: iter([{"image": {"bytes": broken}, "label": 0}]))
    with pytest.raises(DataError, match=r"imagenet-1k, train split, image 0: no image that can be read"):
        list(examples("hub:ILSVRC/imagenet-1k", "train"))
    monkeypatch.setattr(images_module, "hub_rows", lambda *a, **k: iter([{"picture": b"", "label": 0}]))
    with pytest.raises(DataError, match=r"image 0: needs columns image and label, it has picture, label"):
        list(examples("hub:ILSVRC/imagenet-1k", "train"))


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.npy"])
def test_an_altered_shard_is_refused_by_name(tmp_path, name):
    source = prepare_any(DIGITS, tmp_path / "digits")
    folder = shutil.copytree(source.parent, tmp_path / "copy")
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: missing, truncated or altered; delete the folder"):
        ImageShards(folder / "manifest.json", "train", channels=1)
    (folder / name).unlink()
    with pytest.raises(DataError, match=name):
        ImageShards(folder / "manifest.json", "train", channels=1)


def test_a_text_is_no_set_of_images_and_the_other_way_round():
    with pytest.raises(ValueError, match="'bundled:c4_sample' is a text, no set of images"):
        ImageData(dataset="bundled:c4_sample", images={"train": None})
    with pytest.raises(ValueError, match="is a set of images, no set of items"):
        ItemData(dataset="bundled:digits", splits={"train": None})
    with pytest.raises(ValueError, match="is a set of images, no text"):
        TextData(dataset="bundled:digits", documents=1)
    with pytest.raises(ValueError, match="is a set of images, no text"):
        TokenData(
            dataset="bundled:digits", tokenizer="bpe1024", vocab_size=1024, seq_len=8, example="split",
            train_examples=1, validation_tokens=1,
        )  # fmt: skip
    with pytest.raises(ValueError, match="unknown dataset 'digit'; did you mean 'digits'"):
        ImageData(dataset="bundled:digit", images={"train": None})
    with pytest.raises(ValueError, match="at least one image, or null for all"):
        ImageData(dataset="bundled:digits", images={"train": 0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": {"classes": 3}}, "`shape` is that of bundled and local images"),
        ({"fields": ["a"]}, "a set of images has the splits train and validation, and no `fields`"),
        ({"files": {"train": []}}, "two files for train and for validation: a PNG and its labels"),
    ],
)
def test_an_entry_of_images_that_makes_no_sense_is_refused(change, message):
    entry = registry().datasets["digits"].model_dump()
    with pytest.raises(ValueError, match=message):
        DatasetEntry.model_validate(entry | change)
