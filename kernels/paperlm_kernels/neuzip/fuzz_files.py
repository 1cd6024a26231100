"""Files that `fuzz` damages beside containers: `.nzm`, safetensors, and those of `save_packed`.

Bytes are damaged as those of a container are; in the JSON a value becomes one that no writer gives, a name stands twice
or takes another's place, and then lengths and digests are made to fit again. A file is refused with a ValueError
(`.nzm` with a ContainerError), or is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from paperlm_kernels.neuzip.errors import ContainerError
from paperlm_kernels.neuzip.files import HEAD, PackedFile, pack_file
from paperlm_kernels.neuzip.safetensors_file import SafetensorsFile

HOSTILE = (
    "1e400", "-1e400", "NaN", "1.0", "0.5", "-1", "0", "1", "2", "7", "64", "4096", "true", "null", '""', "[]", "{}",
    str(2**31), str(2**40), str(2**63 - 1), str(2**64), "9" * 400, "9" * 5000, "[0, 0]", "[1, 2, 3]", "[true]",
    f"[0, {2**62}, 4]", f"[{2**63}]", "[" * 3000 + "]" * 3000, "[" * 100_000, '"\\ud800"', '"BF16"', '"U8"',
    '"F6_E2M3"', '"3000000 2x2"', '"1_0 2x2"', '"1 1e400"', f'"1 0x{2**63}"', '"2 2x2"', '"1 -1x-1"', '"1 "',
)  # fmt: skip
"Values for a place in JSON."
FORGED = ("forged", "value", "twice", "renamed")
"Kinds of damage after which digests are made to fit, where there are any."
_SPOT = "\x00here"
Contents = list[tuple[str, str, tuple[int, ...], bytes]]
"Name, dtype, sizes and bytes of each tensor."


@dataclass(frozen=True)
class Sort:
    """A sort of file, with a whole one of it."""

    name: str
    data: bytes
    json_of: Callable[[bytes], tuple[int, int]]
    "where its JSON begins and ends"
    with_json: Callable[[bytes, bytes], bytes]
    "the file with other JSON, its length made to fit"
    read: Callable[[Path], Contents]
    sealed: Callable[[bytes, Path], bytes]
    "the file with digests that fit what it holds; a path is free for what has to be read meanwhile"
    refusal: type[ValueError]
    "what a damaged one raises"
    digest: bool
    "whether it has any"


def sorts(folder: Path) -> list[Sort]:
    """One of each, made in `folder`."""
    from paperlm_kernels.stored import PackedStore, RowBlocks, convert, save_packed

    weights = torch.from_numpy(np.random.default_rng(0).standard_normal((24, 32)).astype(np.float32)).bfloat16()
    tensors = {"w": weights, "norm": weights[0].clone(), "ids": torch.arange(5), "none": torch.zeros(0, 4).bfloat16()}
    plain, packed, saved = (folder / name for name in ("a.safetensors", "a.nzm", "saved.safetensors"))
    save_file(tensors, plain, metadata={"format": "pt"})
    pack_file(plain, packed, raw="never")
    model = nn.Sequential(nn.Embedding(24, 32), nn.Linear(32, 24))
    for parameter in model.parameters():
        parameter.data = weights[: parameter.shape[0]].view(-1)[: parameter.numel()].view(parameter.shape).clone()
    convert(model, lambda tensor: RowBlocks(tensor, PackedStore, 12), "all")
    save_packed(model, saved)
    return [
        Sort(".nzm", packed.read_bytes(), _index, _with_index, _read_nzm, _sealed_nzm, ContainerError, True),
        Sort("safetensors", plain.read_bytes(), _header, _with_header, _read_plain, lambda data, _: data, ValueError,
             False),
        Sort("save_packed", saved.read_bytes(), _header, _with_header, _read_saved, _sealed_saved, ValueError, True),
    ]  # fmt: skip


def bytes_changed(kind: str, out: bytearray, rng: np.random.Generator, first: int = 0) -> None:
    """Damages bytes from `first` on: one bit, up to 32 bytes, an end that is cut off, or one too many."""
    if kind in ("bit", "forged"):
        place = int(rng.integers(first, len(out)))
        out[place] ^= 1 << int(rng.integers(8))
    elif kind == "bytes":
        place, count = int(rng.integers(len(out))), int(rng.integers(1, 33))
        fresh = rng.integers(0, 256, min(count, len(out) - place)).astype(np.uint8)
        out[place : place + len(fresh)] = fresh.tobytes()
    elif kind == "truncate":
        del out[int(rng.integers(len(out))) :]
    else:
        out += bytes(int(rng.integers(1, 200)))


def damaged(sort: Sort, rng: np.random.Generator, path: Path) -> tuple[str, bytes]:
    """A kind of damage and what it makes of a file. `path` is free for what must be read meanwhile."""
    kind = str(rng.choice(["bit", "bytes", "truncate", "extend", "forged", "value", "value", "twice", "renamed"]))
    if kind in ("bit", "bytes", "truncate", "extend", "forged"):
        out = bytearray(sort.data)
        bytes_changed(kind, out, rng)
        return kind, sort.sealed(bytes(out), path) if kind == "forged" else bytes(out)
    start, end = sort.json_of(sort.data)
    text = json_damaged(kind, sort.data[start:end].decode(), rng)
    changed = sort.with_json(sort.data, text.encode())
    if rng.integers(4):
        return kind, sort.sealed(changed, path)
    return "unsealed", changed


def json_damaged(kind: str, text: str, rng: np.random.Generator) -> str:
    """JSON with another value somewhere, a name twice, or a name in another's place. What stands in it as text is
    damaged as often as what it stands in."""
    whole = json.loads(text)
    inner = whole.get("safetensors_header")
    if inner is not None and rng.integers(2):
        return json.dumps(whole | {"safetensors_header": json_damaged(kind, inner, rng)})
    places = list(_places(whole))
    names = [(holder, key) for holder, key in places if isinstance(holder, dict)]
    if kind == "value":
        holder, key = places[int(rng.integers(len(places)))]
        holder[key] = _SPOT
        return json.dumps(whole).replace(json.dumps(_SPOT), HOSTILE[int(rng.integers(len(HOSTILE)))])
    holder, key = names[int(rng.integers(len(names)))]
    others = [other for _, other in names] + [other.removeprefix("packed:") for _, other in names] + [""]
    if kind == "twice":
        holder[_SPOT] = holder[list(holder)[int(rng.integers(len(holder)))]]
        new = key
    else:
        holder[_SPOT] = holder.pop(key)
        new = others[int(rng.integers(len(others)))]
    return json.dumps(whole).replace(json.dumps(_SPOT), json.dumps(new))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Holder and key of everything in JSON."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _header(data: bytes) -> tuple[int, int]:
    return 8, 8 + struct.unpack_from("<Q", data)[0]


def _with_header(data: bytes, text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + data[_header(data)[1] :]


def _index(data: bytes) -> tuple[int, int]:
    start, length = HEAD.unpack_from(data)[3:5]
    return start, start + length


def _with_index(data: bytes, text: bytes) -> bytes:
    magic, version, zero, start, _, digest = HEAD.unpack_from(data)
    return HEAD.pack(magic, version, zero, start, len(text), digest) + data[HEAD.size : start] + text


def _sealed_nzm(data: bytes, path: Path) -> bytes:
    """With the SHA-256 of the index, and of each tensor as far as the index can be read."""
    start, end = _index(data)
    if end != len(data) or start < HEAD.size:
        return data
    text = data[start:end]
    try:
        for e in json.loads(text)["tensors"].values():
            fresh = hashlib.sha256(data[e["offset"] : e["offset"] + e["length"]]).hexdigest()
            text = text.replace(str(e["sha256"]).encode(), fresh.encode()) if len(str(e["sha256"])) == 64 else text
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass  # it stays what it is: to be refused
    fields = HEAD.unpack_from(data)[:3]
    return HEAD.pack(*fields, start, len(text), hashlib.sha256(text).digest()) + data[HEAD.size : start] + text


def _sealed_saved(data: bytes, path: Path) -> bytes:
    """With the SHA-256 of what there is, as far as safetensors reads it."""
    from paperlm_kernels.stored.files import _digest

    path.write_bytes(data)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            old = metadata.pop("sha256", "")
            fresh = _digest(metadata, set(file.keys()), file.get_tensor)
    except (SafetensorError, TypeError, OSError):
        return data  # nothing that could be told from it
    return data.replace(old.encode(), fresh.encode(), 1) if len(old) == 64 else data


def _read_nzm(path: Path) -> Contents:
    given = PackedFile(path)
    return [(e.name, e.dtype, e.shape, bytes(given.bytes(e))) for e in given.entries]


def _read_plain(path: Path) -> Contents:
    with contextlib.closing(SafetensorsFile(path)) as given:
        for e in given.entries:
            if e.is_packed:
                given.tensor(e)
        return [(e.name, e.dtype, e.shape, bytes(given.bytes(e))) for e in given.entries]


def _read_saved(path: Path) -> Contents:
    from paperlm_kernels.stored import read_packed

    return [
        (name, str(t.dtype), tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in read_packed(path)
    ]
