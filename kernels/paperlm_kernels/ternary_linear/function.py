"""`ternary_linear`: quantized activations times packed ternary weights; two forms of it for inputs with many zeros.

These three give the same numbers. What they differ in is which bytes of the weights are read. `ternary_gated` is the
product with a gate and an up projection at once, and what becomes of the two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paperlm_kernels.backends import chosen_backend
from paperlm_kernels.ternary_linear.packing import PackedTernary, padded
from paperlm_kernels.ternary_linear.reference import (
    ternary_gated_reference,
    ternary_linear_reference,
    transposed_codes,
)


def ternary_linear(
    codes: Tensor,
    act_scale: Tensor,
    rowsum: Tensor | None,
    packed: PackedTernary,
    alpha: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    behind_norm: bool = False,
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
        behind_norm: what runs in front leaves the memory idle, as `rmsnorm_quantize` of a token does: on Hopper the
            product of one token asks for its weights meanwhile. Changes no number, and takes longer where another
            product runs in front.
        backend: "triton", "reference" or "auto".

    Returns:
        y (..., N). The integers are exact, so that every backend gives the same float32 product before its last
        rounding.

    Raises:
        TypeError, ValueError: tensors that do not fit; the message names the fix.

    Source: BitNet a4.8, arXiv 2411.04965, section 3.1. No gradient: for use after training.
    """
    _check_packed(packed, out_dtype)
    K, N = packed.in_features, packed.out_features
    flat, vectors, lead = _checked(codes, act_scale, rowsum, alpha, packed, K, N)
    if chosen_backend(backend, codes, out_dtype) == "triton":
        from paperlm_kernels.ternary_linear.ops import linear_op

        y = linear_op(_whole(flat, K), *vectors[:2], packed.data, vectors[2], N, out_dtype, behind_norm)
    else:
        y = ternary_linear_reference(flat, *vectors[:2], packed, vectors[2], out_dtype)
    return y.view(*lead, N)


