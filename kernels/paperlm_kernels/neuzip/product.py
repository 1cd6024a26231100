"""Products with packed weights, for inference."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from paperlm_kernels.backends import chosen_backend
from paperlm_kernels.neuzip.header import Codec, Section
from paperlm_kernels.neuzip.record import Packed
from paperlm_kernels.overlap import overlaps

if TYPE_CHECKING:
    from paperlm_kernels.neuzip.launcher import Launcher

TOKENS = 16
"Up to so many are multiplied without unpacking, with exponents in four bits;"
STREAM_TOKENS = 4
"and with prefix codes: with 8, to unpack first takes less time (201 us of 347, of 2^27 weights on an H200)."
REGISTERS = {1: 48, 2: 64, 4: 80}
"Tokens -> of a thread: with no limit the assembler sets one that is too low, and spills."
STEP = 1024
"Neighbouring weights that all lanes decode at once."
CHUNK = 128
"Neighbouring weights of a row that a warp multiplies at once, on tensor cores;"
TILE = 16
"of so many rows,"
MOST_COLUMNS = 2**26
"of fewer columns than that: places in a tile are numbers of 32 bits."


def linear(x: Tensor, packed: Packed, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """x W^T + b with W packed, (..., in) to (..., out), without a gradient.

    Without loss, up to 16 tokens with a matrix of the profile "fix4" and a multiple of 8 columns, or up to 4 with one
    of another profile and a multiple of 1,024 columns, are multiplied by a kernel that reads the packed weights, sums
    in float32 in an order of its own, and rounds once: the result differs from F.linear's in the last bit of bfloat16.
    With "fix4" and a multiple of 128 columns, that is done on tensor cores, and the order depends on the matrix alone
    (its shape, and places of patches), so that a token's result is the same bits beside up to 15 others; but not for a
    matrix most of whose weights are as good as zeros, whose exponents begin at 0 (`packed.lowest`). A token that is not
    finite spoils its own results alone: with NaN, where infinity would be right, in a row that has a patched weight, or
    is beside one that has, at such a value's column. Everything else is unpacked first, and is F.linear of it.

    Args:
        x: bfloat16 (..., in), on the device of the weights.
        packed: a matrix (out, in).
        bias: (out,), added after the rounding.
        backend: "triton", "reference" or "auto".

    Raises:
        ValueError: shapes, dtypes or devices that do not belong together.
        RuntimeError: x wants a gradient, which would be lost.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "linear has no gradient, and x wants one: call it under torch.no_grad(), give x.detach(), or train with "
            "the layers of paperlm_kernels.stored"
        )
    if len(packed.shape) != 2 or x.shape[-1:] != packed.shape[1:] or (x.dtype, x.device) != (
        packed.dtype, packed.device
    ):  # fmt: skip
        raise ValueError(
            f"x {tuple(x.shape)} of {x.dtype} on {x.device} times a matrix {tuple(packed.shape)} of {packed.dtype} on "
            f"{packed.device}; give (..., in) of the same dtype on the same device"
        )
    product = _product(x, packed) if chosen_backend(backend, x, torch.int32) == "triton" else None
    if product is None:
        return F.linear(x.detach(), packed.unpack(backend=backend), bias)
    flat = x.detach().reshape(-1, x.shape[-1]).contiguous()
    y = product(flat.clone() if flat.data_ptr() % 16 else flat, packed).view(*x.shape[:-1], packed.shape[0])
    return y if bias is None else y + bias


def _product(x: Tensor, packed: Packed) -> Callable[[Tensor, Packed], Tensor] | None:
    """What multiplies them without unpacking, if anything does."""
    columns, codec = x.shape[-1], packed.header.codec
    tokens = x.numel() // max(1, columns)
    if packed.header.lossy or tokens == 0:
        return None
    if codec == Codec.FIX4:
        if columns % 8 or tokens > TOKENS:
            return None
        # its kernel is PTX, which the interpreter does not know; and a code below exponent 0 would borrow
        compiled = x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1"
        tiled = compiled and columns % CHUNK == 0 and columns < MOST_COLUMNS and packed.lowest > 0
        return _gemv if tiled else _fix4
    return _streams if codec == Codec.PFX and columns % STEP == 0 and tokens <= STREAM_TOKENS else None


