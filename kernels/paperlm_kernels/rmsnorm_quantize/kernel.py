"""Triton kernels: a row is read once, normalized, thinned out, quantized and written; and the gradient of that.

A program has a whole row in registers (BLOCK, the next power of two). Statistics and rounding are in float32.
"""

import triton
import triton.language as tl

from paperlm_kernels.overlap import fetch, gdc_launch_dependents, gdc_wait

# 1.5 * 2^23: what is added to it is rounded to a whole number, half to even, up to 2^22. (The interpreter has no rint.)
MAGIC = tl.constexpr(12582912.0)
EPS = tl.constexpr(1e-5)
INFINITY = tl.constexpr(float("inf"))
LARGEST = tl.constexpr(2**31 - 2)
SIXTEENTH, QUARTER = tl.constexpr(4 << 23), tl.constexpr(2 << 23)  # less of the bits of a float: so much of its value


@triton.jit
def load_row(pointer, offset, columns, inside):
    """A row as float32, zeros outside."""
    return tl.load(pointer + offset + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def open_gate(gate):
    """relu(gate), with NaN where the gate is."""
    return tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def keep_largest(y, inside, k):
    """y with zeros but at its k entries of largest magnitude; of equals, those that come first.

    The bits of a positive float, read as a number, are in its order: a number that k entries reach is found by
    thirds, with two counts in the halves of one sum; at first with a sixteenth and a quarter of the largest entry, for
    half of a row of a model lies between. None is reached by exactly k where the k-th and the next are equal; only
    there does it take all bits, and places decide.
    """
    bits = tl.where(inside, tl.abs(y).to(tl.int32, bitcast=True), -1)
    least = 0  # so many bits, or more, have k entries at least; `beyond` and more fewer than k
    beyond = tl.minimum(tl.max(bits, 0), LARGEST) + 1
    lower = tl.maximum(beyond - SIXTEENTH, 1)
    upper = tl.maximum(beyond - QUARTER, 1)
    found = k + 1
    while (beyond - least > 1) & (found != k):
        # of those below `upper`, which not all are: then no sum is beyond 2^31, also of 2^15 entries
        both = tl.sum((bits >= lower).to(tl.int32) + ((bits < upper).to(tl.int32) << 16), 0)
        above = y.shape[0] - (both >> 16)
        if above >= k:
            least = upper
            found = above
        else:
            if both & 65535 >= k:
                least = lower
                found = both & 65535
                beyond = upper
            else:
                beyond = lower
        third = tl.maximum((beyond - least) // 3, 1)
        lower = least + third
        upper = beyond - third
    if found == k:
        kept = bits >= least
    else:
        equal = (bits == least).to(tl.int32)
        room = k - tl.sum((bits > least).to(tl.int32), 0)
        kept = (bits > least) | ((equal == 1) & (tl.cumsum(equal, 0) <= room))
    return tl.where(kept, y, 0.0)


@triton.jit
def quantized(y, D, levels, low, high, multiple, MEAN: tl.constexpr, E2M1: tl.constexpr):
    """Codes (float32, whole) and scale of a row; 0 and NaN if a value is not finite."""
    if MEAN:
        statistic = multiple * tl.div_rn(tl.sum(tl.abs(y), 0), tl.cast(D, tl.float32))
    else:  # of bits, in whose order what is no number comes last
        statistic = tl.max(tl.abs(y).to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)
    finite = statistic < INFINITY
    statistic = tl.maximum(statistic, EPS)
    # clipped before it is rounded, which gives the same, and keeps the product and MAGIC from becoming one operation
    v = tl.minimum(tl.maximum(y * (tl.div_rn(1.0, statistic) * levels), low), high)
    if E2M1:
        size = tl.abs(v)
        inverse = tl.where(size < 4.0, 1.0, tl.where(size < 8.0, 0.5, 0.25))
        v = ((v * inverse + MAGIC) - MAGIC) / inverse
    else:
        v = (v + MAGIC) - MAGIC
    return tl.where(finite, v, 0.0), tl.where(finite, tl.div_rn(statistic, levels), float("nan"))


@triton.jit
def norm_quantize_kernel(
    x, up, gain, residual, stream, codes, scale, rowsum, values, rstds, places, counts, D, padded, k, x_stride,
    up_stride, residual_stride, eps, levels, low, high, multiple,
    GLU: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, TOPK: tl.constexpr, MEAN: tl.constexpr,
    E2M1: tl.constexpr, CODES: tl.constexpr, VALUES: tl.constexpr, COMPACT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row a program. CODES: writes codes (padded with zeros), scale and rowsum. VALUES: writes the dequantized row
    and 1 / root mean square, for training. COMPACT: places of the codes that are not 0, and their number.
    PDL: it is started before the kernel in front of it has ended, and waits for that here."""
    if PDL:
        if NORM and BLOCK <= 8192:  # with longer rows registers would be spilled
            fetch(gain, D * (gain.dtype.element_ty.primitive_bitwidth // 8))
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    if NORM:  # asked for in front of the sums, which it would wait for behind them
        gains = tl.load(gain + columns, mask=inside, other=0.0)
    z = load_row(x, row * x_stride, columns, inside)
    if GLU:
        gate = open_gate(z)
        z = load_row(up, row * up_stride, columns, inside) * (gate * gate)
    if RESIDUAL:
        # the norm reads the stream as it is stored, so that a model that adds before it norms gives the same
        stored = (z + load_row(residual, row * residual_stride, columns, inside)).to(stream.dtype.element_ty)
        tl.store(stream + row * D + columns, stored, mask=inside)
        z = stored.to(tl.float32)
    rstd = 1.0
    y = z
    if NORM:
        rstd = tl.rsqrt(tl.sum(z * z, 0) / D + eps)
        y = z * rstd * gains.to(tl.float32)
    if TOPK:
        y = keep_largest(y, inside, k)
    q, step = quantized(y, D, levels, low, high, multiple, MEAN, E2M1)
    if CODES:
        whole = q.to(tl.int32)
        tl.store(codes + row * padded + columns, whole.to(tl.int8), mask=columns < padded)
        tl.store(scale + row, step)
        tl.store(rowsum + row, tl.sum(whole, 0))
        if COMPACT:
            active = (whole != 0).to(tl.int32)
            place = tl.cumsum(active, 0) - 1
            tl.store(places + row * padded + place, columns, mask=active == 1)
            tl.store(counts + row, tl.sum(active, 0))
    if VALUES:
        tl.store(values + row * D + columns, (q * step).to(values.dtype.element_ty), mask=inside)
        tl.store(rstds + row, rstd)


@triton.jit
def norm_backward_kernel(
    x, up, gain, rstds, d_values, d_stream, d_x, d_up, d_gain, rows, D, x_stride, up_stride,
    GLU: tl.constexpr, NORM: tl.constexpr, STREAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of a norm whose quantizer is passed straight through. A program goes through every n-th row; its share
    of the gain's gradient is row `program` of d_gain (programs, D)."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for index in range(program, rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        d = load_row(d_values, row * D, columns, inside)
        z = load_row(x, row * x_stride, columns, inside)
        if GLU:
            gate = open_gate(z)
            factor = load_row(up, row * up_stride, columns, inside)
            z = factor * (gate * gate)
        if NORM:
            rstd = tl.load(rstds + row)
            unit = z * rstd
            total += d * unit
            d = d * load_row(gain, 0, columns, inside)
            d = rstd * (d - unit * (tl.sum(d * unit, 0) / D))
        if STREAM:
            d += load_row(d_stream, row * D, columns, inside)
        if GLU:
            tl.store(d_up + row * D + columns, (d * (gate * gate)).to(d_up.dtype.element_ty), mask=inside)
            d = d * factor * (2.0 * gate)
        tl.store(d_x + row * D + columns, d.to(d_x.dtype.element_ty), mask=inside)
    if NORM:
        tl.store(d_gain + tl.cast(program, tl.int64) * D + columns, total, mask=inside)
