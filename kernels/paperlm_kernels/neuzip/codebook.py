"""The prefix code of the exponents: a code word stands for two of them, and is at most 11 or 12 bits long.

The 15 most frequent exponents of a tensor have an index each; index 15 is the escape, whose exponents are kept aside
as patches. So any codebook codes any tensor without loss, only in more or fewer bits. (NeuZip, arXiv 2410.20650,
section 3.2, asks for an entropy coder of the exponents and uses an asymmetric numeral system.)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paperlm_kernels.neuzip.errors import CodebookError

PALETTE = 15
ESCAPE = 15
SYMBOLS = 256
"Pairs of indices, 16 * first + second."
STORED = PALETTE + SYMBOLS // 2
"Bytes of a stored codebook: the palette, and lengths of four bits each."
EXPONENTS = 0x7F807F80
"Where the exponents of two bfloat16 numbers stand in a word."
ESCAPES = 1 << 24
"In an entry to encode with: one of the two exponents is to be patched."
_ESCAPED = 30
"Bits of an entry that the kernels encode with: from this one on, how many of the two exponents are to be patched."


def package_merge(weights: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Lengths, at most `limit`, of the prefix code with the smallest weighted sum of lengths.

    Of equal weights the lower index has no longer code. Raises ValueError for more symbols than codes of that length.

    >>> package_merge(np.array([5, 2, 1, 1]), 8).tolist(), package_merge(np.array([5, 2, 1, 1]), 2).tolist()
    ([1, 2, 3, 3], [2, 2, 2, 2])
    """
    n = len(weights)
    if n > 1 << limit:
        raise ValueError(f"{n} symbols have no codes of {limit} bits or fewer; allow longer ones")
    order = np.lexsort((-np.arange(n), weights))
    single = np.asarray(weights, np.int64)[order]
    lists = [np.zeros(n, bool)]  # of each level, in ascending weight: whether it is a package of the level before
    merged = single
    for _ in range(limit - 1):
        packages = merged[: len(merged) // 2 * 2].reshape(-1, 2).sum(axis=1)
        both = np.concatenate([single, packages])
        sort = np.argsort(both, kind="stable")
        merged = both[sort]
        lists.append(sort >= n)
    lengths = np.zeros(n, np.int64)
    take = 2 * n - 2
    for packaged in reversed(lists):
        used = int(packaged[:take].sum())
        lengths[: take - used] += 1
        take = 2 * used
    found = np.empty(n, np.int64)
    found[order] = lengths
    return found


def canonical_codes(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Codes ascending by (length, index), with their bits reversed: streams are read from the lowest bit."""
    lengths = np.asarray(lengths, np.int64)
    order, longest = np.argsort(lengths, kind="stable"), int(lengths.max(initial=0))
    ascending = lengths[order]
    # a code begins where those in front of it end, in shares of 2^-longest
    ends = np.cumsum(1 << (longest - ascending))
    code = (ends >> (longest - ascending)) - 1
    reverse = np.zeros_like(code)
    for bit in range(longest):
        reverse |= (code >> bit & 1) << (longest - 1 - bit)
    codes = np.empty_like(code)
    codes[order] = reverse >> (longest - ascending)
    return codes


def _lengths(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Of a stored codebook: half a byte each."""
    lengths = np.empty(SYMBOLS, np.uint8)
    lengths[::2], lengths[1::2] = data[PALETTE:] & 15, data[PALETTE:] >> 4
    return lengths


@dataclasses.dataclass(frozen=True, eq=False)
class Codebook:
    """A palette (15 exponents, uint8) and the lengths of the 256 pairs, each 1 to `limit`.

    Raises CodebookError for anything that is no prefix code.
    """

    palette: NDArray[np.uint8]
    lengths: NDArray[np.uint8]
    limit: int

    def __post_init__(self) -> None:
        if len(self.palette) != PALETTE or len(np.unique(self.palette)) != PALETTE:
            raise CodebookError("the palette of a codebook has an exponent twice: the container is damaged")
        lengths = self.lengths.astype(np.int64)
        if len(lengths) != SYMBOLS or lengths.min() < 1 or lengths.max() > self.limit:
            raise CodebookError(f"code lengths are 1 to {self.limit}, not these: the container is damaged")
        if (1 << (self.limit - lengths)).sum() > 1 << self.limit:
            raise CodebookError("no prefix code has these lengths (their Kraft sum is above 1): container damaged")

    @classmethod
    def of_counts(cls, counts: NDArray[np.int64], limit: int) -> Codebook:
        """The best one for exponents that occur so often (256 counts), as if neighbours were independent."""
        counts = np.asarray(counts, np.int64)
        palette = np.lexsort((np.arange(256), -counts))[:PALETTE]
        total = max(1, int(counts.sum()))
        escaped = int(counts.sum() - counts[palette].sum())
        # Python's integers: a count of 2^40 times 2^20 is close to 64 bits
        shares = [max(1, (count << 20) // total) for count in [*counts[palette].tolist(), escaped]]
        weights = np.outer(shares, shares).astype(np.int64).reshape(-1)
        return cls(palette.astype(np.uint8), package_merge(weights, limit).astype(np.uint8), limit)

    @classmethod
    def from_bytes(cls, data: NDArray[np.uint8], limit: int) -> Codebook:
        """A stored one."""
        if len(data) != STORED:
            raise CodebookError(f"a codebook of {len(data)} bytes; it has {STORED}: the container is damaged")
        return cls(data[:PALETTE].copy(), _lengths(data), limit)

    @classmethod
    def of_device(cls, data: NDArray[np.uint8], limit: int) -> Codebook:
        """One that the kernel made: stored as `data`. It is not looked through, and not taken apart before somebody
        asks: either takes as long as to pack a small tensor."""
        book = object.__new__(cls)
        book.__dict__.update(limit=limit, stored=data)
        return book

    def __getattr__(self, name: str) -> Any:  # the fields that `of_device` leaves out
        if name not in ("palette", "lengths") or "stored" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.__dict__[name] = self.stored[:PALETTE].copy() if name == "palette" else _lengths(self.stored)
        return self.__dict__[name]

    def to_bytes(self) -> NDArray[np.uint8]:
        """STORED bytes."""
        return np.concatenate([self.palette, self.lengths[::2] | self.lengths[1::2] << 4]).astype(np.uint8)

    @functools.cached_property
    def stored(self) -> NDArray[np.uint8]:
        """`to_bytes`, made once."""
        return self.to_bytes()

    @functools.cached_property
    def index(self) -> NDArray[np.uint8]:
        """Exponent -> index, 256 bytes; 15 for those that are patched."""
        index = np.full(256, ESCAPE, np.uint8)
        index[self.palette] = np.arange(PALETTE)
        return index

    @functools.cached_property
    def codes(self) -> NDArray[np.uint32]:
        """Pair of indices -> code | length << 16 (256 words)."""
        lengths = self.lengths.astype(np.int64)
        return (canonical_codes(lengths) | lengths << 16).astype(np.uint32)

    @functools.cached_property
    def packing(self) -> NDArray[np.uint32]:
        """The same with the number of escapes from bit 30 on."""
        pair = np.arange(SYMBOLS, dtype=np.uint32)
        escapes = (pair >> np.uint32(4) == ESCAPE).astype(np.uint32) + (pair & np.uint32(15) == ESCAPE)
        return self.codes | escapes << np.uint32(_ESCAPED)

    @functools.cached_property
    def encoding(self) -> NDArray[np.uint32]:
        """Two exponents as they lie in memory (first + 256 second) -> code | length << 16 | ESCAPES."""
        pair = np.arange(SYMBOLS)
        escape = (pair >> 4 == ESCAPE) | (pair & 15 == ESCAPE)
        entries = (self.codes | escape * np.uint32(ESCAPES)).astype(np.uint32).reshape(16, 16)
        return entries.T[self.index][:, self.index].reshape(-1)

    @functools.cached_property
    def decoding(self) -> NDArray[np.uint32]:
        """The next `limit` bits of a stream -> length | exponent << 7 | exponent << 23. Escapes give exponent 0.

        Bits that begin no code (only damaged streams have them) are `limit` long, so that each entry's length is >= 1.
        """
        exponents = np.append(self.palette, 0).astype(np.uint32)
        pairs = (exponents[:, None] << 7 | exponents[None, :] << 23).reshape(-1)
        table = np.full(1 << self.limit, self.limit, np.uint32)
        for pair in range(SYMBOLS):
            length = int(self.lengths[pair])
            table[int(self.codes[pair]) & 0xFFFF :: 1 << length] = np.uint32(length) | pairs[pair]
        return table

    def bits(self, counts: NDArray[np.int64]) -> float:
        """Mean length per exponent of independent exponents that occur so often (256 counts); patches aside."""
        shares = np.bincount(self.index, weights=counts / counts.sum(), minlength=16)
        return float((np.outer(shares, shares).reshape(-1) * self.lengths).sum() / 2)

    @functools.cached_property
    def _on_devices(self) -> dict[tuple[torch.device, str], Tensor]:
        return {}

    def table(self, device: torch.device, which: str = "decoding") -> Tensor:
        """`decoding`, `packing`, `index` or `stored` on a device, int32 (the last two uint8)."""
        key = (device, which)
        if "_kept_later" in self.__dict__:
            self._keep()
        if key not in self._on_devices:
            array = getattr(self, which)
            array = array if array.dtype == np.uint8 else array.view(np.int32)
            self._on_devices[key] = torch.from_numpy(array.copy()).to(device)
        return self._on_devices[key]

    def keep_later(self, device: torch.device, tables: Callable[[], dict[str, Tensor]]) -> None:
        """Tables that are on a device already; they are made tensors of when one is asked for."""
        self.__dict__["_kept_later"] = device, tables

    def _keep(self) -> None:
        if (later := self.__dict__.get("_kept_later")) is not None:  # else another thread was faster
            device, tables = later
            self._on_devices.update({(device, which): table for which, table in tables().items()})
            self.__dict__.pop("_kept_later", None)

    def __getstate__(self) -> dict[str, Any]:
        if "_kept_later" in self.__dict__:
            self._keep()
        return self.__dict__

    @property
    def table_bytes(self) -> int:
        """Of the tables that a GPU keeps to unpack (`decoding`) and to pack (`packing`, `index`); `stored` is a section
        of its own. They are counted on every device, and whether or not they were needed yet."""
        return 4 * (1 << self.limit) + 4 * SYMBOLS + 256
