"""What `fields` defines for rounded weights, by tables of mantissas: in NumPy that is faster.

Where neither a weight nor what becomes of it is near either end of the exponents, its new mantissa and what is added to
its exponent follow from its mantissa and its block's normalizer alone, 7 bits each. The tables are made by `fields`,
which computes the other weights itself.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from paperlm_kernels.neuzip import fields
from paperlm_kernels.neuzip.fields import Bits, Bytes

MIDDLE = 128
"Exponent of the weights that tables are made of."
LEAST, MOST = 2, 252
"Exponents for which they hold: a division and a rounding change them by 1 at most, and so does what undoes them."


@functools.cache
def split_tables(k: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """(normalizer, mantissa) -> what to add to (exponent << k), and what is unpacked, to add to (exponent << 7); modulo
    2^16, 2^14 values each."""
    norm, mantissa = (a.reshape(-1) for a in np.meshgrid(*[np.arange(128, dtype=np.uint16)] * 2, indexing="ij"))
    bits = (np.uint16(MIDDLE << 7) | mantissa).astype(np.uint16)
    q = fields.scales((norm << 1).astype(np.uint8))
    exponents, items = fields.divided(bits, k, q)
    code = exponents.astype(np.uint16) << k | items
    return code - np.uint16(MIDDLE << k), fields.multiplied(exponents, items, k, q) - np.uint16(MIDDLE << 7)


@functools.cache
def merge_table(k: int) -> NDArray[np.uint16]:
    """(normalizer byte, item) -> the weight, to add to (exponent << 7); modulo 2^16, 2^(9 + k) values. Whatever byte a
    container has: `pack` writes even ones."""
    norm, item = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(2 << k, dtype=np.uint8), indexing="ij")
    q = fields.scales(norm.reshape(-1))
    exponents = np.full(q.shape, MIDDLE, np.uint8)
    return fields.multiplied(exponents, item.reshape(-1), k, q) - np.uint16(MIDDLE << 7)


def lossy_split(bits: Bits, k: int, block: int | None, semantics: str) -> tuple[Bytes, Bytes, Bytes | None, Bits]:
    """Exponents, items and normalizers as `fields.lossy_split` gives them, and what is unpacked from them."""
    norm = None if block is None else fields.normalizers(bits, block, semantics)
    exponent = bits >> 7
    exponent &= 255
    index = bits & 0x7F
    _add_normalizers(index, None if norm is None else norm >> 1, block, 7)
    to_code, to_weight = split_tables(k)
    code = to_code.take(index)
    code += exponent << k
    weights = to_weight.take(index)
    weights += exponent << 7
    sign = bits & 0x8000
    weights |= sign
    exponents = (code >> k).astype(np.uint8)
    code &= (1 << k) - 1
    code |= sign >> (15 - k)
    items = code.astype(np.uint8)
    others = _others(exponent)
    if len(others):
        q = _scales_at(others, norm, block)
        exponents[others], items[others] = fields.divided(bits[others], k, q)
        weights[others] = fields.multiplied(exponents[others], items[others], k, q)
    return exponents, items, norm, weights


def lossy_merge(shifted: Bits, items: Bytes, k: int, norm: Bytes | None, block: int | None) -> Bits:
    """As `fields.lossy_merge`; shifted: exponents << 7."""
    index = items.astype(np.uint16)
    _add_normalizers(index, norm, block, k + 1)
    weights = merge_table(k).take(index)
    weights += shifted
    others = _others(shifted >> 7)
    if len(others):
        exponents = (shifted[others] >> 7).astype(np.uint8)
        weights[others] = fields.multiplied(exponents, items[others], k, _scales_at(others, norm, block))
    return weights


def _others(exponent: Bits) -> NDArray[np.intp]:
    """Where tables do not hold."""
    return np.flatnonzero(exponent - np.uint16(LEAST) > MOST - LEAST)


def _add_normalizers(index: Bits, norm: Bytes | None, block: int | None, shift: int) -> None:
    """Puts each weight's normalizer above the lowest `shift` bits."""
    if norm is None or block is None:
        return
    wide = norm.astype(np.uint16) << shift
    whole = len(index) // block
    index[: whole * block].reshape(whole, block)[:] |= wide[:whole, None]
    index[whole * block :] |= wide[whole:].max(initial=0)


def _scales_at(places: NDArray[np.intp], norm: Bytes | None, block: int | None) -> NDArray[np.float32] | None:
    return None if norm is None or block is None else fields.scales(norm[places // block])
