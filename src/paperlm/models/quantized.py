"""Quantized projections of the decoder, in training and after it.

    y = (codes t^T) * step * alpha        codes, step: of the input, by token;  t, alpha: of the weight, by matrix

The product is one of whole numbers, exact in float32 in any order of its sums: training, evaluation and packed weights
(paperlm.models.packed) agree to the last bit. In bfloat16 the factors are exact, and the product of the latent weights
is rounded once more, before it is scaled; packed weights have it whole.
Gradients are those of the plain product of the dequantized factors, x_q W_q^T, and pass the quantizers, their clipping
and TopK's mask as if these were not there (BitNet a4.8, Section 2.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from paperlm_kernels.backends import without_autocast
from paperlm_kernels.rmsnorm_quantize import rmsnorm_training_input
from torch import Tensor, nn

from paperlm.errors import SpecError
from paperlm.quantizers import Quantizer
from paperlm.quantizers.base import in_dtype
from paperlm.quantizers.scheme import InputQuantizer, KVCache, Quantization
from paperlm.quantizers.topk import largest_entries


class QuantizedInput(nn.Module):
    """What enters projections: forward(x) -> x_q in x's dtype, its codes as floating-point numbers, both (..., N), and
    the step of each token (..., 1). A forward hook sees them; x_q = step * codes carries the gradient.

    With the gain and eps of an RMSNorm, x is what that norm reads: norm and quantizer are one pass (`fuse_norms`).
    """

    def __init__(self, described: InputQuantizer, width: int, place: str) -> None:
        super().__init__()
        self.quantizer, self.kept = described.quantizer, described.kept(width, f"quantization.{place}")
        self.keep, self.fused = described.keep, False

    def forward(self, x: Tensor, gain: Tensor | None = None, eps: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        if gain is None:
            return _QuantizeInput.apply(x, self.quantizer, self.kept)
        multiple = getattr(self.quantizer, "multiple", 1)
        return rmsnorm_training_input(x, gain, self.quantizer.name, eps=eps, multiple=multiple, keep=self.keep)

    def extra_repr(self) -> str:
        return f"{self.quantizer.name}, kept={self.kept}"


def fuse_norms(model: nn.Module, on: bool = True) -> int:
    """Lets SubLN's norms and the quantizers behind them be one pass, in training and after it; how many there are.

    Off unless this is called. In float32 the numbers are the unfused ones up to the order of a row's sums, and a code
    next to a tie. In bfloat16 they are nearer to the definition: between norm and quantizer nothing is rounded.
    """
    found = 0
    for module in model.modules():
        behind = getattr(module, "o_input", None) or getattr(module, "down_input", None)
        if behind is not None and module.sub_norm is not None:
            behind.fused = on
            found += 1
    return found


class QuantizedLinear(nn.Linear):
    """A projection without bias whose latent weight is quantized anew at each call; None: its weight is as it is.

    Raises SpecError where only a part of a quantized matrix is here: its statistic would be another.
    """

    def __init__(self, in_features: int, out_features: int, quantizer: Quantizer | None) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.quantizer = quantizer

    def forward(self, x: Tensor, codes: Tensor | None = None, step: Tensor | None = None) -> Tensor:
        """x (..., in) -> (..., out); codes and step where x is quantized, as QuantizedInput gives them."""
        if self.quantizer is None:
            return F.linear(x, self.weight)
        return _QuantizedProduct.apply(x, self.whole_weight(), codes, step, self.quantizer)

    def whole_weight(self) -> Tensor:
        """The latent weight (out, in), to be quantized. Raises SpecError where only a part of the matrix is here."""
        if self.weight.shape == (self.out_features, self.in_features) and not hasattr(self.weight, "full_tensor"):
            return self.weight
        here = "a shard" if hasattr(self.weight, "full_tensor") else str(tuple(self.weight.shape))
        raise SpecError(
            f"a weight of {self.out_features} x {self.in_features} of which {here} is here: the scale of "
            f"{self.quantizer.name} is that of the whole matrix, so that tensor parallelism would change it; use data "
            "parallelism, which keeps or gathers whole weights, and gather them before they are packed or decoded with"
        )


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that products of x are in: autocast's, where it is on."""
    device = x.device.type
    # torch.amp.is_autocast_available would say the first, but breaks the graph of torch.compile up to 2.11
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else x.dtype


def quantized_input(scheme: Quantization | None, place: str, width: int) -> QuantizedInput | None:
    """The quantizer at `place` (qkv, o, gate_up, down), whose input has so many features; None where there is none."""
    described = None if scheme is None else getattr(scheme, place)
    return None if described is None else QuantizedInput(described, width, place)


class QuantizedHeads(nn.Module):
    """Queries, keys and values in few bits, behind the rotary embedding: what a quantized cache would hold.

    Their values are rounded and stay in the model's dtype, so that every attention and every cache of transformers can
    be used; the room of a cache stays that of the dtype. Gradients pass as elsewhere. (BitNet a4.8, Section 3.3)
    """

    def __init__(self, described: KVCache) -> None:
        super().__init__()
        self.q, self.kv, self.first = described.q, described.kv, described.first

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (B, H, S, D/H) -> the same, rounded. sin: that of the positions' angles, which is 0 at position 0
        alone, where `first` stands in for `kv`."""
        if self.q is not None:
            q = _Rounded.apply(q, self.q)
        first = None if self.first == self.kv else sin[..., :1] == 0
        return q, self._stored(k, first), self._stored(v, first)

    def _stored(self, x: Tensor, first: Tensor | None) -> Tensor:
        rounded = _Rounded.apply(x, self.kv)
        return rounded if first is None else torch.where(first, _Rounded.apply(x, self.first), rounded)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer) -> Tensor:
        return quantizer.values(x)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _QuantizeInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer, kept: int | None) -> tuple[Tensor, Tensor, Tensor]:
        codes, step = quantizer.codes_and_step(x if kept is None else x * largest_entries(x, kept))
        ctx.mark_non_differentiable(codes, step)
        return in_dtype(codes * step, x.dtype), codes, step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *others: Any) -> tuple[Tensor, None, None]:
        return gradient, None, None


class _QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, codes: Tensor | None, step: Tensor | None, quantizer: Quantizer
    ) -> Tensor:
        dtype = compute_dtype(x)
        with without_autocast(x.device.type):
            whole, alpha = quantizer.codes_and_step(weight)
            whole, x = whole.to(dtype), x.to(dtype)
            ctx.save_for_backward(x, whole, alpha)
            # float16 ends at 65,504, which 516 codes of 127 are beyond before they are scaled
            wide = torch.float32 if dtype == torch.float16 else dtype
            if codes is None:
                return in_dtype(F.linear(x.to(wide), whole.to(wide)) * alpha, dtype)
            return in_dtype(F.linear(codes.to(wide), whole.to(wide)) * step * alpha, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, whole, alpha = ctx.saved_tensors
        to_x = (gradient @ whole).mul_(alpha) if ctx.needs_input_grad[0] else None
        to_weight = gradient.flatten(0, -2).T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return to_x, to_weight, None, None, None
