"""`rmsnorm_quantize`, the integers of a linear layer's input; `rmsnorm_fake_quantize`, their values for training."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from paperlm_kernels.backends import chosen_backend
from paperlm_kernels.rmsnorm_quantize import reference
from paperlm_kernels.rmsnorm_quantize.modes import Mode, kept, mode_of

ALIGNED = 128


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized input: a token is about codes * scale."""

    codes: Tensor
    "int8 (..., D padded to 128), zeros behind"
    scale: Tensor
    "float32 (...)"
    rowsum: Tensor
    "int32 (...): the sum of a token's codes"
    stream: Tensor | None = None
    "(..., D): x + residual, where there was one"
    places: Tensor | None = None
    "int32 (..., D padded to 128): where a token's codes are not 0, ascending; undefined beyond its count"
    counts: Tensor | None = None
    "int32 (...): how many are not 0"


def rmsnorm_quantize(
    x: Tensor,
    gain: Tensor | None,
    mode: str = "int8_absmax",
    *,
    eps: float = 1e-5,
    multiple: float = 1,
    keep: float | None = None,
    residual: Tensor | None = None,
    up: Tensor | None = None,
    compact: bool = False,
    backend: str = "auto",
) -> Quantized:
    """Quantizes each token of RMSNorm(x), one read of x and one write.

    Args:
        x: (..., D) floating point; with `up`, the gate of a feed-forward layer.
        gain: (D,) of the norm, or None: no norm, x is quantized as it is.
        mode: "int8_absmax", "int4_absmean", "int4_absmax", "fp4_e2m1" (twice its values are the codes) or "fp4_e1m2".
        eps: of the norm.
        multiple: 1 or 2, what the mean of int4_absmean is multiplied by.
        keep: TopK behind the norm: the share of entries of largest magnitude that stay, exactly; the others are 0.
        residual: like x, added first. The sum is rounded to x's dtype, returned as `stream`, and normalized.
        up: like x: what is normalized is up * relu(x)^2.
        compact: also the places of the codes that are not 0, for `sparse_columns_linear`.
        backend: "triton", "reference" or "auto".

    Returns:
        Quantized. A token with a value that is not finite has codes of 0 and the scale NaN.

    Raises:
        TypeError, ValueError: tensors or options that do not fit; the message names the fix.

    Source: BitNet a4.8, arXiv 2411.04965, section 3.1. No gradient; for training, `rmsnorm_fake_quantize`.
    """
    chosen, k = _checked(x, gain, mode, multiple, keep, residual, up, eps)
    padding = -x.shape[-1] % ALIGNED
    lead = x.shape[:-1]
    with torch.no_grad():
        if chosen_backend(backend, x, x.dtype) == "triton":
            from paperlm_kernels.rmsnorm_quantize.ops import quantize_op

            r = _rows(x, up, gain, residual, eps)
            found = quantize_op(r.x, r.up, r.gain, r.residual, float(eps), mode, float(multiple), k, compact)
            asked = (True, True, True, residual is not None, compact, compact)
            return Quantized(
                *(t.view(*lead, *t.shape[1:]) if wanted else None for t, wanted in zip(found, asked, strict=True))
            )
        stream = None if residual is None else (x.float() + residual.float()).to(x.dtype)
        z = x if stream is None else stream
        y = reference.rms_norm(z if up is None else reference.squared_relu_glu(z, up), gain, eps)
        values, scale = reference.quantize_rows(reference.keep_largest(y, k), chosen, multiple)
        codes = F.pad(values.to(torch.int8), (0, padding))
        places = counts = None
        if compact:
            active = codes != 0
            counts = active.sum(-1, dtype=torch.int32)
            places = (~active).to(torch.int8).sort(dim=-1, stable=True).indices.to(torch.int32)
        return Quantized(codes, scale, codes.sum(-1, dtype=torch.int32), stream, places, counts)


