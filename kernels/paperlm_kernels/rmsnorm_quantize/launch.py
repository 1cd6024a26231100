"""Host side of the kernels: buffers and grids. Nothing here waits for the device."""

from __future__ import annotations

import dataclasses

import torch
import triton
from torch import Tensor

from paperlm_kernels.overlap import FEW_ROWS, launched, overlaps
from paperlm_kernels.rmsnorm_quantize import kernel
from paperlm_kernels.rmsnorm_quantize.modes import Mode

WIDEST = 2**15
"A row is in the registers of one program."
ALIGNED = 128
"What rows of codes are padded to: the chunk of packed weights."


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is normalized: x (M, D), or gate and up; all with elements of a row next to each other."""

    x: Tensor
    up: Tensor | None
    gain: Tensor | None
    residual: Tensor | None
    eps: float


def _block(width: int) -> tuple[int, int]:
    """Elements and warps of a program."""
    block = max(ALIGNED, triton.next_power_of_2(width))
    return block, min(32, max(4, block // 512))


def run_forward(
    rows: Rows, mode: Mode, multiple: float, k: int, *, codes: bool, values: bool, compact: bool
) -> dict[str, Tensor | None]:
    """stream; codes, scale, rowsum, places, counts, where codes are asked for; values, rstds, where values are."""
    (M, D), x = rows.x.shape, rows.x
    padded = -(-D // ALIGNED) * ALIGNED
    new = lambda *shape, dtype: torch.empty(shape, dtype=dtype, device=x.device)  # noqa: E731
    out: dict[str, Tensor | None] = dict.fromkeys(
        ("codes", "scale", "rowsum", "places", "counts", "values", "rstds", "stream")
    )
    if codes:
        out["codes"] = new(M, padded, dtype=torch.int8)
        out["scale"], out["rowsum"] = new(M, dtype=torch.float32), new(M, dtype=torch.int32)
        if compact:
            out["places"], out["counts"] = new(M, padded, dtype=torch.int32), new(M, dtype=torch.int32)
    if values:
        out["values"], out["rstds"] = new(M, D, dtype=x.dtype), new(M, dtype=torch.float32)
    if rows.residual is not None:
        out["stream"] = new(M, D, dtype=x.dtype)
    stride = lambda t: 0 if t is None else t.stride(0)  # noqa: E731
    block, warps = _block(padded)
    if M:
        with torch.cuda.device_of(x):
            kernel.norm_quantize_kernel[(M,)](
                x, rows.up, rows.gain, rows.residual, out["stream"], out["codes"], out["scale"], out["rowsum"],
                out["values"], out["rstds"], out["places"], out["counts"], D, padded, k, stride(x), stride(rows.up),
                stride(rows.residual), rows.eps, mode.levels, float(mode.low), float(mode.high), float(multiple),
                GLU=rows.up is not None, NORM=rows.gain is not None, RESIDUAL=rows.residual is not None, TOPK=k < D,
                MEAN=mode.mean, E2M1=mode.e2m1, CODES=codes, VALUES=values, COMPACT=compact, BLOCK=block,
                num_warps=warps, **launched(M <= FEW_ROWS and not values and overlaps(x.device)),
            )  # fmt: skip
    return out


def run_backward(
    rows: Rows, rstds: Tensor, d_values: Tensor, d_stream: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, up and the gain; rows.x is what the norm read (the stream, where there is a residual)."""
    (M, D), x = rows.x.shape, rows.x
    d_x = torch.empty(M, D, dtype=x.dtype, device=x.device)
    d_up = None if rows.up is None else torch.empty(M, D, dtype=x.dtype, device=x.device)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3
    programs = max(1, min(M, 2 * processors))
    d_gain = None if rows.gain is None else torch.zeros(programs, D, dtype=torch.float32, device=x.device)
    block, warps = _block(D)
    with torch.cuda.device_of(x):
        kernel.norm_backward_kernel[(programs,)](
            x, rows.up, rows.gain, rstds, d_values, d_stream, d_x, d_up, d_gain, M, D, x.stride(0),
            0 if rows.up is None else rows.up.stride(0), GLU=rows.up is not None, NORM=rows.gain is not None,
            STREAM=d_stream is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return d_x, d_up, None if d_gain is None else d_gain.sum(0).to(rows.gain.dtype)
