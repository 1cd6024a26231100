"""Device functions shared by the kernels: codes out of bytes, products of four bytes, and what a sum becomes.

A ternary weight t enters as c = t + 1, so that sum t x = sum c x - sum x: nothing is subtracted while codes are
unpacked. Sums are int32 and exact in whatever order: 2 * 128 * 11008 is below 2^22, and of half of the columns they may
be four times as large.
"""

import triton
import triton.language as tl

# Four bytes at once: two instructions for four weights. ASM is off in the interpreter, which has no inline assembly.
PLANE_0 = tl.constexpr("and.b32 $0, $1, 0x03030303;")
PLANE_1 = tl.constexpr("{ .reg .b32 t; shr.u32 t, $1, 2; and.b32 $0, t, 0x03030303; }")
PLANE_2 = tl.constexpr("{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x03030303; }")
PLANE_3 = tl.constexpr("{ .reg .b32 t; shr.u32 t, $1, 6; and.b32 $0, t, 0x03030303; }")
DOT_OF_FOUR = tl.constexpr("dp4a.s32.s32 $0, $1, $2, $3;")


@triton.jit
def plane_of_bytes(packed, S: tl.constexpr, ASM: tl.constexpr):
    """Codes of plane S of packed bytes, int8 of the same shape."""
    if ASM:
        if S == 0:
            return tl.inline_asm_elementwise(PLANE_0, "=r,r", [packed], tl.int8, True, 4)
        elif S == 1:
            return tl.inline_asm_elementwise(PLANE_1, "=r,r", [packed], tl.int8, True, 4)
        elif S == 2:
            return tl.inline_asm_elementwise(PLANE_2, "=r,r", [packed], tl.int8, True, 4)
        else:
            return tl.inline_asm_elementwise(PLANE_3, "=r,r", [packed], tl.int8, True, 4)
    else:
        return ((packed >> (2 * S)) & 3).to(tl.int8)


@triton.jit
def add_dot_of_four(total, codes, x, ASM: tl.constexpr):
    """total + the products of four bytes of `codes` (0 to 15) with four of x (signed), all int32; broadcast."""
    if ASM:
        return tl.inline_asm_elementwise(DOT_OF_FOUR, "=r,r,r,r", [codes, x, total], tl.int32, True, 1)
    else:
        for b in tl.static_range(4):
            total += ((codes >> (8 * b)) & 15) * ((x << (24 - 8 * b)) >> 24)
        return total


@triton.jit
def row_of(n, N, GATED: tl.constexpr):
    """The row of the weights that is the n-th of the product. GATED: rows of gate and of up take turns, which lie one
    below the other, so that a program has both of what it multiplies."""
    if GATED:
        return n // 2 + (n % 2) * (N // 2)
    else:
        return n


@triton.jit
def scales_of(m, n, scale, rowsum, alpha, M, N, GATED: tl.constexpr):
    """scale[m], rowsum[m] and alpha[n]: what sums of tokens m and rows n are multiplied with, and what is taken off
    before. With few tokens a kernel asks for them before it sums: asked for at the end they add a way to memory and
    back."""
    times = tl.load(scale + m, mask=m < M, other=0.0)
    less = tl.load(rowsum + m, mask=m < M, other=0)
    return times, less, tl.load(alpha + row_of(n, N, GATED), mask=n < N, other=0.0)


@triton.jit
def store_linear(acc, m, n, inside, scale, rowsum, alpha, y, N, GATED: tl.constexpr):
    """y[m, n] = (acc - rowsum) * scale * alpha, of `scales_of`; m and n broadcast to acc's shape.

    GATED: of the pairs of these, y[m, n / 2] = up * relu(gate)^2.
    """
    value = (acc - rowsum).to(tl.float32) * scale * alpha
    at = tl.cast(m, tl.int64) * N + n
    if GATED:
        pairs: tl.constexpr = [acc.shape[0], acc.shape[1] // 2, 2]
        gate, up = tl.split(tl.reshape(value, pairs))
        there, _ = tl.split(tl.reshape(inside, pairs))
        at, _ = tl.split(tl.reshape(at, pairs))
        gate = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(y + at // 2, (up * (gate * gate)).to(y.dtype.element_ty), mask=there)
    else:
        tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def finish(
    acc, m, n, inside, tile, splits, scale, rowsum, alpha, y, work, arrived, N, SPLIT: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Stores a tile. SPLIT: adds it to those of the other programs that share it; who comes last stores the sum.

    scale, rowsum and alpha are those of `scales_of`. work (M, N) and arrived (tiles) are zeros before, int32.
    """
    if SPLIT:
        at = work + tl.cast(m, tl.int64) * N + n
        tl.atomic_add(at, acc, mask=inside, sem="relaxed")
        tl.debug_barrier()  # all threads have added before one of them says so
        if tl.atomic_add(arrived + tile, 1) == splits - 1:
            total = tl.load(at, mask=inside, other=0, cache_modifier=".cg")
            store_linear(total, m, n, inside, scale, rowsum, alpha, y, N, GATED)
    else:
        store_linear(acc, m, n, inside, scale, rowsum, alpha, y, N, GATED)
