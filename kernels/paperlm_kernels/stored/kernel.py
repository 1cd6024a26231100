"""Triton kernel of descent: one pass over a weight and its gradient, without what PyTorch's chain keeps between."""

import triton
import triton.language as tl

BLOCK = 2048
"Values a program: 16 a lane of four warps."


@triton.jit
def sgd_kernel(weight, gradient, lr, count, BLOCK: tl.constexpr):
    """weight <- weight - lr * gradient in float32, rounded once. Launched without fusion of product and difference."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(weight + place, (w - g * lr).to(weight.dtype.element_ty), mask=inside)


def run_sgd(weight, gradient, lr: float) -> None:
    """The kernel on two contiguous tensors of one size on one device."""
    grid = (triton.cdiv(weight.numel(), BLOCK),)
    sgd_kernel[grid](weight, gradient, lr, weight.numel(), BLOCK=BLOCK, enable_fp_fusion=False)
