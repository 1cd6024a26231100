"""What a ternary linear layer computes, in plain PyTorch: the meaning of the kernels, and what a CPU runs."""

from __future__ import annotations

import torch
from torch import Tensor

from paperlm_kernels.backends import without_autocast
from paperlm_kernels.ternary_linear.packing import PackedTernary, pack_ternary, unpack_ternary

EXACT_WIDTH = 2**16
"Below it every partial sum of codes (at most 128) times 0, 1 or 2 is an integer that float32 has."
AT_ONCE = 2**24


def accumulate(codes: Tensor, packed: PackedTernary) -> Tensor:
    """sum_k (t + 1) x, exactly, as int32 (M, N); codes int8 (M, K), or padded: behind K weights are 0.

    By a float product, for which there is a library on every CPU. It is exact in any order of its sums, and where
    operands are rounded to TF32 or bfloat16, which have every integer up to 256.
    """
    dtype = torch.float32 if packed.in_features < EXACT_WIDTH else torch.float64
    K = packed.in_features
    x, behind = codes[:, :K].to(dtype), codes[:, K:].sum(1, keepdim=True, dtype=torch.int32)
    step = max(1, AT_ONCE // K)
    parts = []
    for start in range(0, packed.out_features, step):
        t = unpack_ternary(packed, slice(start, start + step)).to(dtype)
        with without_autocast(x.device.type):  # the product rounded to bfloat16 would be no integer any more
            parts.append((x @ (t + 1).T).to(torch.int32) + behind)
    return torch.cat(parts, 1)


def ternary_linear_reference(
    codes: Tensor, act_scale: Tensor, rowsum: Tensor, packed: PackedTernary, alpha: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """y = (sum_k (t + 1) x - rowsum) * act_scale * alpha, (M, N).

    codes int8 (M, K), act_scale float32 (M,), rowsum int32 (M,), alpha float32 (N,). The products are in float32 in
    the order that is written, and rounded once more to out_dtype.
    """
    difference = (accumulate(codes, packed) - rowsum[:, None]).float()
    return (difference * act_scale[:, None] * alpha).to(out_dtype)


def ternary_gated_reference(
    codes: Tensor, act_scale: Tensor, rowsum: Tensor, packed: PackedTernary, alpha: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """up * relu(gate)^2 of the two halves of the product's columns, (M, N / 2), rounded once, to out_dtype."""
    gate, up = ternary_linear_reference(codes, act_scale, rowsum, packed, alpha, torch.float32).chunk(2, -1)
    return (up * gate.relu().square()).to(out_dtype)


def transposed_codes(packed: PackedTernary) -> PackedTernary:
    """The packed matrix whose rows are the columns of this one."""
    return pack_ternary(unpack_ternary(packed).T)