def warps_of(rows: int, columns: int) -> int:
    """Warps that share the columns of 16 rows: so many that a card has some 2,000 of them, and each has enough to do.
    The order of the sums, and so the last bit of some results, depends on it: it is a function of the shape alone."""
    tiles = -(-rows // TILE)
    if tiles >= 512:
        return 2 if columns <= 4096 or tiles >= 1024 else 4
    return 8 if tiles >= 256 else 16


def gemv_registers(constants: dict[str, int]) -> int:
    """Of a thread: with no limit the next weights are not asked for early enough. A rest of columns and two tiles of
    tokens need more, or are spilled by Triton 3.6; of 16 warps a multiprocessor has not more. A tile of tokens and few
    warps do with less, and more of them are at work."""
    if constants["NT"] == 1 and constants["EVEN"] and constants["W"] <= 4:
        return 112
    return 144 if constants["NT"] == 2 and not constants["EVEN"] and constants["W"] <= 8 else 128


@functools.cache
def _gemv_launcher(warps: int, registers: int) -> Launcher:
    from paperlm_kernels.neuzip.kernel_gemv import fix4_gemv_kernel
    from paperlm_kernels.neuzip.launcher import Launcher

    return Launcher(fix4_gemv_kernel, warps, maxnreg=registers)


def _gemv(x: Tensor, packed: Packed) -> Tensor:
    """`_fix4` on tensor cores."""
    from paperlm_kernels.neuzip.launcher import on_device

    s, (rows, columns), tokens = packed.sections, packed.shape, len(x)
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    warps = warps_of(rows, columns)
    constants = {
        "W": warps, "NT": 1 if tokens <= 8 else 2, "EVEN": columns % (CHUNK * warps) == 0,
        "BLOCK": packed.header.geometry.block, "PDL": overlaps(x.device),
    }  # fmt: skip
    tensors = (
        x.view(torch.int32), s[Section.PAYLOAD], s[Section.PLANE], s[Section.PATCH], s[Section.PATCH_DIR],
        y.view(torch.int16),
    )  # fmt: skip
    with on_device(x):
        launcher = _gemv_launcher(warps, gemv_registers(constants))
        launcher(-(-rows // TILE), tensors, (tokens, rows, columns, packed.lowest), constants)
    return y


def _fix4(x: Tensor, packed: Packed) -> Tensor:
    import triton

    from paperlm_kernels.neuzip.kernel_product import fix4_product_kernel
    from paperlm_kernels.neuzip.launch import octets_of

    s, (rows, columns), tokens = packed.sections, packed.shape, len(x)
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


@functools.cache
def _stream_launcher(m: int) -> Launcher:
    from paperlm_kernels.neuzip.kernel_product import stream_product_kernel
    from paperlm_kernels.neuzip.launcher import Launcher

    return Launcher(stream_product_kernel, maxnreg=REGISTERS[m])


def _streams(x: Tensor, packed: Packed) -> Tensor:
    from paperlm_kernels.neuzip.launch import decoding_of
    from paperlm_kernels.neuzip.launcher import on_device

    (rows, columns), tokens, g = packed.shape, len(x), packed.header.geometry
    run = math.gcd(columns // STEP, g.octets)
    parts = columns // (STEP * run)
    partial = torch.empty(tokens, rows, parts, dtype=torch.float32, device=x.device)
    m = 1 << (tokens - 1).bit_length()
    constants = {
        "OCTETS": g.octets, "LANES": g.lanes, "LIMIT": g.limit, "UNIT": g.unit, "RUN": run,
        "M": m, "PATCHES": 32,
    }  # fmt: skip
    with on_device(x):
        _stream_launcher(m)(
            packed.header.blocks, (*decoding_of(packed).tensors(packed).values(), x.view(torch.int64), partial),
            (packed.header.numel, columns, tokens), constants,
        )  # fmt: skip
    return (partial.sum(2) if parts > 1 else partial.squeeze(2)).to(x.dtype)
