"""Products with packed weights, for inference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paperlm_kernels.backends import chosen_backend
from paperlm_kernels.neuzip.header import Codec, Section
from paperlm_kernels.neuzip.record import Packed

TOKENS = 16
"Up to so many are multiplied without unpacking."


def linear(x: Tensor, packed: Packed, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """x W^T + b with W packed, (..., in) to (..., out), without a gradient.

    Up to 16 tokens with a matrix of the profile "fix4" without loss, and a multiple of 8 columns, are multiplied in one
    kernel that reads 12 bits a weight, sums in float32 in an order of its own, and rounds once: the result differs from
    F.linear's in the last bit of bfloat16. (A token that is not finite gives NaN where a weight is patched.) Everything
    else is unpacked first, and is F.linear of it.

    Args:
        x: bfloat16 (..., in), on the device of the weights.
        packed: a matrix (out, in).
        bias: (out,), added after the rounding.
        backend: "triton", "reference" or "auto".

    Raises:
        ValueError: shapes, dtypes or devices that do not belong together.
    """
    if len(packed.shape) != 2 or x.shape[-1:] != packed.shape[1:] or (x.dtype, x.device) != (
        packed.dtype, packed.device
    ):  # fmt: skip
        raise ValueError(
            f"x {tuple(x.shape)} of {x.dtype} on {x.device} times a matrix {tuple(packed.shape)} of {packed.dtype} on "
            f"{packed.device}; give (..., in) of the same dtype on the same device"
        )
    fused = chosen_backend(backend, x, torch.int32) == "triton" and _fits(x, packed)
    if not fused:
        return F.linear(x.detach(), packed.unpack(backend=backend), bias)
    y = _run(x.detach().reshape(-1, x.shape[-1]).contiguous(), packed).view(*x.shape[:-1], packed.shape[0])
    return y if bias is None else y + bias


def _fits(x: Tensor, packed: Packed) -> bool:
    header = packed.header
    tokens = x.numel() // max(1, x.shape[-1])
    return (
        header.codec == Codec.FIX4 and not header.lossy and x.shape[-1] % 8 == 0 and 0 < tokens <= TOKENS
    )  # fmt: skip


def _run(x: Tensor, packed: Packed) -> Tensor:
    import triton

    from paperlm_kernels.neuzip.kernel_product import fix4_product_kernel
    from paperlm_kernels.neuzip.launch import octets_of

    s, (rows, columns), tokens = packed.sections, packed.shape, len(x)
    if x.data_ptr() % 16:
        x = x.clone()
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    plane = s[Section.PLANE]
    some = 4 if tokens <= 8 else 2
    with torch.cuda.device_of(x):
        fix4_product_kernel[(triton.cdiv(rows, some),)](
            x.view(torch.int64), s[Section.PAYLOAD], octets_of(plane, 7), plane, s[Section.PATCH],
            s[Section.PATCH_DIR], y.view(torch.int16), tokens, rows, columns, packed.lowest,
            M=triton.next_power_of_2(tokens), ROWS=some, STEP=128, BLOCK=packed.header.geometry.block, PATCHES=32,
            num_warps=4,
        )  # fmt: skip
    return y
