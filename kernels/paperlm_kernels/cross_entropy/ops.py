"""The kernels as operators of `torch.library`, and the differentiable function over them.

The operators carry fake kernels, so that torch.compile traces through without a graph break and a CUDA graph can
capture them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paperlm_kernels.cross_entropy.kept import kept_backward
from paperlm_kernels.cross_entropy.launch import Saved, blocks_of, is_hopper, run_backward, run_forward
from paperlm_kernels.cross_entropy.order import mean_logit_order
from paperlm_kernels.cross_entropy.parallel import combine, reduce_hidden_gradient
from paperlm_kernels.once import differentiable_once

MOST_TOKENS = 2**20
MOST_TILES = 2**30  # of 128 tokens x 128 ids
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.library.custom_op("paperlm_kernels::linear_cross_entropy_forward", mutates_args=())
def forward_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, softcap: float | None, logit_scale: float,
    maxima: float, keep: bool, vocab_start: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Log-sum-exp, target logit, and what the backward pass needs: row index, local targets, counts, byte maxima and
    their base, kept logits."""
    s = run_forward(hidden, weight, bias, target, softcap, logit_scale, maxima, keep, vocab_start)
    return s.lse, s.target_logit, s.rows, s.targets, s.control, s.maxima, s.base, s.kept


@forward_op.register_fake
def _(hidden, weight, bias, target, softcap, logit_scale, maxima, keep, vocab_start):
    N, V = hidden.shape[0], weight.shape[0]
    pad = (N + 127) // 128 * 128
    block = blocks_of(hidden).forward[0]
    groups = (V + block - 1) // block * block // 128
    new = hidden.new_empty
    return (
        new(N, dtype=torch.float32),
        new(N, dtype=torch.float32),
        new(pad, dtype=torch.int32),
        new(pad, dtype=torch.int32),
        new(5, dtype=torch.int32),
        new((groups, pad) if maxima else (0,), dtype=torch.int8),
        new((2, pad) if maxima else (0,), dtype=torch.float32),
        new((N, V) if keep else (0,)),
    )