def ternary_gated(
    codes: Tensor,
    act_scale: Tensor,
    rowsum: Tensor | None,
    packed: PackedTernary,
    alpha: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    behind_norm: bool = False,
    backend: str = "auto",
) -> Tensor:
    """z = up * relu(gate)^2, (..., N / 2), of the products with two matrices that lie one below the other in `packed`:
    the gate's N / 2 rows, then up's, as `pack_weights([gate, up])` has them. A program has both, and writes z alone.

    Arguments are those of `ternary_linear`. Gate and up are in float32, z is rounded once. Raises ValueError for an odd
    number of rows, and what `ternary_linear` raises. Source: BitNet a4.8, arXiv 2411.04965, section 2.1.
    """
    _check_packed(packed, out_dtype)
    K, N = packed.in_features, packed.out_features
    if N % 2:
        raise ValueError(f"{N} rows of weights; a gate and an up projection have as many each, one below the other")
    flat, vectors, lead = _checked(codes, act_scale, rowsum, alpha, packed, K, N)
    if chosen_backend(backend, codes, out_dtype) == "triton":
        from paperlm_kernels.ternary_linear.ops import gated_op

        z = gated_op(_whole(flat, K), *vectors[:2], packed.data, vectors[2], N, out_dtype, behind_norm)
    else:
        z = ternary_gated_reference(flat, *vectors[:2], packed, vectors[2], out_dtype)
    return z.view(*lead, N // 2)


def sparse_rows_linear(
    codes: Tensor,
    act_scale: Tensor,
    rowsum: Tensor | None,
    packed: PackedTernary,
    alpha: Tensor,
    places: Tensor,
    counts: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """`ternary_linear` in a token's listed rows of the weights, 0 elsewhere: an up projection behind its gate.

    places int32 (..., at most N) and counts int32 (...) are each token's list, as `places_above_zero(gate)` gives it;
    the rest is as in `ternary_linear`. For a few tokens: each reads its own rows.
    """
    _check_packed(packed, out_dtype)
    K, N = packed.in_features, packed.out_features
    flat, vectors, lead = _checked(codes, act_scale, rowsum, alpha, packed, K, N)
    lists = _lists(places, counts, lead)
    if chosen_backend(backend, codes, out_dtype) == "triton":
        from paperlm_kernels.ternary_linear.ops import rows_op

        y = rows_op(_whole(flat, K), *vectors[:2], packed.data, vectors[2], N, out_dtype, *lists)
    else:
        y = ternary_linear_reference(flat, *vectors[:2], packed, vectors[2], out_dtype)
        y = torch.where(_listed(*lists, N), y, 0)
    return y.view(*lead, N)


def sparse_columns_linear(
    codes: Tensor,
    act_scale: Tensor,
    rowsum: Tensor | None,
    packed: PackedTernary,
    alpha: Tensor,
    places: Tensor,
    counts: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """`ternary_linear` from the listed activations of a token, the others being 0: an output or a down projection.

    packed is a second copy of the weights, `pack_ternary(t.T)`, (K, N): a listed activation reads one row of it. places
    int32 (..., at most K padded) and counts int32 (...) are those of `rmsnorm_quantize(..., compact=True)`; the rest is
    as in `ternary_linear`. For a few tokens: each reads its own rows.
    """
    _check_packed(packed, out_dtype)
    K, N = packed.out_features, packed.in_features
    flat, vectors, lead = _checked(codes, act_scale, rowsum, alpha, packed, K, N)
    lists = _lists(places, counts, lead)
    if chosen_backend(backend, codes, out_dtype) == "triton":
        from paperlm_kernels.ternary_linear.ops import columns_op

        y = columns_op(flat, *vectors[:2], packed.data, vectors[2], N, out_dtype, *lists)
    else:
        x = torch.where(_listed(*lists, flat.shape[1]), flat, 0)
        y = ternary_linear_reference(x, *vectors[:2], transposed_codes(packed), vectors[2], out_dtype)
    return y.view(*lead, N)


def places_above_zero(gate: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Where each row of gate (..., N) is above 0, ascending, int32 (..., N) and undefined behind; and how often."""
    if chosen_backend(backend, gate, torch.int32) == "triton":
        from paperlm_kernels.ternary_linear.ops import places_op

        flat = gate.reshape(-1, gate.shape[-1])
        places, counts = places_op(flat if flat.stride(-1) == 1 else flat.contiguous())
        return places.view(gate.shape), counts.view(gate.shape[:-1])
    above = gate > 0
    places = (~above).to(torch.int8).sort(dim=-1, stable=True).indices
    return places.to(torch.int32), above.sum(-1, dtype=torch.int32)


def _listed(places: Tensor, counts: Tensor, size: int) -> Tensor:
    """True where a list says so, (M, size)."""
    counted = torch.arange(places.shape[1], device=places.device) < counts[:, None]
    aside = torch.where(counted, places.long(), size)
    return torch.zeros(len(places), size + 1, dtype=torch.bool, device=places.device).scatter(1, aside, True)[:, :size]


def _lists(places: Tensor, counts: Tensor, lead: torch.Size) -> tuple[Tensor, Tensor]:
    if places.dtype != torch.int32 or counts.dtype != torch.int32:
        raise TypeError(f"places of {places.dtype} and counts of {counts.dtype}; both are int32")
    if places.shape[:-1] != lead or counts.shape != lead:
        raise ValueError(f"places of shape {tuple(places.shape)} and counts of {tuple(counts.shape)} for tokens "
                         f"{tuple(lead)}; a list and a number for each token")  # fmt: skip
    return places.reshape(-1, places.shape[-1]).contiguous(), counts.reshape(-1).contiguous()


def _check_packed(packed: PackedTernary, out_dtype: torch.dtype) -> None:
    if not out_dtype.is_floating_point:
        raise TypeError(f"out_dtype={out_dtype}; y is a floating-point number: torch.bfloat16, float16 or float32")
    if not isinstance(packed, PackedTernary):
        raise TypeError(f"packed is a {type(packed).__name__}; pack_ternary or PackedTernary.load makes one")


def _whole(flat: Tensor, K: int) -> Tensor:
    """Codes (M, padded K) that can be read in words."""
    missing = padded(K) - flat.shape[1]
    return (F.pad(flat, (0, missing)) if missing else flat).contiguous()  # a pad of nothing would be a copy


def _checked(
    codes: Tensor, act_scale: Tensor, rowsum: Tensor | None, alpha: Tensor, packed: PackedTernary, K: int, N: int
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], torch.Size]:
    """Codes (M, K), scale (M,), rowsum (M,) and alpha (N,), and the tokens' axes."""
    if alpha is None:
        raise ValueError("no alpha: ternary weights have a scale for each matrix, mean|W| of its latent weight")
    if act_scale is None:
        raise ValueError("no act_scale: codes have a step for each token; rmsnorm_quantize gives both")
    for name, value in (("codes", codes), ("act_scale", act_scale), ("rowsum", rowsum), ("alpha", alpha)):
        if not isinstance(value, Tensor) and not (name == "rowsum" and value is None):
            raise TypeError(f"{name} is a {type(value).__name__}; give a tensor: torch.tensor({name})")
    if codes.dtype != torch.int8:
        raise TypeError(f"codes of {codes.dtype}; quantize the activations to int8 first, with rmsnorm_quantize")
    if codes.ndim < 1 or codes.shape[-1] not in (K, padded(K)):
        raise ValueError(f"codes of shape {tuple(codes.shape)} for weights of {N} x {K}; their last axis is {K}, or "
                         f"{padded(K)} with its padding")  # fmt: skip
    lead = codes.shape[:-1]
    rowsum = codes.sum(-1, dtype=torch.int32) if rowsum is None else rowsum
    for name, values, dtype in (("act_scale", act_scale, torch.float32), ("rowsum", rowsum, torch.int32)):
        if values.dtype != dtype:
            raise TypeError(f"{name} of {values.dtype}; it is {dtype}")
        if values.shape != lead:
            raise ValueError(f"{name} of shape {tuple(values.shape)}; one number for each token, {tuple(lead)}")
    if alpha.dtype != torch.float32:
        raise TypeError(f"alpha of {alpha.dtype}; scales are float32: alpha.float()")
    if alpha.ndim > 1 or alpha.shape[-1:] not in ((), (N,)):
        raise ValueError(f"alpha of shape {tuple(alpha.shape)} for {N} rows of weights; give one for each row, with "
                         "fused_alpha(alphas, rows) where several matrices lie in one")  # fmt: skip
    devices = {str(t.device) for t in (codes, act_scale, rowsum, packed.data, alpha)}
    if len(devices) > 1:
        raise ValueError(f"tensors on {', '.join(sorted(devices))}; move them to one device")
    vectors = (act_scale.reshape(-1).contiguous(), rowsum.reshape(-1).contiguous(), alpha.expand(N).contiguous())
    return codes.reshape(-1, codes.shape[-1]), vectors, lead
