"""The differentiable function over the kernels."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from paperlm_kernels.once import differentiable_once
from paperlm_kernels.rmsnorm_quantize.launch import Rows, run_backward, run_forward
from paperlm_kernels.rmsnorm_quantize.modes import Mode


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, up, gain, residual, eps, mode, multiple, k):
        out = run_forward(Rows(x, up, gain, residual, eps), mode, multiple, k, codes=False, compact=False)
        stream = out["stream"]
        ctx.save_for_backward(x if stream is None else stream, up, gain, out["rstds"])
        ctx.has_residual = residual is not None
        return out["values"], stream

    @staticmethod
    @differentiable_once("rmsnorm_fake_quantize", "use backend='reference'")
    def backward(ctx, d_values, d_stream):
        x, up, gain, rstds = ctx.saved_tensors
        d_stream = d_stream.contiguous() if ctx.has_residual and d_stream is not None else None
        d_x, d_up, d_gain = run_backward(Rows(x, up, gain, None, 0.0), rstds, d_values.contiguous(), d_stream)
        return d_x, d_up, d_gain, d_x if ctx.has_residual else None, None, None, None, None


def fake_quantize(rows: Rows, mode: Mode, multiple: float, k: int) -> tuple[Tensor, Tensor | None]:
    """Dequantized rows (M, D) and the stream (None without a residual); differentiable once in the tensors of rows."""
    tensors = (getattr(rows, field.name) for field in dataclasses.fields(rows))
    return _FakeQuantize.apply(*tensors, mode, multiple, k)
