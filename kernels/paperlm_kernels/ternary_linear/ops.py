"""The kernels as operators of `torch.library`: torch.compile passes through them, a CUDA graph captures them."""

from __future__ import annotations

import torch
from torch import Tensor

from paperlm_kernels.ternary_linear.launch import run_columns, run_linear, run_places, run_rows


@torch.library.custom_op("paperlm_kernels::ternary_linear", mutates_args=())
def linear_op(
    codes: Tensor, scale: Tensor, rowsum: Tensor, data: Tensor, alpha: Tensor, out_features: int, dtype: torch.dtype,
    behind_norm: bool = False,
) -> Tensor:  # fmt: skip
    """See `launch.run_linear`."""
    return run_linear(codes, scale, rowsum, data, alpha, out_features, dtype, behind_norm=behind_norm)


@torch.library.custom_op("paperlm_kernels::ternary_gated", mutates_args=())
def gated_op(
    codes: Tensor, scale: Tensor, rowsum: Tensor, data: Tensor, alpha: Tensor, rows: int, dtype: torch.dtype,
    behind_norm: bool = False,
) -> Tensor:  # fmt: skip
    """See `launch.run_linear`, gated; rows: of gate and up together."""
    return run_linear(codes, scale, rowsum, data, alpha, rows, dtype, gated=True, behind_norm=behind_norm)


@gated_op.register_fake
def _(codes, scale, rowsum, data, alpha, rows, dtype, behind_norm=False):
    return codes.new_empty((codes.shape[0], rows // 2), dtype=dtype)


@torch.library.custom_op("paperlm_kernels::ternary_linear_rows", mutates_args=())
def rows_op(
    codes: Tensor, scale: Tensor, rowsum: Tensor, data: Tensor, alpha: Tensor, out_features: int, dtype: torch.dtype,
    places: Tensor, counts: Tensor,
) -> Tensor:  # fmt: skip
    """See `launch.run_rows`."""
    return run_rows(codes, scale, rowsum, data, alpha, out_features, dtype, places, counts)


@torch.library.custom_op("paperlm_kernels::ternary_linear_columns", mutates_args=())
def columns_op(
    codes: Tensor, scale: Tensor, rowsum: Tensor, data: Tensor, alpha: Tensor, out_features: int, dtype: torch.dtype,
    places: Tensor, counts: Tensor,
) -> Tensor:  # fmt: skip
    """See `launch.run_columns`."""
    return run_columns(codes, scale, rowsum, data, alpha, out_features, dtype, places, counts)


@linear_op.register_fake
def _(codes, scale, rowsum, data, alpha, out_features, dtype, behind_norm=False):
    return codes.new_empty((codes.shape[0], out_features), dtype=dtype)


@rows_op.register_fake
@columns_op.register_fake
def _(codes, scale, rowsum, data, alpha, out_features, dtype, places, counts):
    return codes.new_empty((codes.shape[0], out_features), dtype=dtype)


@torch.library.custom_op("paperlm_kernels::places_above_zero", mutates_args=())
def places_op(gate: Tensor) -> tuple[Tensor, Tensor]:
    """See `launch.run_places`."""
    return run_places(gate)


@places_op.register_fake
def _(gate):
    return gate.new_empty(gate.shape, dtype=torch.int32), gate.new_empty(gate.shape[0], dtype=torch.int32)
