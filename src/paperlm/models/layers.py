"""Building blocks of the decoder.

Shapes: B sequences, S tokens, D hidden_size, F intermediate_size, H heads of width D/H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paperlm.norms.base import Learned, ModelShape, NormMethod, Wiring


class RMSNorm(nn.Module):
    """g * u / sqrt(mean(u^2) + eps) over the last axis; statistics in float32.

    In bfloat16 the product with g is rounded once. The authors round before and after it, which differs by at most one
    unit in the last place, and not at all while g is 1, where pure bfloat16 training leaves it.
    """

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class FeatureGroupNorm(nn.Module):
    """Mean 0 and variance 1 per group of features, then gain and bias per feature.

    `over_sequence` takes the statistics over the tokens of a sequence as well: not causal. x: (B, S, D).
    """

    def __init__(self, hidden_size: int, groups: int, over_sequence: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.groups, self.over_sequence, self.eps = groups, over_sequence, eps

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.float().unflatten(-1, (self.groups, -1))
        axes = (-3, -1) if self.over_sequence else (-1,)
        centred = grouped - grouped.mean(axes, keepdim=True)
        normed = centred * (centred.square().mean(axes, keepdim=True) + self.eps).rsqrt()
        return normed.flatten(-2).to(x.dtype) * self.weight + self.bias


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, half-split form. x: (B, H, S, D/H); cos, sin: (..., S, D/H)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rope_tables(head_dim: int, n_positions: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, (n_positions, head_dim), float32 from float64 angles."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    angles = torch.outer(torch.arange(n_positions, dtype=torch.float64, device="cpu"), inverse).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


class Attention(nn.Module):
    """Causal multi-head self-attention without biases: four D x D projections, kept apart (fused ones are slower)."""

    def __init__(self, hidden_size: int, n_heads: int, cache_index: int) -> None:
        super().__init__()
        self.n_heads, self.cache_index = n_heads, cache_index
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, cache: Any = None) -> Tensor:
        """x: (B, S, D). `mask`: None for plainly causal, else (B, 1, S, keys), True where attention is allowed."""
        heads = (*x.shape[:-1], self.n_heads, -1)
        q = rotate(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(heads).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.cache_index)
        out = _attend(q, k, v, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    causal = mask is None and q.shape[2] > 1
    if q.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        # PyTorch's CPU attention is three times slower backward in bfloat16 than in float32.
        with torch.autocast("cpu", enabled=False):
            return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask, is_causal=causal)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


class SwiGLU(nn.Module):
    """down( silu(gate x) * up x ), no biases."""

    ALIGN = 64
    "Tensor cores want widths that divide by 8; LLaMA-1B's 5461 is odd."

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.padding = -intermediate_size % self.ALIGN if intermediate_size % 8 else 0

    def forward(self, x: Tensor) -> Tensor:
        if self.padding and x.is_cuda:
            # Zero rows and columns change nothing (silu(0) * 0 = 0) and make the three products aligned. The copy is
            # of weights only, a few thousandths of the products' traffic.
            gate = F.linear(x, F.pad(self.gate_proj.weight, (0, 0, 0, self.padding)))
            up = F.linear(x, F.pad(self.up_proj.weight, (0, 0, 0, self.padding)))
            return F.linear(F.silu(gate) * up, F.pad(self.down_proj.weight, (0, self.padding)))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Residual(nn.Module):
    """out = N_out( r*x + s*N_post( f( c*N_pre(x) ) ) ), the equation of paperlm.norms.base."""

    def __init__(self, wiring: Wiring, method: NormMethod, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.pre_norm = method.block_norm(hidden_size, eps) if wiring.pre else None
        self.post_norm = method.block_norm(hidden_size, eps) if wiring.post else None
        self.out_norm = method.block_norm(hidden_size, eps) if wiring.out else None
        self.pre_scale = wiring.pre_scale
        self.residual_scale = self._factor(wiring.residual_scale, hidden_size)
        self.branch_scale = self._factor(wiring.branch_scale, hidden_size)

    @staticmethod
    def _factor(factor: float | Learned, hidden_size: int) -> float | nn.Parameter:
        if not isinstance(factor, Learned):
            return factor
        parameter = nn.Parameter(torch.full((hidden_size if factor.per_feature else 1,), factor.init))
        parameter.start_value = factor.init
        return parameter

    def branch(self, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        """N_post( f( c*N_pre(x) ) )"""
        h = x if self.pre_norm is None else self.pre_norm(x)
        h = f(h if self.pre_scale == 1.0 else h * self.pre_scale)
        return h if self.post_norm is None else self.post_norm(h)

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor], shared: Residual | None = None) -> Tensor:
        """x: (B, S, D). `shared` lends the factors that this sub-layer does not own (None here)."""
        r = shared.residual_scale if self.residual_scale is None else self.residual_scale
        s = shared.branch_scale if self.branch_scale is None else self.branch_scale
        h = self.branch(x, f)
        out = _times(x, r) + _times(h, s)
        return out if self.out_norm is None else self.out_norm(out)


def _times(x: Tensor, factor: float | Tensor) -> Tensor:
    return x if isinstance(factor, float) and factor == 1.0 else x * factor


class DecoderLayer(nn.Module):
    """One block: attention, then feed-forward, each wired by the normalization method.

    `layer` is the block's number at training time, from 1; it survives the deletion of other blocks.
    """

    def __init__(
        self, layer: int, cache_index: int, method: NormMethod, shape: ModelShape, n_heads: int, eps: float
    ) -> None:
        super().__init__()
        self.layer = layer
        wiring = method.wiring(layer, shape)
        self.attention = Attention(shape.hidden_size, n_heads, cache_index)
        self.mlp = SwiGLU(shape.hidden_size, shape.intermediate_size)
        self.attention_residual = Residual(wiring, method, shape.hidden_size, eps)
        self.mlp_residual = Residual(wiring, method, shape.hidden_size, eps)
        for factor in ("residual_scale", "branch_scale"):
            if isinstance(getattr(wiring, factor), Learned) and getattr(wiring, factor).shared:
                # Registered once only, so that a saved model holds one copy.
                setattr(self.mlp_residual, factor, None)
        for tensor in ("q", "k", "v", "o"):
            getattr(self.attention, f"{tensor}_proj").init_std = method.init_std(tensor, layer, shape)
        for tensor in ("gate", "up", "down"):
            getattr(self.mlp, f"{tensor}_proj").init_std = method.init_std(tensor, layer, shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, cache: Any = None) -> Tensor:
        x = self.attention_residual(x, lambda h: self.attention(h, cos, sin, mask, cache))
        return self.mlp_residual(x, self.mlp, shared=self.attention_residual)
