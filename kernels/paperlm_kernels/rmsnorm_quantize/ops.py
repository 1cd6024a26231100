"""The kernels as operators of `torch.library`, and the differentiable function over them.

torch.compile passes through the operators, a CUDA graph captures them. What was not asked for is an empty tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paperlm_kernels.once import differentiable_once
from paperlm_kernels.rmsnorm_quantize.launch import ALIGNED, Rows, run_backward, run_forward
from paperlm_kernels.rmsnorm_quantize.modes import MODES

CODES = ("codes", "scale", "rowsum", "stream", "places", "counts")
VALUES = ("values", "rstds", "stream", "codes", "scale")


@torch.library.custom_op("paperlm_kernels::rmsnorm_quantize", mutates_args=())
def quantize_op(
    x: Tensor, up: Tensor | None, gain: Tensor | None, residual: Tensor | None, eps: float, mode: str, multiple: float,
    k: int, compact: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """CODES of rows (M, D)."""
    out = run_forward(
        Rows(x, up, gain, residual, eps), MODES[mode], multiple, k, codes=True, values=False, compact=compact
    )
    return tuple(x.new_empty(0) if out[name] is None else out[name] for name in CODES)


@quantize_op.register_fake
def _(x, up, gain, residual, eps, mode, multiple, k, compact):
    M, D = x.shape
    padded = -(-D // ALIGNED) * ALIGNED
    new = x.new_empty
    return (
        new(M, padded, dtype=torch.int8),
        new(M, dtype=torch.float32),
        new(M, dtype=torch.int32),
        new(0) if residual is None else new(M, D),
        new(M, padded, dtype=torch.int32) if compact else new(0),
        new(M, dtype=torch.int32) if compact else new(0),
    )


@torch.library.custom_op("paperlm_kernels::rmsnorm_fake_quantize", mutates_args=())
def fake_quantize_op(
    x: Tensor, up: Tensor | None, gain: Tensor | None, residual: Tensor | None, eps: float, mode: str, multiple: float,
    k: int, codes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """VALUES of rows (M, D); the last two where codes are asked for."""
    out = run_forward(
        Rows(x, up, gain, residual, eps), MODES[mode], multiple, k, codes=codes, values=True, compact=False
    )  # fmt: skip
    return tuple(x.new_empty(0) if out[name] is None else out[name] for name in VALUES)


@fake_quantize_op.register_fake
def _(x, up, gain, residual, eps, mode, multiple, k, codes):
    new, (M, D) = x.new_empty, x.shape
    return (
        new(M, D),
        new(M, dtype=torch.float32),
        new(0) if residual is None else new(M, D),
        new(M, -(-D // ALIGNED) * ALIGNED, dtype=torch.int8) if codes else new(0),
        new(M, dtype=torch.float32) if codes else new(0),
    )


@torch.library.custom_op("paperlm_kernels::rmsnorm_fake_quantize_backward", mutates_args=())
def backward_op(
    x: Tensor, up: Tensor | None, gain: Tensor | None, rstds: Tensor, d_values: Tensor, d_stream: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, up and the gain."""
    found = run_backward(Rows(x, up, gain, None, 0.0), rstds, d_values, d_stream)
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in found)


@backward_op.register_fake
def _(x, up, gain, rstds, d_values, d_stream):
    new = x.new_empty
    return new(x.shape), new(0) if up is None else new(x.shape), new(0) if gain is None else gain.new_empty(gain.shape)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, up, gain, residual, eps, mode, multiple, k, wanted):
        values, rstds, stream, codes, scale = fake_quantize_op(x, up, gain, residual, eps, mode, multiple, k, wanted)
        ctx.mark_non_differentiable(codes, scale)
        ctx.has_residual = residual is not None
        ctx.save_for_backward(stream if ctx.has_residual else x, up, gain, rstds)
        return values, stream if ctx.has_residual else None, codes, scale

    @staticmethod
    @differentiable_once("rmsnorm_fake_quantize", "use backend='reference'")
    def backward(ctx, d_values, d_stream, d_codes, d_scale):
        x, up, gain, rstds = ctx.saved_tensors
        d_stream = d_stream.contiguous() if ctx.has_residual else None
        d_x, d_up, d_gain = backward_op(x, up, gain, rstds, d_values.contiguous(), d_stream)
        d_up, d_gain = None if up is None else d_up, None if gain is None else d_gain
        return d_x, d_up, d_gain, d_x if ctx.has_residual else None, None, None, None, None, None


def fake_quantize(
    rows: Rows, mode: str, multiple: float, k: int, codes: bool = False
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Dequantized rows (M, D) and the stream (None without a residual); differentiable once in the tensors of rows.
    Then codes and scale, empty unless they are asked for."""
    return _FakeQuantize.apply(rows.x, rows.up, rows.gain, rows.residual, rows.eps, mode, multiple, k, codes)