@torch.library.custom_op("paperlm_kernels::linear_cross_entropy_backward", mutates_args=())
def backward_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, lse: Tensor, rows: Tensor, targets: Tensor,
    control: Tensor, maxima: Tensor, base: Tensor, kept: Tensor, order: Tensor | None, d_lse: Tensor, d_target: Tensor,
    softcap: float | None, logit_scale: float, filter_eps: float | None, filter_grads: str, accumulate: str,
    memory: str, vocab_start: int, need: list[bool], hidden_fp32: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of hidden, weight and bias; empty where `need` says no."""
    if kept.numel():
        return kept_backward(
            hidden, weight, bias, target, lse, kept, d_lse, d_target, softcap, logit_scale, vocab_start, tuple(need),
            hidden_fp32, in_place=False,
        )  # fmt: skip
    saved = Saved(lse, lse, rows, targets, control, maxima, base, kept)
    return run_backward(
        hidden, weight, bias, saved, order, d_lse, d_target, softcap, logit_scale, filter_eps, filter_grads, accumulate,
        memory, tuple(need), hidden_fp32,
    )  # fmt: skip


@backward_op.register_fake
def _(
    hidden, weight, bias, target, lse, rows, targets, control, maxima, base, kept, order, d_lse, d_target, softcap,
    logit_scale, filter_eps, filter_grads, accumulate, memory, vocab_start, need, hidden_fp32,
):  # fmt: skip
    new = hidden.new_empty
    return (
        new(hidden.shape, dtype=torch.float32 if hidden_fp32 else hidden.dtype) if need[0] else new(0),
        new(weight.shape) if need[1] else new(0),
        bias.new_empty(bias.shape) if need[2] else new(0, dtype=torch.float32),
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, vocab_order, settings):
        softcap, scale, eps, _, _, memory, keep, group, vocab_start = settings
        # The byte maxima are of groups in the natural order, and lean does without: then the backward pass recomputes
        # all tiles.
        maxima = 0.0 if eps is None or memory == "lean" or vocab_order is not None else math.log(eps)
        lse, target_logit, rows, targets, control, max_bytes, base, kept = forward_op(
            hidden, weight, bias, target, softcap, scale, maxima, keep, vocab_start
        )
        if group is not None:
            counts = target >= 0
            lse, target_logit = combine(lse, torch.ones_like(lse), target_logit, group)
            lse, target_logit = torch.where(counts, lse, 0.0), torch.where(counts, target_logit, 0.0)
        ctx.settings = settings
        ctx.in_place_done = False
        ctx.sort = isinstance(vocab_order, str) and eps is not None
        order = (
            vocab_order.to(torch.int32).contiguous() if isinstance(vocab_order, Tensor) and eps is not None else None
        )
        ctx.save_for_backward(hidden, weight, bias, target, lse, rows, targets, control, max_bytes, base, kept, order)
        return lse, target_logit

    @staticmethod
    @differentiable_once("linear_cross_entropy", "use backend='eager' (it holds the logits)")
    def backward(ctx, d_lse, d_target):
        hidden, weight, bias, target, lse, rows, targets, control, maxima, base, kept, order = ctx.saved_tensors
        softcap, scale, eps, grads, accumulate, memory, keep, group, vocab_start = ctx.settings
        need = [bool(n) for n in ctx.needs_input_grad[:3]]
        d_lse, d_target = d_lse.contiguous(), d_target.contiguous()
        parallel = group is not None
        if keep and not torch.compiler.is_compiling():
            # The kept logits become their gradient in place, which halves the peak. A second backward pass computes
            # them anew.
            if ctx.in_place_done:
                kept = forward_op(hidden, weight, bias, target, softcap, scale, 0.0, True, vocab_start)[-1]
            ctx.in_place_done = True
            d_hidden, d_weight, d_bias = kept_backward(
                hidden,
                weight,
                bias,
                target,
                lse,
                kept,
                d_lse,
                d_target,
                softcap,
                scale,
                vocab_start,
                tuple(need),
                parallel,
                True,
            )
        else:
            if ctx.sort:
                order = mean_logit_order(hidden, weight, bias, target, scale).to(torch.int32)
            d_hidden, d_weight, d_bias = backward_op(
                hidden, weight, bias, target, lse, rows, targets, control, maxima, base, kept, order, d_lse, d_target,
                softcap, scale, eps, grads, accumulate, memory, vocab_start, need, parallel,
            )  # fmt: skip
        if parallel and need[0]:
            d_hidden = reduce_hidden_gradient(d_hidden, group).to(hidden.dtype)
        return (
            d_hidden if need[0] else None,
            d_weight if need[1] else None,
            d_bias if need[2] else None,
            None,
            None,
            None,
        )


def linear_cross_entropy_core(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *, softcap: float | None = None,
    logit_scale: float = 1.0, filter_eps: float | None = None, filter_grads: str = "none", accumulate: str = "fp32",
    memory: str = "balanced", vocab_order: str | Tensor | None = None, keep_logits: bool = False,
    process_group: object = None, vocab_start: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-sum-exp and target logit of every token, (N,) float32 each, 0 for ignored tokens; both differentiable once.

    hidden (N, D), weight (V, D), bias (V,) or None: bfloat16, float16 or float32, on one device; target (N,) int32 or
    int64, -1 for ignored tokens. The other keywords are those of `linear_cross_entropy`. Raises TypeError for another
    dtype, ValueError for more tokens or tiles than the kernels index and for keep_logits with a filter.
    """
    if hidden.dtype not in DTYPES:
        raise TypeError(f'the kernels take bfloat16, float16 and float32, not {hidden.dtype}; use backend="reference"')
    if hidden.shape[0] > MOST_TOKENS:
        raise ValueError(f"{hidden.shape[0]} tokens in one call; split them: the kernels index at most {MOST_TOKENS}")
    if math.ceil(hidden.shape[0] / 128) * math.ceil(weight.shape[0] / 128) > MOST_TILES:
        raise ValueError(
            f"{hidden.shape[0]} tokens and {weight.shape[0]} ids in one call; split the tokens: the kernels index at "
            f"most {MOST_TILES} tiles of 128 x 128"
        )
    if filter_grads == "none":
        filter_eps = None
    if keep_logits and filter_eps is not None:
        raise ValueError("keep_logits=True is for unfiltered gradients: pass filter_eps=None, or leave keep_logits out")
    # the kept logits are stored through a descriptor, whose rows are whole multiples of 16 bytes
    keep_logits = (
        keep_logits
        and process_group is None
        and is_hopper(hidden.device)
        and all(n * hidden.element_size() % 16 == 0 for n in weight.shape)
    )
    hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    bias = bias if bias is None or bias.stride(0) == 1 else bias.contiguous()
    settings = (
        softcap,
        logit_scale,
        filter_eps,
        filter_grads,
        accumulate,
        memory,
        keep_logits,
        process_group,
        vocab_start,
    )
    return _LinearCrossEntropy.apply(hidden, weight, bias, target, vocab_order, settings)
