"""`ternary_linear`: quantized activations times packed ternary weights, and a layer that does both steps."""

from __future__ import annotations

import torch
from torch import Tensor

from paperlm_kernels.ternary_linear.packing import PackedTernary, padded
from paperlm_kernels.ternary_linear.reference import ternary_linear_reference

BACKENDS = ("auto", "triton", "reference")


def ternary_linear(
    codes: Tensor,
    act_scale: Tensor,
    rowsum: Tensor | None,
    packed: PackedTernary,
    alpha: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """y = (sum_k (t + 1) x - sum_k x) * act_scale * alpha: the product of dequantized activations and weights.

    Args:
        codes: int8 (..., K), or (..., K padded to 128) with zeros behind: the activations' integers.
        act_scale: float32 (...): what one step of a token's codes is worth.
        rowsum: int32 (...): the sum of a token's codes; None computes it.
        packed: the weights, (N, K).
        alpha: float32 (N,), one for each row of the weights (`fused_alpha` for matrices in one), or of no axes.
        out_dtype: of y.
        backend: "triton", "reference", or "auto": Triton on GPUs, the reference elsewhere.

    Returns:
        y (..., N). The integers are exact, so that every backend gives the same float32 product before its last
        rounding.

    Raises:
        TypeError, ValueError: tensors that do not fit; the message names the fix.

    Source: BitNet a4.8, arXiv 2411.04965, section 3.1. No gradient: for use after training.
    """
    if not isinstance(packed, PackedTernary):
        raise TypeError(f"packed is a {type(packed).__name__}; pack_ternary or PackedTernary.load makes one")
    N, K = packed.out_features, packed.in_features
    if codes.dtype != torch.int8:
        raise TypeError(f"codes of {codes.dtype}; quantize the activations to int8 first, with quantize")
    if codes.ndim < 1 or codes.shape[-1] not in (K, padded(K)):
        raise ValueError(f"codes of shape {tuple(codes.shape)} for weights of {N} x {K}; their last axis is {K}, or "
                         f"{padded(K)} with its padding")  # fmt: skip
    if alpha is None:
        raise ValueError("no alpha: ternary weights have a scale for each matrix, mean|W| of its latent weight")
    shape = codes.shape[:-1]
    act_scale = _per_token("act_scale", act_scale, torch.float32, shape)
    rowsum = codes.sum(-1, dtype=torch.int32) if rowsum is None else rowsum
    rowsum = _per_token("rowsum", rowsum, torch.int32, shape)
    if alpha.dtype != torch.float32:
        raise TypeError(f"alpha of {alpha.dtype}; scales are float32: alpha.float()")
    if alpha.ndim > 1 or alpha.shape[-1:] not in ((), (N,)):
        raise ValueError(f"alpha of shape {tuple(alpha.shape)} for {N} rows of weights; give one for each row, with "
                         "fused_alpha(alphas, rows) where several matrices lie in one")  # fmt: skip
    devices = {str(t.device) for t in (codes, act_scale, rowsum, packed.data, alpha)}
    if len(devices) > 1:
        raise ValueError(f"tensors on {', '.join(sorted(devices))}; move them to one device")
    flat = codes.reshape(-1, codes.shape[-1])
    vectors = (act_scale.reshape(-1), rowsum.reshape(-1))
    y = ternary_linear_reference(flat[:, :K], *vectors, packed, alpha.expand(N), out_dtype)
    return y.view(*shape, N)


def _per_token(name: str, values: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if values.dtype != dtype:
        raise TypeError(f"{name} of {values.dtype}; it is {dtype}")
    if values.shape != shape:
        raise ValueError(f"{name} of shape {tuple(values.shape)}; one number for each token, {tuple(shape)}")
    return values
