"""How the lanes of the kernel that writes streams put bits into them: 64 at a time, and what is left byte by byte."""

import triton
import triton.language as tl

from paperlm_kernels.neuzip.kernel_pairs import entry_of


@triton.jit
def store_bytes(stream8, word, bits, first, end):
    """The bytes first to end - 1 of 64 bits of each lane, where its neighbours own the others."""
    for b in tl.static_range(8):
        tl.store(stream8 + word * 8 + b, (bits >> (8 * b)).to(tl.uint8), mask=(first <= b) & (b < end))


@triton.jit
def put_octet(stream, word, window, filled, apart, w0, w1, w2, w3, pairs, lowest, width):
    """Eight weights of each lane behind its window's bits; 64 bits go to its stream once they are all there. Memory
    takes one access of a lane's after the other, however long each is.

    apart: the first word, 0, has another block's bits in its lower half, so that its upper half alone is stored."""
    e0, e1 = entry_of(w0, pairs, lowest, width), entry_of(w1, pairs, lowest, width)
    e2, e3 = entry_of(w2, pairs, lowest, width), entry_of(w3, pairs, lowest, width)
    length0, length2 = (e0 >> 16) & 31, (e2 >> 16) & 31
    low = (e0 & 0xFFFF) | (e1 & 0xFFFF) << length0
    high = (e2 & 0xFFFF) | (e3 & 0xFFFF) << length2
    short = length0 + ((e1 >> 16) & 31)
    code = low.to(tl.uint64) | high.to(tl.uint64) << short.to(tl.uint64)
    window = window | code << filled.to(tl.uint64)
    after = filled + short + length2 + ((e3 >> 16) & 31)  # below 128
    full = after >= 64
    shared = apart & (word == 0)
    tl.store(stream + word, window.to(tl.int64, bitcast=True), mask=full & (shared == 0))
    upper = stream.to(tl.pointer_type(tl.int32)) + 1 + word * 2
    tl.store(upper, (window >> 32).to(tl.int32), mask=full & shared)
    window = tl.where(full, (code >> 1) >> (63 - filled).to(tl.uint64), window)  # by 64, bits would not be shifted
    return word + full.to(tl.int32), window, after & 63
