"""Keys and values in 3 or 4 bits: codes of a head's row, and how they lie in bytes.

A row of D numbers has one step: x is about step * (u - zero), u an unsigned code.

- 4 bits: byte j has the code of j in its low half and that of j + D / 2 in its high half: D / 2 bytes.
- 3 bits: byte j of the first D / 4 has, in bits 2s and 2s + 1, the low two bits of the code of j + s D / 4; byte j of
  the ceil(D / 8) behind them has, in bit s, the highest bit of the code of j + s ceil(D / 8). 48 bytes for D = 128,
  25 + 13 for 100.

So every byte is unpacked by shifts alone, and a product with a row is a sum over planes.
"""

from __future__ import annotations

import dataclasses
import difflib

import torch
from torch import Tensor

EPS = 1e-5
"What max|x| is not let below."
MAPPINGS = ("symmetric", "minmax")


@dataclasses.dataclass(frozen=True)
class Planes:
    """`count` planes of `bits` each in `size` bytes from `offset` on; their codes count `weight` times."""

    offset: int
    size: int
    count: int
    bits: int
    weight: int


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """Bits of a code, the numbers of a head, and the mapping.

    "symmetric": u = round(x / step) + 2^(bits - 1), step = max|x| / (2^(bits - 1) - 1); "minmax": u = round(x / step +
    zero), step = 2 max|x| / (2^bits - 1).

    `first_bits`: those of position 0, which a cache of 3 bits may keep with 4 in a buffer of its own; never fewer than
    `bits`. Raises ValueError for what is not supported.
    """

    head_dim: int
    bits: int
    mapping: str = "symmetric"
    first_bits: int = 4

    def __post_init__(self) -> None:
        if self.bits not in (3, 4) or not isinstance(self.bits, int):
            raise ValueError(f"keys and values in {self.bits!r} bits; 3 and 4 are supported")
        if self.first_bits not in (3, 4) or not isinstance(self.first_bits, int):
            raise ValueError(f"first_bits={self.first_bits!r}; the first position has 3 or 4 bits")
        if self.first_bits < self.bits:
            raise ValueError(
                f"first_bits={self.first_bits} and {self.bits} bits for the rest: position 0 has at least as many; "
                f"give first_bits={self.bits}"
            )
        if self.mapping not in MAPPINGS:
            near = difflib.get_close_matches(str(self.mapping), MAPPINGS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ";"
            raise ValueError(f"unknown mapping {self.mapping!r}{hint} known: {', '.join(MAPPINGS)}")
        if self.head_dim < 4 or self.head_dim % 4:
            raise ValueError(f"heads of {self.head_dim} numbers; they are divided in four planes: give a multiple of 4")

    @property
    def has_first(self) -> bool:
        """Whether position 0 lies in a buffer of its own."""
        return self.bits < self.first_bits

    @property
    def first(self) -> KVLayout:
        """The layout of that buffer."""
        return dataclasses.replace(self, bits=self.first_bits)

    @property
    def planes(self) -> tuple[Planes, ...]:
        """Where the codes are."""
        D = self.head_dim
        if self.bits == 4:
            return (Planes(0, D // 2, 2, 4, 1),)
        return (Planes(0, D // 4, 4, 2, 1), Planes(D // 4, -(-D // 8), 8, 1, 4))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row.

        >>> [KVLayout(D, 3).row_bytes for D in (64, 100, 128)]
        [24, 38, 48]
        """
        return sum(planes.size for planes in self.planes)

    @property
    def levels(self) -> float:
        """max|x| in steps."""
        return levels_of(self.bits, self.mapping)

    @property
    def zero(self) -> float:
        """The code of 0."""
        return zero_of(self.bits, self.mapping)


def levels_of(bits: int, mapping: str) -> float:
    """max|x| in steps."""
    return float(2 ** (bits - 1) - 1) if mapping == "symmetric" else (2**bits - 1) / 2


def zero_of(bits: int, mapping: str) -> float:
    """The code of 0; of "minmax" between two codes."""
    return float(2 ** (bits - 1)) if mapping == "symmetric" else (2**bits - 1) / 2


def quantize_heads(x: Tensor, bits: int, mapping: str) -> tuple[Tensor, Tensor]:
    """Unsigned codes uint8 of the shape of x (..., D), and steps float32 (...), in float32, half to even.

    A row with a value that is not finite has the codes 0 and the step NaN. Source: BitNet a4.8, arXiv 2411.04965,
    section 3.3 ("minmax" is its wording), and the training document of b1.58 ("symmetric").
    """
    x = x.float()
    top = x.abs().amax(-1)
    finite = top < torch.inf
    top = top.clamp(min=EPS)
    levels, zero = levels_of(bits, mapping), zero_of(bits, mapping)
    v = x * (levels * top.reciprocal())[..., None]
    u = v.round() + zero if mapping == "symmetric" else (v + zero).round()
    u = torch.where(finite[..., None], u.clamp(0, 2**bits - 1), 0.0)
    return u.to(torch.uint8), torch.where(finite, top / levels, torch.nan)


def pack_heads(u: Tensor, layout: KVLayout) -> Tensor:
    """Codes uint8 (..., D) as bytes (..., row_bytes)."""
    D = layout.head_dim
    if u.shape[-1] != D:
        raise ValueError(f"codes of {u.shape[-1]} numbers for heads of {D}")
    parts = []
    low = 0
    for planes in layout.planes:
        bits = (u >> low) & (2**planes.bits - 1)
        bits = torch.nn.functional.pad(bits, (0, planes.size * planes.count - D))
        shifts = planes.bits * torch.arange(planes.count, dtype=torch.uint8, device=u.device)
        in_planes = bits.view(*u.shape[:-1], planes.count, planes.size)
        parts.append((in_planes << shifts[:, None]).sum(-2, dtype=torch.uint8))
        low += planes.bits
    return torch.cat(parts, -1)


def unpack_heads(data: Tensor, layout: KVLayout) -> Tensor:
    """The codes uint8 (..., D) of bytes (..., row_bytes). Raises ValueError for rows of another size."""
    if data.shape[-1] != layout.row_bytes:
        raise ValueError(
            f"rows of {data.shape[-1]} bytes; {layout.head_dim} numbers of {layout.bits} bits take {layout.row_bytes}"
        )
    total = None
    for planes in layout.planes:
        part = data[..., planes.offset : planes.offset + planes.size]
        shifts = planes.bits * torch.arange(planes.count, dtype=torch.uint8, device=data.device)
        codes = (part[..., None, :] >> shifts[:, None]) & (2**planes.bits - 1)
        codes = codes.flatten(-2)[..., : layout.head_dim] * planes.weight
        total = codes if total is None else total + codes
    return total


def dequantize_heads(u: Tensor, step: Tensor, bits: int, mapping: str) -> Tensor:
    """step * (u - zero) in float32."""
    return (u.float() - zero_of(bits, mapping)) * step.float()[..., None]
