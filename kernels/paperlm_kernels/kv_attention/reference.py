"""Appending to a quantized cache and attending over it in plain PyTorch: the meaning of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from paperlm_kernels.backends import without_autocast
from paperlm_kernels.kv_attention.layout import KVLayout, dequantize_heads, pack_heads, quantize_heads, unpack_heads


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding of x (B, T, heads, D) in float32, first half against second half.

    cos, sin (B, T, D / 2)."""
    first, second = x.float().chunk(2, -1)
    cos, sin = cos.float()[:, :, None], sin.float()[:, :, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def append_reference(
    data: Tensor, steps: Tensor, first: Tensor | None, x: Tensor, positions: Tensor, layout: KVLayout
) -> None:
    """Writes x (B, T, heads, D), float, at positions (B, T) of data (B, heads, capacity, bytes), steps and first."""
    u, step = quantize_heads(x, layout.bits, layout.mapping)
    rows = pack_heads(u, layout)
    batch = torch.arange(len(x), device=x.device)[:, None]
    data[batch, :, positions] = rows
    steps[batch, :, positions] = step.to(steps.dtype)
    if first is None:
        return
    u, step = quantize_heads(x, layout.first_bits, layout.mapping)
    rows = pack_heads(u, layout.first)
    for b, t in (positions == 0).nonzero().tolist():
        first[b] = rows[b, t]
        steps[b, :, 0] = step[b, t].to(steps.dtype)


def dequantized(data: Tensor, steps: Tensor, first: Tensor | None, layout: KVLayout, length: int) -> Tensor:
    """The first `length` positions in float32, (B, heads, length, D)."""
    u = unpack_heads(data[:, :, :length], layout)
    values = dequantize_heads(u, steps[:, :, :length], layout.bits, layout.mapping)
    if first is not None and length:
        u = unpack_heads(first, layout.first)
        values[:, :, 0] = dequantize_heads(u, steps[:, :, 0], layout.first_bits, layout.mapping)
    return values


def decode_reference(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Attention of q (B, heads, D) over the first lengths (B,) positions, in float32; zeros where there is none."""
    groups = q.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(groups, 1) for part in (keys, values))
    with without_autocast(q.device.type):
        scores = (keys @ q.float()[..., None])[..., 0] * scale
        hidden = torch.arange(keys.shape[2], device=q.device) >= lengths[:, None, None]
        shares = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        out = (shares[..., None, :] @ values)[..., 0, :]
    return torch.where(lengths[:, None, None] > 0, out, 0.0)
