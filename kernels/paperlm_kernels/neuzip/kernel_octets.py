"""What the kernels that encode read: weights of each lane, as they are stored.

A tensor's last octet may not be complete. It is read by itself, behind the loops: what these read is 16 bytes a lane.
"""

import triton
import triton.language as tl

from paperlm_kernels.neuzip.kernel_decode import bfloat16_of, scale_of


@triton.jit
def either(a, b):
    """Bits of both."""
    return a | b


@triton.jit
def bit_of_step(t, OCTETS: tl.constexpr):
    """Where a word of 32 bits says something of a step; of more steps, several share a bit."""
    return t // (OCTETS // 32) if OCTETS > 32 else t


@triton.jit
def load_octet(weights, octet, count, LANES: tl.constexpr, ALIGNED: tl.constexpr, behind=0):
    """Eight patterns of each lane in four words, and words `behind` where an octet is not complete. ALIGNED: `weights`
    is a multiple of 16 bytes, so that one is loaded at once.

    An octet that is not complete is a tensor's last: `load_last` is for it, behind the loop, where it takes no
    registers that the loop needs."""
    words = octet[:, None] * 4 + tl.arange(0, 4)[None, :]
    complete = (octet * 8 + 8 <= count)[:, None]
    if ALIGNED:
        rows = tl.load(weights.to(tl.pointer_type(tl.int32)) + words, mask=complete, other=behind)
    else:
        low = tl.load(weights + 2 * words, mask=complete, other=behind).to(tl.int32)
        high = tl.load(weights + 2 * words + 1, mask=complete, other=behind >> 16).to(tl.int32)
        rows = (low & 0xFFFF) | (high << 16)
    even, odd = tl.split(tl.reshape(rows, [LANES, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def load_last(weights, octet, count):
    """Of an incomplete octet among the lanes', if there is one, four words with zeros behind the last pattern; zeros of
    the others. One by one, which is little code."""
    w0 = octet * 0
    w1, w2, w3 = w0, w0, w0
    for j in range(count % 8):
        pattern = tl.load(weights + octet * 8 + j, mask=octet == count // 8, other=0).to(tl.int32) & 0xFFFF
        pattern = pattern << (16 * (j % 2))
        w0, w1 = w0 | tl.where(j < 2, pattern, 0), w1 | tl.where(j // 2 == 1, pattern, 0)
        w2, w3 = w2 | tl.where(j // 2 == 2, pattern, 0), w3 | tl.where(j >= 6, pattern, 0)
    return w0, w1, w2, w3


@triton.jit
def rounded_pattern(pattern, scale, K: tl.constexpr, NORMED: tl.constexpr):
    """A pattern divided by its scale and rounded to K mantissa bits, as `fields.lossy_split` does."""
    y = pattern
    if NORMED:
        y = bfloat16_of(tl.div_rn((pattern << 16).to(tl.float32, bitcast=True), scale))
    code = ((y & 0x7FFF) >> (7 - K)) + ((y >> (6 - K)) & 1)
    finite = (y & 0x7F80) != 0x7F80
    code = tl.where(finite, tl.minimum(code, (255 << K) - 1), code)
    if NORMED:
        product = bfloat16_of(((code << (7 - K)) << 16).to(tl.float32, bitcast=True) * scale)
        code -= (((product & 0x7F80) == 0x7F80) & ((code >> K) != 255)).to(tl.int32)
    return (y & 0x8000) | code << (7 - K)


@triton.jit
def stored_word(word, scale, K: tl.constexpr, NORMED: tl.constexpr):
    """Two patterns as they are stored, the mantissa's lowest 7 - K bits being zeros."""
    if K == 7:
        return word
    first = rounded_pattern(word & 0xFFFF, scale, K, NORMED)
    return first | rounded_pattern((word >> 16) & 0xFFFF, scale, K, NORMED) << 16


@triton.jit
def as_stored(w0, w1, w2, w3, norm, octet, numel, LANES: tl.constexpr, K: tl.constexpr, LOG_NORM: tl.constexpr):
    """What `load_octet` gave, as it is stored, and the scale."""
    scale = tl.full([LANES], 1.0, tl.float32)
    if LOG_NORM > 0:
        scale = scale_of(norm, octet * 8, LOG_NORM, octet * 8 < numel)
    w0, w1 = stored_word(w0, scale, K, LOG_NORM > 0), stored_word(w1, scale, K, LOG_NORM > 0)
    w2, w3 = stored_word(w2, scale, K, LOG_NORM > 0), stored_word(w3, scale, K, LOG_NORM > 0)
    return w0, w1, w2, w3, scale
