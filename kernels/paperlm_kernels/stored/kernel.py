"""Triton kernel of descent: one pass over a weight and its gradient, without what PyTorch's chain keeps between."""

import functools

import triton
import triton.language as tl

from paperlm_kernels.neuzip.launcher import Launcher, on_device

BLOCK = 2048
"Values a program: 16 a lane of four warps."


@triton.jit(do_not_specialize=["lr", "count"])
def sgd_kernel(weight, gradient, lr, count, BLOCK: tl.constexpr):
    """weight <- weight - lr * gradient in float32, rounded once. Launched without fusion of product and difference."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(weight + place, (w - g * lr).to(weight.dtype.element_ty), mask=inside)


@functools.cache
def _launcher(*dtypes) -> Launcher:
    """The kernel for a weight and a gradient of these dtypes."""
    return Launcher(sgd_kernel, enable_fp_fusion=False)


def run_sgd(weight, gradient, lr: float) -> None:
    """The kernel on two contiguous tensors of one size on one device."""
    count = weight.numel()
    with on_device(weight):
        _launcher(weight.dtype, gradient.dtype)(
            triton.cdiv(count, BLOCK), (weight, gradient), (float(lr), count), {"BLOCK": BLOCK}
        )
