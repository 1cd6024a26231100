"""Exponents apart from signs and mantissas, and together again: what stands around a peer that codes bytes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def split_kernel(weights, exponents, items, numel, BLOCK: tl.constexpr):
    """Of int16 patterns, the exponents and sign and mantissa, a byte each."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(weights + i, mask=i < numel, other=0).to(tl.int32)
    tl.store(exponents + i, ((bits >> 7) & 0xFF).to(tl.uint8), mask=i < numel)
    tl.store(items + i, (((bits >> 8) & 0x80) | (bits & 0x7F)).to(tl.uint8), mask=i < numel)


@triton.jit
def merge_kernel(exponents, items, weights, numel, BLOCK: tl.constexpr):
    """The inverse of `split_kernel`, on integers: every pattern survives."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exponent = tl.load(exponents + i, mask=i < numel, other=0).to(tl.int32)
    item = tl.load(items + i, mask=i < numel, other=0).to(tl.int32)
    bits = ((item & 0x80) << 8) | (exponent << 7) | (item & 0x7F)
    tl.store(weights + i, bits.to(tl.int16), mask=i < numel)


def split(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents, and signs with mantissas (the sign highest), uint8 of contiguous bfloat16."""
    exponents, items = torch.empty(2, weights.numel(), dtype=torch.uint8, device=weights.device)
    split_kernel[(triton.cdiv(weights.numel(), BLOCK),)](
        weights.view(torch.int16), exponents, items, weights.numel(), BLOCK=BLOCK
    )  # fmt: skip
    return exponents, items


def merge(exponents: Tensor, items: Tensor, out: Tensor) -> Tensor:
    """The weights, in `out`."""
    merge_kernel[(triton.cdiv(out.numel(), BLOCK),)](
        exponents, items, out.view(torch.int16), out.numel(), BLOCK=BLOCK
    )  # fmt: skip
    return out
