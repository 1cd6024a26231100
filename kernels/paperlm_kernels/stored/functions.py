"""Products with a stored weight: it is read for the forward pass and again for the backward pass, and never saved."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from paperlm_kernels.stored.weight import StoredWeight


def stored_linear(x: Tensor, weight: StoredWeight, bias: Tensor | None = None, transposed: bool = False) -> Tensor:
    """y = x W^T + b of x (..., in) and W (out, in); transposed: y = x W + b and W (in, out).

    A store that multiplies by itself does (`WeightStore.multiplies`); of others the
    gradients are: of x, g W; of W, g^T x, which goes to `weight`; of b, the sum of g over all but its last axis. Under
    autocast all are cast to its dtype first, as torch.nn.functional.linear casts them.
    """
    if weight.store.multiplies and not transposed:
        return _multiplied(x, weight, bias)
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast(device, enabled=False):
            return _Linear.apply(x, weight.handle, bias, weight, transposed, dtype)
    return _Linear.apply(x, weight.handle, bias, weight, transposed, weight.store.dtype)


def _multiplied(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """By the store itself, of rows; what it computes with is its own, which autocast would round once more."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        return weight.store.product(x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], -1)


def stored_embedding(ids: Tensor, weight: StoredWeight, padding_idx: int | None = None) -> Tensor:
    """Rows `ids` (...) of the weight, (..., width); only blocks that hold one of them are decoded. The gradient of row
    padding_idx is dropped, as in torch.nn.functional.embedding. Raises TypeError for ids of another type than int64 and
    int32, and IndexError for a row that there is not."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids of {ids.dtype}; rows are asked for by int64 or int32: convert them with ids.long()")
    return _Embedding.apply(ids, weight.handle, weight, padding_idx)


class _Linear(torch.autograd.Function):
    """The weights of the backward pass are those of the forward pass: they are updated when both passes are over.

    Algorithm 1 of the paper's appendix B updates first; its results are those of LOMO only in this order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        handle: Tensor,
        bias: Tensor | None,
        weight: StoredWeight,
        transposed: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.weight, ctx.transposed, ctx.shape = weight, transposed, x.shape
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        values, ctx.version = weight.read(dtype), weight.version
        if not transposed:
            y = F.linear(x, values, bias)
        else:
            flat = x.reshape(-1, x.shape[-1])
            y = flat @ values if bias is None else torch.addmm(bias, flat, values)
        # no view: autograd lets nobody change one that a custom function returned; Falcon adds to outputs in place
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        wants_weight = wants_weight and _is_asked_for(ctx, 1)
        # first, since it recomputes a checkpointed block, which decodes weights of its own
        (x,) = ctx.saved_tensors
        weight, flat = ctx.weight, g.reshape(-1, g.shape[-1])
        gx = gw = gb = None
        if wants_x and ctx.version != weight.version:
            raise RuntimeError(
                "a stored weight has changed since the forward pass whose gradients are asked for: call backward() "
                "before LomoSgd.step() and before loading weights, and make the forward pass anew behind them"
            )
        if wants_x:
            values = weight.read_again(g.dtype, wants_weight)
            gx = (flat @ (values.t() if ctx.transposed else values)).view(ctx.shape)
            del values
        if wants_weight:
            rows = x.reshape(-1, x.shape[-1])
            weight.receive(rows.t() @ flat if ctx.transposed else flat.t() @ rows)
            gw = torch.empty_like(weight.handle)
        if wants_bias:
            gb = flat.sum(0)
        return gx, gw, gb, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, handle: Tensor, weight: StoredWeight, padding_idx: int | None) -> Tensor:
        ctx.weight, ctx.padding_idx = weight, padding_idx
        ctx.save_for_backward(ids)
        return weight.store.read_rows(ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if not _is_asked_for(ctx, 1):
            return None, None, None, None
        (ids,) = ctx.saved_tensors
        flat, rows = ids.reshape(-1), g.reshape(-1, g.shape[-1])
        if ctx.padding_idx is not None:
            real = flat != ctx.padding_idx
            flat, rows = flat[real], rows[real]
        ctx.weight.receive_rows(flat, rows)
        return None, torch.empty_like(ctx.weight.handle), None, None


def _is_asked_for(ctx: Any, place: int) -> bool:
    """Whether this backward pass is for the leaf behind an input too: `torch.autograd.grad(loss, x)` is for x alone,
    and the gradient that a weight was left would be there at the next update."""
    leaf = ctx.next_functions[place][0]
    return leaf is not None and torch._C._will_engine_execute_node(leaf)
