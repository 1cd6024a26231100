"""Device functions shared by the kernels: loading blocks of a matrix, and the elementwise part of a logit.

A matrix reaches a kernel as a tensor descriptor (TMA on Hopper, 16-byte aligned rows) or as a pointer with a row
stride; the bodies are the same for both. Row blocks and vocabulary groups, the sides of a filter tile, are 128 each.
"""

import triton
import triton.language as tl

# arguments whose value must not make a kernel of its own: it would be compiled again for wave 1 and wave 2
COUNTS = ("wave", "n_waves", "groups", "n_blocks", "chunk")
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_block(source, row, column, n_rows, n_columns, stride, R: tl.constexpr, K: tl.constexpr, TMA: tl.constexpr):
    """Block (R, K) at (row, column); zeros outside the matrix."""
    if TMA:
        return source.load([row, column])
    else:
        r = row + tl.arange(0, R)
        c = column + tl.arange(0, K)
        mask = (r < n_rows)[:, None] & (c < n_columns)[None, :]
        return tl.load(source + r.to(tl.int64)[:, None] * stride + c[None, :], mask=mask, other=0.0)


@triton.jit
def place_of(unit, blocks, others, CHUNK):
    """Where a unit of a (blocks, others) grid works when CHUNK others are gone through for all blocks before the next
    ones.

    Returns (block, other); blocks vary slowest within a chunk. What a chunk of the others shares then stays in L2.
    """
    chunk = unit // (blocks * CHUNK)
    width = tl.maximum(tl.minimum(others - chunk * CHUNK, CHUNK), 1)
    rest = unit - chunk * (blocks * CHUNK)
    return rest // width, chunk * CHUNK + rest % width


@triton.jit
def gather_block(source, rows, column, n_columns, stride, K: tl.constexpr):
    """Block (len(rows), K) of the given rows from `column` on; a negative row reads zeros."""
    c = column + tl.arange(0, K)
    mask = (rows >= 0)[:, None] & (c < n_columns)[None, :]
    return tl.load(source + rows.to(tl.int64)[:, None] * stride + c[None, :], mask=mask, other=0.0)


@triton.jit
def load_rows(E, E_rows, rows, block, column, n_columns, stride, K: tl.constexpr, GATHER: tl.constexpr):
    """Block (128, K) of the embeddings of a row block: in place through a descriptor, or GATHER: of the given rows."""
    if GATHER:
        return gather_block(E_rows, rows, column, n_columns, stride, K)
    else:
        return E.load([block * 128, column])


@triton.jit
def halves(x):
    """The left and the right half of the columns of a block."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def finish_logits(z, bias, ids, V, scale, cap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """Logits used, in base 2 (times log2 e), from the matrix product: scale, bias, softcap cap * tanh(z / cap).

    The result never shares its registers with the product: ptxas serializes wgmma where others touch its accumulator.
    """
    ahead = 2.0 / cap if HAS_CAP and not HAS_BIAS else 1.0  # a factor less where only the cap reads the product
    z = z * (scale * LOG2E * ahead)
    if HAS_BIAS:
        z += tl.load(bias + ids, mask=(ids >= 0) & (ids < V), other=0.0).to(tl.float32)[None, :] * LOG2E
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)) without libdevice, which the interpreter lacks. The square of the reciprocal
        # root is one instruction of the special-function unit, a division several; an infinite exponential gives 1, as
        # it must.
        r = tl.rsqrt(1.0 + tl.exp2(z if not HAS_BIAS else z * (2.0 / cap)))
        z = LOG2E * cap - (2.0 * LOG2E * cap) * (r * r)
    return z
