"""Files of tensors in the safetensors format, read and written a tensor at a time.

The format is 8 bytes with the length of a JSON header, the header, and the tensors' bytes. The header is kept as text,
so that a file that was packed and unpacked is the same to the byte.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

LONGEST_HEADER = 100_000_000
SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
PACKED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"Those that a container can hold."


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a file: where its bytes begin behind the header, and end."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def entries(header: str) -> list[Entry]:
    """Tensors of a header, by place. Raises ValueError for one that is damaged."""
    try:
        known = json.loads(header)
        found = [
            Entry(name, str(e["dtype"]), tuple(int(n) for n in e["shape"]), *(int(n) for n in e["data_offsets"]))
            for name, e in known.items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as reason:
        raise ValueError(f"no header of a safetensors file ({reason}); the file is damaged, or another") from reason
    place = 0
    for e in sorted(found, key=lambda entry: (entry.start, entry.end)):
        if e.dtype not in SIZES or e.start != place or e.end - e.start != math.prod(e.shape) * SIZES[e.dtype]:
            raise ValueError(
                f"tensor {e.name!r} of {e.dtype} {e.shape} at {e.start} to {e.end} of the file: damaged, or of a dtype "
                f"that is not known here ({', '.join(SIZES)})"
            )
        if any(n < 0 for n in e.shape):
            raise ValueError(f"tensor {e.name!r} of shape {e.shape}: the file is damaged")
        place = e.end
    return sorted(found, key=lambda entry: (entry.start, entry.end))


class SafetensorsFile:
    """A file, mapped into memory. Raises ValueError for one that is damaged."""

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
        if self._start + max((e.end for e in self.entries), default=0) != size:
            raise ValueError(f"{path.name} has {size} bytes, other than its header says; take the whole file")

    def bytes(self, entry: Entry) -> memoryview:
        """Of a tensor; a copy, which does not hold the map."""
        return memoryview(self._map[self._start + entry.start : self._start + entry.end])

    def tensor(self, entry: Entry) -> Tensor:
        """A tensor of a dtype in PACKED."""
        data = np.frombuffer(bytearray(self.bytes(entry)), np.uint8)
        return torch.from_numpy(data).view(PACKED[entry.dtype]).view(entry.shape)

    def close(self) -> None:
        """Frees the map."""
        self._map.close()
