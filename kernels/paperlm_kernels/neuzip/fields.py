"""The fields of a bfloat16 weight, and NeuZip's rounding of them to few mantissa bits, in NumPy (the definition).

NeuZip (arXiv 2410.20650), sections 3.2 and 3.3: the 8 exponent bits of a weight go to an entropy coder, sign and
mantissa are kept as they are (lossless, 7 mantissa bits) or with k = 0, 1 or 3 mantissa bits (lossy), where the weights
of a block may first be divided by the mantissa of its largest magnitude.

Weights are 16-bit patterns here (uint16), flat, in storage order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
Bytes = NDArray[np.uint8]
MANT_BITS = (0, 1, 3, 7)
"What is stored of the mantissa; 7 is all of it."
NORM_BLOCKS = (32, 64, 128, 256, 512, 1024)
SEMANTICS = ("true_max", "authors_v1")
LARGEST = np.uint16(0x7F7F)
SCAN = 1024
"Weights that share one reduction in the authors' program, and how many of them a warp sees."
WARP = 32


def split(bits: Bits) -> tuple[Bytes, Bytes]:
    """Exponents and sign+mantissa bytes of patterns of any shape: nothing is lost.

    >>> [int(part) for part in split(np.array(0xBF80, np.uint16))]
    [127, 128]
    """
    exponents = (bits >> 7).astype(np.uint8)
    items = ((bits >> 8) & 0x80 | bits & 0x7F).astype(np.uint8)
    return exponents, items


def merge(exponents: Bytes, items: Bytes) -> Bits:
    """Patterns again; on integers, so that each of the 65,536 survives.

    >>> hex(merge(*split(np.array([0xFFC1], np.uint16)))[0])
    '0xffc1'
    """
    wide = items.astype(np.uint16)
    return (wide | wide << 8) & np.uint16(0x807F) | exponents.astype(np.uint16) << 7


def as_float(bits: Bits) -> NDArray[np.float32]:
    """The values of patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: NDArray[np.float32]) -> Bits:
    """Patterns of float32 values, rounded to nearest, ties to even; not for NaN."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def normalizers(bits: Bits, block: int, semantics: str = "true_max") -> Bytes:
    """One byte for each `block` consecutive weights: the fraction of the largest magnitude's mantissa, in 256ths.

    true_max: the largest of the block, as section 3.3 of the paper says. authors_v1: what the authors' first release
    computes. Its reduction gives the true maximum to the first block of every 1024 weights only; the others, of 64 to
    512 weights, have that of their first 32.
    """
    magnitudes = bits & np.uint16(0x7FFF)
    count = -(-len(bits) // block)
    if len(bits) < count * block:
        magnitudes = np.concatenate([magnitudes, np.zeros(count * block - len(bits), np.uint16)])
    rows = magnitudes.reshape(count, block)
    top = rows.max(axis=1, initial=0)
    if semantics == "authors_v1" and WARP < block < SCAN:
        partial = rows[:, :WARP].max(axis=1, initial=0)
        first = np.arange(count) % (SCAN // block) == 0
        top = np.where(first, top, partial)
    # 7 bits of fraction, at the top of a byte
    return (top << 1).astype(np.uint8)


def scales(norm: Bytes) -> NDArray[np.float32]:
    """What a normalizer byte stands for: 1 <= q < 2.

    >>> scales(np.array([0, 128, 254], np.uint8)).tolist()
    [1.0, 1.5, 1.9921875]
    """
    return (np.uint32(0x3F800000) | norm.astype(np.uint32) << 15).view(np.float32)


def round_mantissa(bits: Bits, k: int) -> tuple[Bytes, Bytes]:
    """Exponents and items ((sign << k) | mantissa) of patterns rounded to k mantissa bits, half away from zero.

    What would round to infinity is the largest finite number that k bits hold. Infinity stays. No NaN.
    """
    mantissa = bits & 0x7F
    kept = mantissa >> (7 - k)
    carry = mantissa >> (6 - k) & 1
    # a carry out of the mantissa increments the exponent above it
    code = ((bits & 0x7F80) >> (7 - k)) + kept + carry
    finite = (bits & 0x7F80) != 0x7F80
    code = np.where(finite, np.minimum(code, (255 << k) - 1), code)
    exponents = (code >> k).astype(np.uint8)
    items = ((bits >> 15) << k | code & ((1 << k) - 1)).astype(np.uint8)
    return exponents, items


def unrounded(exponents: Bytes, items: Bytes, k: int) -> Bits:
    """Patterns of exponents and items of k mantissa bits."""
    wide = items.astype(np.uint16)
    return (wide >> k) << 15 | exponents.astype(np.uint16) << 7 | (wide & ((1 << k) - 1)) << (7 - k)


def divided(bits: Bits, k: int, q: NDArray[np.float32] | None) -> tuple[Bytes, Bytes]:
    """Exponents and items of weights, each by its own scale: y = x / q in float32, rounded to bfloat16, then
    `round_mantissa` (NeuZip, section 3.3). Without scales the last alone."""
    if q is None:
        return round_mantissa(bits, k)
    with np.errstate(over="ignore"):
        exponents, items = round_mantissa(rounded(as_float(bits) / q), k)
        # q is not of the largest weight under authors_v1: a product that would be infinite is made one step smaller
        over = (exponents != 255) & (rounded(as_float(unrounded(exponents, items, k)) * q) & 0x7F80 == 0x7F80)
    if over.any():
        code = (exponents[over].astype(np.uint16) << k | items[over] & ((1 << k) - 1)) - 1
        exponents[over] = code >> k
        items[over] = items[over] >> k << k | (code & ((1 << k) - 1)).astype(np.uint8)
    return exponents, items


def multiplied(exponents: Bytes, items: Bytes, k: int, q: NDArray[np.float32] | None) -> Bits:
    """Weights again: x' = q y' in float32, rounded to bfloat16."""
    y = unrounded(exponents, items, k)
    if q is None:
        return y
    with np.errstate(over="ignore", invalid="ignore"):
        return rounded(as_float(y) * q)


def lossy_split(
    bits: Bits, k: int, block: int | None = None, semantics: str = "true_max"
) -> tuple[Bytes, Bytes, Bytes | None]:
    """Exponents, items and normalizers (None without a block) of finite weights; of a block of N weights each is
    divided by its scale (`divided`)."""
    norm = None if block is None else normalizers(bits, block, semantics)
    return *divided(bits, k, _spread(norm, block, len(bits))), norm


def lossy_merge(exponents: Bytes, items: Bytes, k: int, norm: Bytes | None, block: int | None) -> Bits:
    """Weights again, multiplied by the scale of their block of weights."""
    return multiplied(exponents, items, k, _spread(norm, block, len(exponents)))


def _spread(norm: Bytes | None, block: int | None, count: int) -> NDArray[np.float32] | None:
    """The scale of each weight."""
    return None if norm is None or block is None else np.repeat(scales(norm), block)[:count]


# -- planes: sign and mantissa of eight weights are a whole number of bytes --


def plane_bytes(count: int, k: int) -> int:
    """Bytes of the plane of so many weights.

    >>> [plane_bytes(9, k) for k in (0, 1, 3, 7)]
    [2, 4, 8, 9]
    """
    return count if k == 7 else -(-count // 8) * (k + 1)


def pack_plane(items: Bytes, k: int) -> Bytes:
    """The plane of items: of eight weights, item j stands in bits (k + 1) j and up, little-endian."""
    if k == 7:
        return items
    if len(items) % 8:
        items = np.concatenate([items, np.zeros(-len(items) % 8, np.uint8)])
    if k == 0:
        return np.packbits(items, bitorder="little")
    per = 8 // (k + 1)
    parts = items.reshape(-1, per)
    plane = parts[:, 0].copy()
    for j in range(1, per):
        plane |= parts[:, j] << np.uint8((k + 1) * j)
    return plane


def unpack_plane(plane: Bytes, k: int, count: int) -> Bytes:
    """Items of a plane."""
    if k == 7:
        return plane[:count]
    if k == 0:
        return np.unpackbits(plane, count=count, bitorder="little")
    per = 8 // (k + 1)
    items = np.empty((len(plane), per), np.uint8)
    for j in range(per):
        items[:, j] = plane >> np.uint8((k + 1) * j) & np.uint8((2 << k) - 1)
    return items.reshape(-1)[:count]


def published_order(plane: Bytes, k: int) -> Bytes:
    """A plane with the items of a byte in the order of the published implementation, the first in the highest bits.

    Its own inverse. For k = 0, 1 and 3; for 7 nothing changes.

    >>> published_order(np.array([0x21], np.uint8), 3).tolist()
    [18]
    """
    out = np.zeros_like(plane)
    width = k + 1
    for shift in range(0, 8, width):
        out |= (plane >> np.uint8(shift) & np.uint8((2 << k) - 1)) << np.uint8(8 - width - shift)
    return out
