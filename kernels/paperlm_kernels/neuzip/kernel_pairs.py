"""Triton kernels that look up what two neighbouring exponents become.

By index of each and then by pair, that is three loads from tables; a table by pair of exponents is one. Of 256 x 256
it would be too large to stay near a multiprocessor; nearly all palettes lie in 31 neighbouring exponents.
"""

import triton
import triton.language as tl


@triton.jit
def window_of(stored, PALETTE: tl.constexpr):
    """Of a stored codebook, where a window of exponents begins that has all of the palette but for its last place, and
    how wide it is: 32, or all 256 from 0 on. An exponent outside becomes the last place, which is none of the palette,
    as it is itself; so a table of pairs within the window is one of all pairs."""
    place = tl.arange(0, 16)
    palette = tl.load(stored + place, mask=place < PALETTE, other=0).to(tl.int32)
    lowest = tl.min(tl.where(place < PALETTE, palette, 255), 0)
    near = tl.max(palette, 0) - lowest < 31
    return tl.where(near, lowest, 0), tl.where(near, 32, 256)


@triton.jit
def store_pairs(index, codes, pairs, part, lowest, width, PART: tl.constexpr):
    """A part of the table of `window_of`: what two exponents become (`Codebook.packing`)."""
    place = part * PART + tl.arange(0, PART)
    first, second = place // width, place % width
    beyond = (width < 256) & (first == width - 1)
    i = tl.where(beyond, 15, tl.load(index + tl.minimum(lowest + first, 255)).to(tl.int32))
    beyond = (width < 256) & (second == width - 1)
    j = tl.where(beyond, 15, tl.load(index + tl.minimum(lowest + second, 255)).to(tl.int32))
    tl.store(pairs + place, tl.load(codes + i * 16 + j))


@triton.jit
def pairs_kernel(stored, index, packing, pairs, PALETTE: tl.constexpr, PART: tl.constexpr):
    """The table of a codebook that was there before; PART entries a program."""
    lowest, width = window_of(stored, PALETTE)
    if tl.program_id(0) * PART < width * width:
        store_pairs(index, packing, pairs, tl.program_id(0), lowest, width, PART)


@triton.jit
def entry_of(word, pairs, lowest, width):
    """What two exponents become, of the table that `pairs_kernel` made."""
    first = tl.minimum((((word >> 7) & 0xFF) - lowest).to(tl.uint32, bitcast=True), (width - 1).to(tl.uint32))
    second = tl.minimum((((word >> 23) & 0xFF) - lowest).to(tl.uint32, bitcast=True), (width - 1).to(tl.uint32))
    place = first * width.to(tl.uint32) + second
    return tl.load(pairs + place.to(tl.int32, bitcast=True)).to(tl.uint32, bitcast=True)
