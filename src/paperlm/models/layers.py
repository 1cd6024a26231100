"""Building blocks of the decoder. Each takes the configuration, so that an option of it reaches the block it concerns.

Shapes: B sequences, S tokens, D hidden_size, F intermediate_size, H heads of width D/H.

Modules are called with tensors alone and never with another module: offloading by accelerate moves every argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from paperlm.models.config import PaperLlamaConfig
from paperlm.models.packed import PackedLinear
from paperlm.models.quantized import QuantizedHeads, QuantizedInput, QuantizedLinear, quantized_input
from paperlm.norms.base import Learned, ModelShape, NormMethod, Wiring
from paperlm.quantizers.scheme import kv_cache_of


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

    `over_sequence` takes the statistics over the tokens of a sequence as well: not causal. x: (B, S, D); `real` (B, S)
    is True at tokens that count, None if all do. What stands at the others has no meaning.
    """

    def __init__(self, hidden_size: int, groups: int, over_sequence: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.groups, self.over_sequence, self.eps = groups, over_sequence, eps

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        grouped = x.float().unflatten(-1, (self.groups, -1))
        axes = (-3, -1) if self.over_sequence else (-1,)
        if real is None or not self.over_sequence:
            centred = grouped - grouped.mean(axes, keepdim=True)
            variance = centred.square().mean(axes, keepdim=True)
        else:
            counts = real[:, :, None, None].to(grouped.dtype)
            size = counts.sum(axes, keepdim=True).clamp(min=1) * grouped.shape[-1]
            centred = grouped - (grouped * counts).sum(axes, keepdim=True) / size
            variance = (centred.square() * counts).sum(axes, keepdim=True) / size
        normed = centred * (variance + self.eps).rsqrt()
        return normed.flatten(-2).to(x.dtype) * self.weight + self.bias


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, half-split form. x: (B, H, S, D/H); cos, sin: (S, D/H) or (B or 1, 1, S, D/H)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rope_tables(head_dim: int, n_positions: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, (n_positions, head_dim), float32 from float64 angles."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    angles = torch.outer(torch.arange(n_positions, dtype=torch.float64, device="cpu"), inverse).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def projection(config: PaperLlamaConfig, in_features: int, out_features: int) -> nn.Module:
    """One of the seven products of a block, without bias: plain, of a quantized weight, or of a packed one."""
    if config.quantization is None:
        return nn.Linear(in_features, out_features, bias=False)
    if config.packed_weights is not None:
        return PackedLinear(in_features, out_features)
    return QuantizedLinear(in_features, out_features, config.quantizers().weight)


def inner_normed(norm: RMSNorm | None, x: Tensor) -> Tensor:
    """x behind SubLN's norm, in the dtype of the norm's gain: autocast's bfloat16 ends here, since rounding once more
    in front of a quantizer would move numbers across its ties."""
    return x if norm is None else norm(x.to(norm.weight.dtype))


def behind_norm(norm: RMSNorm | None, quantized: QuantizedInput | None, x: Tensor) -> tuple[Tensor, ...]:
    """What the output or the down projection reads: x behind SubLN's norm and its quantizer, where there are such."""
    if norm is not None and quantized is not None and quantized.fused:
        return quantized(x, norm.weight, norm.eps)
    x = inner_normed(norm, x)
    return (x,) if quantized is None else quantized(x)


class Attention(nn.Module):
    """Causal multi-head self-attention without biases: four D x D projections, kept apart (fused ones are slower)."""

    is_causal = True
    num_key_value_groups = 1

    def __init__(self, config: PaperLlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.n_heads = config.num_attention_heads
        self.scaling = 1 / (config.hidden_size // self.n_heads) ** 0.5  # the number that PyTorch's attention takes
        scheme, width = config.quantizers(), config.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (projection(config, width, width) for _ in range(4))
        self.sub_norm = RMSNorm(width, config.rms_norm_eps) if config.sub_norm else None
        self.qkv_input, self.o_input = (quantized_input(scheme, place, width) for place in ("qkv", "o"))
        self.heads = None if config.kv_cache is None else QuantizedHeads(kv_cache_of(config.kv_cache))

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        past_key_values: Any = None,
        implementation: str | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """x: (B, S, D) -> the same, and the attention weights (B, H, S, keys) where the implementation has them.

        `implementation`: a name in transformers' ALL_ATTENTION_FUNCTIONS, with the mask and keywords that go with it.
        None: PyTorch's causal attention without a mask, for whole sequences.
        """
        heads = (*x.shape[:-1], self.n_heads, -1)
        entering = (x,) if self.qkv_input is None else self.qkv_input(x)
        q = rotate(self.q_proj(*entering).view(heads).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(*entering).view(heads).transpose(1, 2), cos, sin)
        v = self.v_proj(*entering).view(heads).transpose(1, 2)
        if self.heads is not None:
            q, k, v = self.heads(q, k, v, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        if q.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            # PyTorch's CPU attention is three times slower backward in bfloat16 than in float32.
            with torch.autocast("cpu", enabled=False):
                if mask is not None and mask.is_floating_point():
                    mask = mask.float()
                out, weights = self._attend(q.float(), k.float(), v.float(), mask, implementation, kwargs)
        else:
            out, weights = self._attend(q, k, v, mask, implementation, kwargs)
        return self.o_proj(*behind_norm(self.sub_norm, self.o_input, out.flatten(2))), weights

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, implementation: str | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        if implementation is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), None
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        return attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **kwargs)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2."""
    return F.relu(x).square()


ACTIVATIONS = {"silu": F.silu, "swish": F.silu, "relu2": squared_relu}


class GatedMLP(nn.Module):
    """down( N( act(gate x) * up x ) ), no biases; N is the configuration's `sub_norm`, act its `hidden_act`."""

    ALIGN = 64
    "Tensor cores want widths that divide by 8; LLaMA-1B's 5461 is odd."

    def __init__(self, config: PaperLlamaConfig) -> None:
        super().__init__()
        scheme, width, inner = config.quantizers(), config.hidden_size, config.intermediate_size
        self.act = ACTIVATIONS[config.hidden_act]
        self.gate_proj = projection(config, width, inner)
        self.up_proj = projection(config, width, inner)
        self.down_proj = projection(config, inner, width)
        self.sub_norm = RMSNorm(inner, config.rms_norm_eps) if config.sub_norm else None
        self.gate_up_input = quantized_input(scheme, "gate_up", width)
        self.down_input = quantized_input(scheme, "down", inner)
        self.padding = -inner % self.ALIGN if inner % 8 else 0

    def forward(self, x: Tensor) -> Tensor:
        if self.padding and x.is_cuda and self._plain():
            # Zero rows and columns change nothing (act(0) * 0 = 0) and make the three products aligned. The copy is
            # of weights only, a few thousandths of the products' traffic.
            gate = F.linear(x, F.pad(self.gate_proj.weight, (0, 0, 0, self.padding)))
            up = F.linear(x, F.pad(self.up_proj.weight, (0, 0, 0, self.padding)))
            return F.linear(self.act(gate) * up, F.pad(self.down_proj.weight, (0, self.padding)))
        entering = (x,) if self.gate_up_input is None else self.gate_up_input(x)
        h = self.act(self.gate_proj(*entering)) * self.up_proj(*entering)
        return self.down_proj(*behind_norm(self.sub_norm, self.down_input, h))

    def _plain(self) -> bool:
        """Whether the weights are all there is: no adapter or quantizer in their place, no norm, nothing offloaded."""
        projections = (self.gate_proj, self.up_proj, self.down_proj)
        return self.sub_norm is None and all(
            type(p) is nn.Linear and p.weight.device.type != "meta" for p in projections
        )


class Residual(nn.Module):
    """out = N_out( r*x + s*N_post( f( c*N_pre(x) ) ) ), the equation of paperlm.norms.base: all of it but f.

    `real` (B, S), True at tokens that are no padding, is given to norms of methods whose statistics span the sequence
    (`leaks_future`), and to no others.
    """

    def __init__(self, size: int, wiring: Wiring, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.pre_norm = norm() if wiring.pre else None
        self.post_norm = norm() if wiring.post else None
        self.out_norm = norm() if wiring.out else None
        self.pre_scale = wiring.pre_scale
        self.residual_scale = self._factor(wiring.residual_scale, size)
        self.branch_scale = self._factor(wiring.branch_scale, size)

    @staticmethod
    def _factor(factor: float | Learned, hidden_size: int) -> float | nn.Parameter:
        if not isinstance(factor, Learned):
            return factor
        parameter = nn.Parameter(torch.full((hidden_size if factor.per_feature else 1,), factor.init))
        parameter.start_value = factor.init
        return parameter

    def reset_factors(self) -> None:
        """Trained factors at their start; for a model's initialization."""
        for factor in (self.residual_scale, self.branch_scale):
            if isinstance(factor, nn.Parameter):
                factor.fill_(factor.start_value)

    def before(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """c*N_pre(x), what the sub-layer f reads."""
        h = _normed(self.pre_norm, x, real)
        return h if self.pre_scale == 1.0 else h * self.pre_scale

    def after(self, h: Tensor, real: Tensor | None = None) -> Tensor:
        """N_post(h) of what f gave."""
        return _normed(self.post_norm, h, real)

    def forward(
        self, x: Tensor, branch: Tensor, lent: tuple[Any, Any] = (None, None), real: Tensor | None = None
    ) -> tuple[Tensor, tuple[Any, Any]]:
        """N_out(r*x + s*branch), and (r, s). x, branch: (B, S, D); `lent` takes the place of factors that are None."""
        r = lent[0] if self.residual_scale is None else self.residual_scale
        s = lent[1] if self.branch_scale is None else self.branch_scale
        return _normed(self.out_norm, _times(x, r) + _times(branch, s), real), (r, s)


def wired(
    layer: int, method: NormMethod, shape: ModelShape, eps: float, own: Callable[[int, float], nn.Module]
) -> tuple[Residual, Residual]:
    """The residuals of attention and feed-forward of block `layer` (from 1), as the method has them.

    `own(hidden_size, eps)` makes the model's own norm, for methods that name no other one.
    """
    norm = norm_maker(method, shape, eps, own)
    found = method.residuals(layer, shape, norm)
    return residual_pair(method.wiring(layer, shape), shape.hidden_size, norm) if found is None else found


def norm_maker(
    method: NormMethod, shape: ModelShape, eps: float, own: Callable[[int, float], nn.Module]
) -> Callable[[], nn.Module]:
    """What makes a norm of the stream's width, as `wired` says."""
    return lambda: method.block_norm(shape.hidden_size, eps) or own(shape.hidden_size, eps)


def residual_pair(
    wiring: Wiring, size: int, norm: Callable[[], nn.Module], kind: type[Residual] = Residual
) -> tuple[Residual, Residual]:
    """The residuals of a block's two sub-layers, with factors that both share registered in the first alone."""
    attention, mlp = (kind(size, wiring, norm) for _ in range(2))
    for factor in ("residual_scale", "branch_scale"):
        if isinstance(getattr(wiring, factor), Learned) and getattr(wiring, factor).shared:
            # Registered once only, so that a saved model holds one copy.
            setattr(mlp, factor, None)
    return attention, mlp


def _normed(norm: nn.Module | None, x: Tensor, real: Tensor | None) -> Tensor:
    if norm is None:
        return x
    return norm(x) if real is None else norm(x, real)


def _times(x: Tensor, factor: float | Tensor) -> Tensor:
    return x if isinstance(factor, float) and factor == 1.0 else x * factor


class DecoderLayer(GradientCheckpointingLayer):
    """One block: attention, then feed-forward, each wired by the normalization method.

    `layer` is the block's number at training time, from 1; it survives the deletion of other blocks. `index` is its
    place in this model, from 0.
    """

    def __init__(self, config: PaperLlamaConfig, index: int) -> None:
        super().__init__()
        method, shape = config.method(), config.shape()
        self.layer = layer = config.numbers()[index]
        self.attention = Attention(config, index)
        self.mlp = GatedMLP(config)
        self.attention_residual, self.mlp_residual = wired(layer, method, shape, config.rms_norm_eps, RMSNorm)
        for tensor in ("q", "k", "v", "o"):
            getattr(self.attention, f"{tensor}_proj").init_std = method.init_std(tensor, layer, shape)
        for tensor in ("gate", "up", "down"):
            getattr(self.mlp, f"{tensor}_proj").init_std = method.init_std(tensor, layer, shape)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        past_key_values: Any = None,
        real: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The stream x (B, S, D) after the block. `real`: see Residual; the rest is attention's."""
        h = self.attention_residual.before(x, real)
        h, _ = self.attention(h, cos, sin, mask, past_key_values, **kwargs)
        x, factors = self.attention_residual(x, self.attention_residual.after(h, real), real=real)
        h = self.mlp_residual.after(self.mlp(self.mlp_residual.before(x, real)), real)
        return self.mlp_residual(x, h, factors, real)[0]