def rmsnorm_fake_quantize(
    x: Tensor,
    gain: Tensor | None,
    mode: str = "int8_absmax",
    *,
    eps: float = 1e-5,
    multiple: float = 1,
    keep: float | None = None,
    residual: Tensor | None = None,
    up: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The dequantized values that `rmsnorm_quantize` stands for, in x's dtype, and the stream (None without residual).

    Arguments and errors are those of `rmsnorm_quantize`. Differentiable once: the quantizer and TopK are passed
    straight through, without clipping or masking any gradient (section 3.1); the norm, the gate and the sum are
    differentiated as they are. Between the passes the kernels keep x (or the stream; or gate and up) and a number a
    token.
    """
    chosen, k = _checked(x, gain, mode, multiple, keep, residual, up, eps)
    if chosen_backend(backend, x, x.dtype) == "triton":
        from paperlm_kernels.rmsnorm_quantize.ops import fake_quantize

        values, stream, _, _ = fake_quantize(_rows(x, up, gain, residual, eps), mode, float(multiple), k)
        return values.view(x.shape), None if stream is None else stream.view(x.shape)
    stream = None if residual is None else (x.float() + residual.float()).to(x.dtype)
    z = x if stream is None else stream
    return reference.fake_quantize_reference(z, up, gain, eps, chosen, multiple, k), stream


def rmsnorm_training_input(
    x: Tensor,
    gain: Tensor,
    mode: str = "int8_absmax",
    *,
    eps: float = 1e-5,
    multiple: float = 1,
    keep: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """What a quantized projection reads in training: values (..., D) as `rmsnorm_fake_quantize` has them, with its
    gradient; and without one what they stand for, codes int8 (..., D) and the step of each token, float32 (..., 1).

    One read of x and one write of each. Arguments and errors are those of `rmsnorm_quantize`.
    """
    chosen, k = _checked(x, gain, mode, multiple, keep, None, None, eps)
    if chosen_backend(backend, x, x.dtype) == "triton":
        from paperlm_kernels.rmsnorm_quantize.ops import fake_quantize

        values, _, codes, scale = fake_quantize(_rows(x, None, gain, None, eps), mode, float(multiple), k, codes=True)
        codes = codes[:, : x.shape[-1]].reshape(x.shape)
        return values.view(x.shape), codes, scale.view(*x.shape[:-1], 1)
    values = reference.fake_quantize_reference(x, None, gain, eps, chosen, multiple, k)
    with torch.no_grad():
        y = reference.rms_norm(x, gain, eps)
        codes, scale = reference.quantize_rows(reference.keep_largest(y, k), chosen, multiple)
    return values, codes.to(torch.int8), scale[..., None]


def _rows(x: Tensor, up: Tensor | None, gain: Tensor | None, residual: Tensor | None, eps: float):
    """As matrices whose rows are contiguous."""
    from paperlm_kernels.rmsnorm_quantize.launch import WIDEST, Rows

    if x.shape[-1] > WIDEST:
        raise ValueError(f"rows of {x.shape[-1]}; the kernels take up to {WIDEST}: use backend='reference'")

    def flat(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        t = t.reshape(-1, t.shape[-1])
        return t if t.stride(-1) == 1 else t.contiguous()

    return Rows(flat(x), flat(up), None if gain is None else gain.contiguous(), flat(residual), eps)


def _checked(
    x: Tensor, gain: Tensor | None, mode: str, multiple: float, keep: float | None, residual: Tensor | None,
    up: Tensor | None, eps: float,
) -> tuple[Mode, int]:  # fmt: skip
    chosen = mode_of(mode, multiple)
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps={eps}; what is added to the mean of squares is 0 or above, such as 1e-5")
    if x.ndim < 1 or x.shape[-1] < 1 or not x.is_floating_point():
        raise TypeError(f"x of shape {tuple(x.shape)} and {x.dtype}; give floating-point rows (..., D)")
    for name, other, right in (("gain", gain, x.shape[-1:]), ("residual", residual, x.shape), ("up", up, x.shape)):
        if other is not None and other.shape != right:
            raise ValueError(f"{name} of shape {tuple(other.shape)} for x of shape {tuple(x.shape)}; it is "
                             f"{tuple(right)}")  # fmt: skip
        if other is not None and other.device != x.device:
            raise ValueError(f"{name} is on {other.device} and x on {x.device}; move it")
    for name, other in (("residual", residual), ("up", up)):
        if other is not None and other.dtype != x.dtype:
            raise TypeError(f"{name} of {other.dtype} with x of {x.dtype}; give one dtype")
    if residual is not None and up is not None:
        raise ValueError("residual and up together; a stream is added before a norm, a gate behind one: give one")
    return chosen, kept(keep, x.shape[-1])
