"""RMSNorm, TopK and a quantizer in plain PyTorch: the meaning of the fused kernels, and what a CPU runs."""

from __future__ import annotations

import torch
from torch import Tensor

from paperlm_kernels.rmsnorm_quantize.modes import EPS, Mode


def quantize_rows(y: Tensor, mode: Mode, multiple: float = 1.0) -> tuple[Tensor, Tensor]:
    """Codes (float32, whole numbers) of the shape of y (..., D), and scale float32 (...): y is about codes * scale.

    In float32, half to even. A row whose mean or largest magnitude is not finite has codes of 0 and the scale NaN.
    """
    y = y.float()
    magnitude = y.abs()
    # tensors, for by a number PyTorch does not divide on a GPU: it multiplies by the reciprocal
    width, levels = (y.new_full((), number) for number in (y.shape[-1], mode.levels))
    statistic = multiple * (magnitude.sum(-1) / width) if mode.mean else magnitude.amax(-1)
    finite = statistic < torch.inf
    statistic = statistic.clamp(min=EPS)
    v = (y * (mode.levels * statistic.reciprocal())[..., None]).clamp(mode.low, mode.high)
    if mode.e2m1:
        step = torch.where(v.abs() < 4, 1.0, torch.where(v.abs() < 8, 2.0, 4.0))
        v = (v / step).round() * step
    codes = torch.where(finite[..., None], v.round(), 0.0)
    return codes, torch.where(finite, statistic / levels, torch.nan)


def keep_largest(y: Tensor, k: int) -> Tensor:
    """y with zeros but at the k entries of largest magnitude of each row; of equals, those that come first."""
    if k >= y.shape[-1]:
        return y
    magnitude = y.abs()
    # no sort, which takes three times as long. What is not at most the k-th largest is above it, or not a number: a row
    # that has one keeps it, by which its scale becomes NaN
    least = magnitude.topk(k, -1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = ~(magnitude <= least), magnitude == least
    return torch.where(above | equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)), y, 0.0)


def squared_relu_glu(gate: Tensor, up: Tensor) -> Tensor:
    """up * relu(gate)^2 in float32."""
    return up.float() * gate.float().relu().square()


def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain in float32; without a gain x itself."""
    x = x.float()
    return x if gain is None else x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gain.float()


class _Through(torch.autograd.Function):
    """The quantized values forward, the gradient of what they came from backward: nothing is clipped or masked."""

    @staticmethod
    def forward(ctx, y, quantized):
        return quantized

    @staticmethod
    def backward(ctx, incoming):
        return incoming, None


def fake_quantize_reference(
    x: Tensor, up: Tensor | None, gain: Tensor | None, eps: float, mode: Mode, multiple: float, k: int
) -> Tensor:
    """Dequantized values in x's dtype, differentiable."""
    y = rms_norm(x if up is None else squared_relu_glu(x, up), gain, eps)
    codes, scale = quantize_rows(keep_largest(y.detach(), k), mode, multiple)
    return _Through.apply(y, codes * scale[..., None]).to(x.dtype)
