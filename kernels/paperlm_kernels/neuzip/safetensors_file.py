"""Files of tensors in the safetensors format, read and written a tensor at a time.

The format is 8 bytes with the length of a JSON header, the header, and the tensors' bytes. The header is kept as text,
so that a file that was packed and unpacked is the same to the byte.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import reprlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paperlm_kernels.neuzip.errors import ContainerError
from paperlm_kernels.neuzip.header import MOST, MOST_AXES

LONGEST_HEADER = 100_000_000
BITS = {
    "C64": 64, "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64,
    "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"Of an element of each dtype that the format has."
PACKED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"Those that a container can hold, of up to MOST_AXES axes."
MOST_ELEMENTS = 2**63 - 1
"That PyTorch can count."
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"What JSON raises that somebody has forged: RecursionError where it is nested too deep."


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a file: where its bytes begin behind the header, and end."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def is_packed(self) -> bool:
        """Whether a container can hold it."""
        count = math.prod(max(1, axis) for axis in self.shape)
        return self.dtype in PACKED and len(self.shape) <= MOST_AXES and count <= MOST


def read_json(text: str | bytes) -> Any:
    """JSON in which no name stands twice. Raises one of UNREADABLE: of two values of a name Python takes the last, and
    another reader perhaps the first."""
    return json.loads(text, object_pairs_hook=_each_once)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is there twice")
        found[name] = value
    return found


def whole_number(value: Any, place: str) -> int:
    """A number of bytes or elements, as it is. Raises ValueError for another, also for 1.0 and true, which no writer
    gives: 1e400 is infinity."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{place} is {reprlib.repr(value)}, not a whole number from 0 on")
    return value


def elements(shape: Sequence[int]) -> int:
    """Of a tensor of these sizes.

    Raises ValueError for sizes that PyTorch cannot count, where an axis of 0 makes no room for others of any size; at
    the first that is too much, as the product of all that a forged header has room for would take hours.
    """
    count = 1
    for size in shape:
        count *= max(1, size)
        if count > MOST_ELEMENTS:
            raise ValueError(f"sizes {reprlib.repr(tuple(shape))} are of more than {MOST_ELEMENTS} elements")
    return 0 if 0 in shape else count


def _entry(name: str, described: Any) -> Entry:
    shape, offsets = described["shape"], described["data_offsets"]
    if type(shape) is not list or type(offsets) is not list or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has no list as its shape, or no two data_offsets")
    sizes = tuple(whole_number(n, f"a size of tensor {name!r}") for n in shape)
    elements(sizes)
    return Entry(
        name, str(described["dtype"]), sizes, *(whole_number(n, f"an offset of tensor {name!r}") for n in offsets)
    )


def entries(header: str) -> list[Entry]:
    """Tensors of a header, by place. Raises ValueError for one that is damaged."""
    try:
        found = [_entry(name, e) for name, e in read_json(header).items() if name != "__metadata__"]
    except UNREADABLE as reason:
        raise ValueError(f"no header of a safetensors file ({reason}); the file is damaged, or another") from reason
    place = 0
    for e in sorted(found, key=lambda entry: (entry.start, entry.end)):
        if e.dtype not in BITS or e.start != place or 8 * (e.end - e.start) != elements(e.shape) * BITS[e.dtype]:
            raise ValueError(
                f"tensor {e.name!r} of {reprlib.repr(e.dtype)} {reprlib.repr(e.shape)} at {e.start} to {e.end} of the "
                f"file: damaged, or of a dtype that is not known here ({', '.join(BITS)})"
            )
        place = e.end
    return sorted(found, key=lambda entry: (entry.start, entry.end))


def sort_metadata(path: Path) -> None:
    """Puts the metadata of a file that `safetensors` has just written in order, where they lie: the library's own order
    is another each time, and with it the bytes of the file."""
    with path.open("r+b") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
        ordered = {"__metadata__": dict(sorted(header.pop("__metadata__", {}).items()))} | header
        text = json.dumps(ordered, ensure_ascii=False, separators=(",", ":")).encode().ljust(length)
        if len(text) == length:  # as both write what a string can hold in the same way
            file.seek(8)
            file.write(text)


PACKED_MODEL = "paperlm_packed"
"What the metadata of a file that `stored.save_packed` writes have as `container`."


class PackedModelError(ContainerError):
    """Such a file, where one of tensors, or of containers, is asked for."""


class SafetensorsFile:
    """A file, mapped into memory. Raises ValueError for one that is damaged, and PackedModelError for one of packed
    weights already."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else LONGEST_HEADER + 1
            if length > LONGEST_HEADER or 8 + length > size:
                raise ValueError(f"{path.name} is no safetensors file, or was cut off; take the whole file")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.header = self._map[8 : 8 + length].decode()
        except UnicodeDecodeError as reason:
            raise ValueError(f"{path.name} has no text as its header; it is damaged, or another file") from reason
        self._start = 8 + length
        self.entries = entries(self.header)
        metadata = json.loads(self.header).get("__metadata__")
        if isinstance(metadata, dict) and metadata.get("container") == PACKED_MODEL:
            raise PackedModelError(
                f"{path.name} holds the packed weights of a model, as save_packed writes them: "
                "paperlm_kernels.stored.read_packed gives its tensors as they were"
            )
        if self._start + max((e.end for e in self.entries), default=0) != size:
            raise ValueError(f"{path.name} has {size} bytes, other than its header says; take the whole file")

    def bytes(self, entry: Entry) -> memoryview:
        """Of a tensor; a copy, which does not hold the map."""
        return memoryview(self._map[self._start + entry.start : self._start + entry.end])

    def tensor(self, entry: Entry) -> Tensor:
        """A tensor that a container can hold."""
        data = np.frombuffer(bytearray(self.bytes(entry)), np.uint8)
        return torch.from_numpy(data).view(PACKED[entry.dtype]).view(entry.shape)

    def close(self) -> None:
        """Frees the map."""
        self._map.close()
