"""The path that keeps the logits: three products instead of four, for vocabularies whose logits fit memory.

The forward kernel stores the logits it used, rounded to the inputs' dtype; the backward pass turns them into their
gradient, in place when it can, and leaves the two products to the BLAS library. Unfiltered only. Ignored tokens take
part in the products, as in any loss that holds its logits, with gradients of zero.
"""

import torch
import triton
import triton.language as tl

from paperlm_kernels.cross_entropy.launch import on_its_device
from paperlm_kernels.cross_entropy.tiles import LOG2E


@triton.jit
def kept_gradient_kernel(
    kept,
    out,
    target,
    target_stride,
    lse,
    d_lse,
    d_target,
    V,
    vocab_start,
    cap,
    scale,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = scale * dloss/dlogits (before the scale) from the logits used. Grid: tokens x chunks of ids; ignored
    tokens give zeros."""
    row = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = ids < V
    own = tl.load(target + row.to(tl.int64) * target_stride)
    at = row.to(tl.int64) * V + ids
    z = tl.load(kept + at, mask=mask, other=0.0).to(tl.float32)
    q = tl.load(d_lse + row) * tl.exp2((z - tl.load(lse + row)) * LOG2E)
    q += tl.where(ids == own - vocab_start, tl.load(d_target + row), 0.0)
    if HAS_CAP:
        r = z / cap
        q = q * (1.0 - r * r)
    q = tl.where(own >= 0, q * scale, 0.0)
    tl.store(out + at, q.to(out.dtype.element_ty), mask=mask)


@on_its_device
def kept_backward(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, lse: torch.Tensor,
    kept: torch.Tensor, d_lse: torch.Tensor, d_target: torch.Tensor, softcap: float | None, logit_scale: float,
    vocab_start: int, need: tuple[bool, bool, bool], hidden_fp32: bool, in_place: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients from kept logits (N, V), which are overwritten if `in_place`."""
    N, V = kept.shape
    q = kept if in_place else torch.empty_like(kept)
    if N:
        kept_gradient_kernel[(N, triton.cdiv(V, 4096))](
            kept, q, target, target.stride(0), lse, d_lse, d_target, V, vocab_start, float(softcap or 1.0),
            float(logit_scale), HAS_CAP=softcap is not None, BLOCK=4096, num_warps=8,
        )  # fmt: skip
    d_hidden = q @ weight if need[0] else hidden.new_empty(0)
    d_weight = q.T @ hidden if need[1] else hidden.new_empty(0)
    d_bias = (q.sum(0, dtype=torch.float32) / logit_scale).to(bias.dtype) if need[2] else lse.new_empty(0)
    return d_hidden, d_weight, d_bias
