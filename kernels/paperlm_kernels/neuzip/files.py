"""Files of packed tensors (`.nzm`): containers one after the other, and a JSON index with the SHA-256 of each.

A file begins with 64 bytes: magic, version (u32), 4 zeros, offset and length of the index (u64 each), SHA-256 of the
index. The index says of each tensor offset, length and sha256; the header of the safetensors file that it was is kept
in it as text, and `mant_bits` where mantissas were rounded: a container of a tensor that was rounded and then not
coded does not say so. Tensors that no container holds, for their dtype or their axes, are kept as bytes.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paperlm_kernels.neuzip.container import aligned
from paperlm_kernels.neuzip.decode_errors import raise_found
from paperlm_kernels.neuzip.errors import ContainerError
from paperlm_kernels.neuzip.fields import MANT_BITS
from paperlm_kernels.neuzip.header import MAGIC as CONTAINER
from paperlm_kernels.neuzip.part_files import replacing
from paperlm_kernels.neuzip.record import Packed, from_bytes, pack
from paperlm_kernels.neuzip.safetensors_file import (
    PACKED,
    UNREADABLE,
    Entry,
    PackedModelError,
    SafetensorsFile,
    entries,
    read_json,
    whole_number,
)

MAGIC = b"\x89NZM\r\n\x1a\n"
VERSION = 1
HEAD = struct.Struct("<8sIIQQ32s")
assert HEAD.size == 64
ROUNDED = tuple(bits for bits in MANT_BITS if bits < 7)
"Mantissa bits that an index may say."
Told = Callable[[int], object]
"Called with the bytes of each tensor that is done."


CPU = torch.device("cpu")


def pack_file(
    source: Path, target: Path, told: Told = lambda _: None, *, device: torch.device = CPU, **options: Any
) -> int:
    """Packs a safetensors file; how many of its tensors were rounded. device: where each is packed, one at a time; the
    bytes are the same. options: those of `pack`; `mant_bits` and `block_norm` are for tensors of two axes and more
    alone, so that norms and biases stay as they are. Raises ValueError for a damaged file, and for options and tensors
    as `pack` does."""
    pack(torch.empty(0, 0, dtype=torch.bfloat16), **options)  # wrong ones, before anything is read
    rounds, rounded = options.get("mant_bits", 7) < 7, 0
    lossless = {key: value for key, value in options.items() if key not in ("mant_bits", "block_norm")}
    given = SafetensorsFile(source)
    index: dict[str, Any] = {"safetensors_header": given.header, "tensors": {}}
    if rounds:
        index["mant_bits"] = options["mant_bits"]
    with replacing(target) as part, part.open("w+b") as file:
        place = file.write(bytes(HEAD.size))
        for entry in given.entries:
            if entry.is_packed:
                try:
                    tensor, own = given.tensor(entry).to(device), options if _can_round(entry) else lossless
                    data = pack(tensor, **own).to_bytes()
                except ValueError as reason:
                    raise ValueError(f"tensor {entry.name!r}: {reason}") from reason
                rounded += rounds and _can_round(entry)
            else:
                data = bytes(given.bytes(entry))
            index["tensors"][entry.name] = {
                "offset": place, "length": len(data), "sha256": hashlib.sha256(data).hexdigest()
            }  # fmt: skip
            place += file.write(data) + file.write(bytes(aligned(len(data)) - len(data)))
            told(entry.end - entry.start)
        text = json.dumps(index).encode()
        file.write(text)
        file.seek(0)
        file.write(HEAD.pack(MAGIC, VERSION, 0, place, len(text), hashlib.sha256(text).digest()))
    given.close()
    return rounded


def _can_round(entry: Entry) -> bool:
    return entry.is_packed and entry.dtype == "BF16" and len(entry.shape) > 1


def _refuse_packed_model(path: Path) -> None:
    """Raises PackedModelError for a file that `save_packed` wrote."""
    try:
        SafetensorsFile(path).close()
    except PackedModelError:
        raise
    except ValueError:
        pass


class PackedFile:
    """A file of packed tensors, each read when it is asked for. Raises ContainerError for a damaged one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEAD.size)
            if head[:8] == CONTAINER:
                raise ContainerError(
                    f"{path.name} is one container, as Packed.to_bytes makes it: paperlm_kernels.neuzip.from_bytes "
                    "reads it"
                )
            if len(head) < HEAD.size or head[:8] != MAGIC:
                _refuse_packed_model(path)
                raise ContainerError(
                    f"{path.name} is no file of packed tensors; `pack` makes one of a safetensors file"
                )
            _, version, zero, offset, length, digest = HEAD.unpack(head)
            if version != VERSION or zero:
                raise ContainerError(f"{path.name} has version {version}; this reads version {VERSION}")
            if offset + length != size:
                raise ContainerError(f"{path.name} was cut off, or has something behind it; take the whole file")
            file.seek(offset)
            text = file.read(length)
        if hashlib.sha256(text).digest() != digest:
            raise ContainerError(f"the index of {path.name} has another SHA-256: damaged; take another copy")
        try:
            index = read_json(text)
            self.header: str = index["safetensors_header"]
            self.entries = entries(self.header)
            self._mant_bits = whole_number(index.get("mant_bits", 7), "mant_bits")
            if "mant_bits" in index and self._mant_bits not in ROUNDED:
                raise ValueError(f"mant_bits is {self._mant_bits}, not one of {', '.join(map(str, ROUNDED))}")
            self.header.encode()  # half of a pair of surrogates is none that `unpack` could write
            self._places = {
                name: (
                    whole_number(e["offset"], f"the offset of tensor {name!r}"),
                    whole_number(e["length"], f"the length of tensor {name!r}"),
                    str(e["sha256"]),
                )
                for name, e in index["tensors"].items()
            }
        except UNREADABLE as reason:
            raise ContainerError(f"the index of {path.name} cannot be read ({reason}); pack the file anew") from reason
        if {e.name for e in self.entries} != set(self._places):
            raise ContainerError(f"the index of {path.name} has other tensors than its header; pack the file anew")
        end = HEAD.size
        for name, (start, size, _) in sorted(self._places.items(), key=lambda item: item[1][:2]):
            if start < end or start + size > offset:
                raise ContainerError(
                    f"tensor {name!r} lies outside of {path.name}, or upon another; pack the file anew"
                )
            end = start + size

    def raw(self, entry: Entry) -> bytes:
        """What is stored of a tensor, compared with its SHA-256."""
        offset, length, digest = self._places[entry.name]
        with self.path.open("rb") as file:
            file.seek(offset)
            data = file.read(length)
        if hashlib.sha256(data).hexdigest() != digest:
            what = f"tensor {entry.name!r} of {self.path.name}"
            raise ContainerError(f"{what} has another SHA-256: damaged; take another copy of the file")
        return data

    def packed(self, entry: Entry) -> Packed:
        """A tensor that a container holds."""
        found = from_bytes(self.raw(entry))
        if (found.dtype, tuple(found.shape)) != (PACKED.get(entry.dtype), entry.shape):
            raise ContainerError(
                f"tensor {entry.name!r} is {found.dtype} {tuple(found.shape)}, in the header {entry.dtype} "
                f"{entry.shape}; pack the file anew"
            )
        if found.header.lossy and self._mant_bits not in (7, found.header.mant_bits):
            raise ContainerError(
                f"tensor {entry.name!r} has {found.header.mant_bits} mantissa bits, in the index {self._mant_bits}; "
                "pack the file anew"
            )
        return found

    def rounded_to(self, entry: Entry) -> int | None:
        """Mantissa bits that a tensor was rounded to before it was packed; None: it was not, or the file is of before
        files said so."""
        return self._mant_bits if self._mant_bits < 7 and _can_round(entry) else None

    def bytes(self, entry: Entry, device: torch.device = CPU) -> memoryview:
        """Of a tensor as they stood in the safetensors file, unpacked on a device."""
        if entry.is_packed:
            tensor: Tensor = self.packed(entry).to(device).unpack().cpu()
            raise_found(device)
            return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        data = self.raw(entry)
        if len(data) != entry.end - entry.start:
            raise ContainerError(f"tensor {entry.name!r} has {len(data)} bytes, not {entry.end - entry.start}")
        return memoryview(data)


def unpack_file(source: Path, target: Path, told: Told = lambda _: None, *, device: torch.device = CPU) -> None:
    """Makes the safetensors file again, to the byte if nothing was rounded. device: where each tensor is unpacked, one
    at a time. Raises ContainerError for damage."""
    given = PackedFile(source)
    header = given.header.encode()
    with replacing(target) as part, part.open("w+b") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for entry in given.entries:
            file.write(given.bytes(entry, device))
            told(entry.end - entry.start)
