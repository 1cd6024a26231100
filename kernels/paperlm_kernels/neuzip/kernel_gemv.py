"""The product of up to 16 tokens with a FIX4 matrix on tensor cores, whose weights exist in registers alone.

A program has 16 rows; its warps share the columns, 128 neighbours at a time, and a product of 16 x 16 weights with
eight tokens is one instruction. Within it the order of the columns is free, so long as both sides have the same: a
thread takes 32 neighbouring columns of two rows, 16 bytes of codes and 32 of the plane each, and of an octet the codes
j and j + 4 become one register. What is loaded is loaded, decoded and multiplied by the same thread, with PTX of our
own on tensors of one element a thread (32 a warp, in order): the compiler's layouts of a matrix would send codes and
plane through shared memory, which takes longer than to read them. Patched weights are 0 in all this, and multiplied
at the end as some columns more.
"""

import triton
import triton.language as tl

from paperlm_kernels.neuzip.kernel_decode import sign_and_mantissa
from paperlm_kernels.neuzip.kernel_product import rounded
from paperlm_kernels.overlap import gdc_launch_dependents, gdc_wait

# Eight weights: $4 their codes, $5 and $6 of the plane the first and the last four, $7 the exponent below the lowest,
# twice. $j gets weights j and j + 4. A shift brings two codes where exponents stand, a selection of bits adds signs and
# mantissas, and a sum the exponent. Where a code is 0 (rare: a branch), the weight is 0 here.
DECODE = tl.constexpr("""{
.reg .b32 e, o, s<4>, p<4>, z, n, m;
.reg .pred some;
and.b32 e, $4, 0x0F0F0F0F;
and.b32 o, $4, 0xF0F0F0F0;
shl.b32 s0, e, 7;
shl.b32 s1, o, 3;
shr.u32 s2, e, 1;
shr.u32 s3, o, 5;
prmt.b32 p0, $5, $6, 0x4400;
prmt.b32 p1, $5, $6, 0x5511;
prmt.b32 p2, $5, $6, 0x6622;
prmt.b32 p3, $5, $6, 0x7733;
lop3.b32 s0, p0, s0, 0x807F807F, 0xE4;
lop3.b32 s1, p1, s1, 0x807F807F, 0xE4;
lop3.b32 s2, p2, s2, 0x807F807F, 0xE4;
lop3.b32 s3, p3, s3, 0x807F807F, 0xE4;
add.u32 $0, s0, $7;
add.u32 $1, s1, $7;
add.u32 $2, s2, $7;
add.u32 $3, s3, $7;
sub.u32 z, $4, 0x11111111;
lop3.b32 z, z, $4, 0x88888888, 0x20;
setp.ne.u32 some, z, 0;
@!some bra DONE;
shr.u32 n, $4, 1;
or.b32 n, n, $4;
shr.u32 m, n, 2;
or.b32 n, n, m;
and.b32 n, n, 0x11111111;
and.b32 m, n, 0x00010001;
mul.lo.u32 m, m, 0xFFFF;
and.b32 $0, $0, m;
shr.u32 m, n, 4;
and.b32 m, m, 0x00010001;
mul.lo.u32 m, m, 0xFFFF;
and.b32 $1, $1, m;
shr.u32 m, n, 8;
and.b32 m, m, 0x00010001;
mul.lo.u32 m, m, 0xFFFF;
and.b32 $2, $2, m;
shr.u32 m, n, 12;
and.b32 m, m, 0x00010001;
mul.lo.u32 m, m, 0xFFFF;
and.b32 $3, $3, m;
DONE:
}""")
MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$8,$9,$10,$11}, {$12,$13}, {$4,$5,$6,$7};"
)
# what is read once is kept in no cache that others use
LOAD = tl.constexpr("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {$0, $1, $2, $3}, [$4];")
LOAD_SOME = tl.constexpr("""{
.reg .pred p;
setp.ne.s32 p, $5, 0;
mov.b32 $0, 0;
mov.b32 $1, 0;
mov.b32 $2, 0;
mov.b32 $3, 0;
@p ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];
}""")


@triton.jit
def four_pairs(codes, low, high, base):
    """`DECODE`."""
    return tl.inline_asm_elementwise(
        DECODE, "=&r,=&r,=&r,=&r,r,r,r,r", [codes, low, high, base],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def added_product(c0, c1, c2, c3, a0, a1, a2, a3, b0, b1):
    """16 x 16 weights times 16 x 8 values, added to 16 x 8 sums."""
    return tl.inline_asm_elementwise(
        MMA, "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r", [c0, c1, c2, c3, a0, a1, a2, a3, b0, b1],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def four_words(address):
    """16 bytes that each lane reads once."""
    return tl.inline_asm_elementwise(
        LOAD, "=r,=r,=r,=r,l", [address], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1
    )


@triton.jit
def four_words_of_some(address, there):
    """16 bytes of the lanes that are there, zeros of the others."""
    return tl.inline_asm_elementwise(
        LOAD_SOME, "=&r,=&r,=&r,=&r,l,r", [address, there],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def read(address, there, EVEN: tl.constexpr):
    """EVEN: all lanes are there."""
    if EVEN:
        w0, w1, w2, w3 = four_words(address)
    else:
        w0, w1, w2, w3 = four_words_of_some(address, there)
    return w0, w1, w2, w3


@triton.jit
def halves(w0, w1, w2, w3):
    """Eight values in four words, so that j and j + 4 are one word: as `DECODE` has the weights."""
    return (
        (w0 & 0xFFFF) | (w2 << 16), ((w0 >> 16) & 0xFFFF) | (w2 & -65536),
        (w1 & 0xFFFF) | (w3 << 16), ((w1 >> 16) & 0xFFFF) | (w3 & -65536),
    )  # fmt: skip


@triton.jit
def octet_added(c0, c1, c2, c3, d0, d1, d2, d3, ca, la, ha, cb, lb, hb, base, x, second, there, then, NT: tl.constexpr):
    """An octet of two rows of each thread, times eight tokens, or times sixteen (NT = 2), which have sums d."""
    a0, a1, a2, a3 = four_pairs(ca, la, ha, base)
    b0, b1, b2, b3 = four_pairs(cb, lb, hb, base)
    x0, x1, x2, x3 = four_words_of_some(x, there)
    x0, x1, x2, x3 = halves(x0, x1, x2, x3)
    c0, c1, c2, c3 = added_product(c0, c1, c2, c3, a0, b0, a1, b1, x0, x1)
    c0, c1, c2, c3 = added_product(c0, c1, c2, c3, a2, b2, a3, b3, x2, x3)
    if NT == 2:
        x0, x1, x2, x3 = four_words_of_some(x + second, then)
        x0, x1, x2, x3 = halves(x0, x1, x2, x3)
        d0, d1, d2, d3 = added_product(d0, d1, d2, d3, a0, b0, a1, b1, x0, x1)
        d0, d1, d2, d3 = added_product(d0, d1, d2, d3, a2, b2, a3, b3, x2, x3)
    return c0, c1, c2, c3, d0, d1, d2, d3


@triton.jit
def blocks_of(patch_directory, index, first, count, BLOCK: tl.constexpr):
    """In which block, from the one of place `first` on, patches index to index + 3 of each lane are."""
    b0, b1, b2, b3 = index * 0, index * 0, index * 0, index * 0
    behind = ((first + count - 1) // BLOCK).to(tl.int32) + 1
    for block in tl.range((first // BLOCK).to(tl.int32) + 1, behind, loop_unroll_factor=4):
        begin = tl.load(patch_directory + block)
        b0 += (index >= begin).to(tl.int32)
        b1 += (index + 1 >= begin).to(tl.int32)
        b2 += (index + 2 >= begin).to(tl.int32)
        b3 += (index + 3 >= begin).to(tl.int32)
    return b0, b1, b2, b3


@triton.jit
def patch_asked(
    x, plane, patches, index, block, q, end, first, count, tokens, columns, BLOCK: tl.constexpr, NT: tl.constexpr
):
    """Of a patch of each lane: exponent and, from bit 8 on, which row of its program's it is in, or -1 if in none; its
    item, and the values of tokens q and q + 8 at its column. Nothing is computed with what is read last."""
    patch = tl.load(patches + index, mask=index < end, other=0)
    inner = (patch & 0xFFFFFF) + block * BLOCK - (first % BLOCK).to(tl.int32)
    mine = (index < end) & (inner >= 0) & (inner < count)
    row = inner // columns
    item = tl.load(plane + first + inner, mask=mine, other=0)
    at = x + (q * columns + inner - row * columns)
    v = tl.load(at, mask=mine & (q < tokens), other=0)
    u = v
    if NT == 2:
        u = tl.load(at + 8 * columns, mask=mine & (q + 8 < tokens), other=0)
    return tl.where(mine, row << 8 | ((patch >> 24) & 0xFF), -1), item, v, u


@triton.jit
def four_asked(
    x, plane, patches, patch_directory, index, q, end, first, count, tokens, columns,
    BLOCK: tl.constexpr, NT: tl.constexpr,
):  # fmt: skip
    """`patch_asked` of patches index to index + 3 of each lane."""
    b0, b1, b2, b3 = blocks_of(patch_directory, index, first, count, BLOCK)
    e0, i0, v0, u0 = patch_asked(x, plane, patches, index, b0, q, end, first, count, tokens, columns, BLOCK, NT)
    e1, i1, v1, u1 = patch_asked(x, plane, patches, index + 1, b1, q, end, first, count, tokens, columns, BLOCK, NT)
    e2, i2, v2, u2 = patch_asked(x, plane, patches, index + 2, b2, q, end, first, count, tokens, columns, BLOCK, NT)
    e3, i3, v3, u3 = patch_asked(x, plane, patches, index + 3, b3, q, end, first, count, tokens, columns, BLOCK, NT)
    return e0, e1, e2, e3, i0, i1, i2, i3, v0, v1, v2, v3, u0, u1, u2, u3


@triton.jit
def patched_pair(e0, i0, e1, i1, row):
    """Two weights of a row in a word; zeros of what lies in another row."""
    w0 = tl.where((e0 >> 8) == row, sign_and_mantissa(i0.to(tl.int32), 0, 7) | (e0 & 0xFF) << 7, 0)
    w1 = tl.where((e1 >> 8) == row, sign_and_mantissa(i1.to(tl.int32), 0, 7) | (e1 & 0xFF) << 7, 0)
    return w0 | w1 << 16


@triton.jit
def pair_of_x(v0, v1):
    """Two patterns in a word."""
    return (v0.to(tl.int32) & 0xFFFF) | v1.to(tl.int32) << 16


@triton.jit
def sums_of(c0, c1, c2, c3, W: tl.constexpr):
    """(16, 8), of what the warps have: a lane has rows q and q + 8 of tokens 2 t and 2 t + 1."""
    upper = tl.reshape(tl.sum(tl.reshape(tl.join(c0, c1), [W, 32, 2]), 0), [8, 8])
    lower = tl.reshape(tl.sum(tl.reshape(tl.join(c2, c3), [W, 32, 2]), 0), [8, 8])
    return tl.reshape(tl.permute(tl.join(upper, lower), [2, 0, 1]), [16, 8])


@triton.jit(do_not_specialize=["tokens", "rows", "columns", "lowest"])
def fix4_gemv_kernel(
    x, payload, plane, patches, patch_directory, y, tokens, rows, columns, lowest,
    W: tl.constexpr, NT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x int32 (tokens, columns / 2); payload int32, plane uint8; y int16 (tokens, rows). W warps. Columns are a
    multiple of 128, EVEN: of 128 W; `lowest` is at least 1 (else code 0 would borrow from its neighbour). PDL: see
    `overlap`."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    LANES: tl.constexpr = 32 * W
    lane = tl.arange(0, LANES)
    warp, q, t = lane >> 5, (lane >> 2) & 7, lane & 3
    columns = (columns // 128) * 128  # so that the compiler knows it
    base = lane * 0 + (lowest - 1) * 0x00800080
    row0 = tl.program_id(0) * 16
    first = row0.to(tl.int64) * columns
    count = tl.minimum(16, rows - row0) * columns
    begin = tl.load(patch_directory + (first // BLOCK))
    end = tl.load(patch_directory + ((first + count - 1) // BLOCK) + 1)
    # rows behind the last are the last one again, and not stored
    here = (warp * 128 + t * 32).to(tl.int64)
    place = tl.minimum(row0 + q, rows - 1).to(tl.int64) * columns + here
    below = tl.minimum(row0 + q + 8, rows - 1).to(tl.int64) * columns + here
    pa, sa = payload.to(tl.int64) + place // 2, plane.to(tl.int64) + place
    pb, sb = payload.to(tl.int64) + below // 2, plane.to(tl.int64) + below
    px = x.to(tl.int64) + 2 * (q * columns + here)
    second = lane.to(tl.int64) * 0 + 16 * columns
    there, then = (q < tokens).to(tl.int32), (q + 8 < tokens).to(tl.int32)
    zero = tl.zeros([LANES], tl.float32)
    c0, c1, c2, c3 = zero, zero, zero, zero
    d0, d1, d2, d3 = zero, zero, zero, zero
    left = columns // 128 - warp  # chunks from this lane's on
    some = (left > 0).to(tl.int32)
    A0, A1, A2, A3 = read(pa, some, EVEN)
    B0, B1, B2, B3 = read(pb, some, EVEN)
    L0, H0, L1, H1 = read(sa, some, EVEN)
    L2, H2, L3, H3 = read(sa + 16, some, EVEN)
    M0, N0, M1, N1 = read(sb, some, EVEN)
    M2, N2, M3, N3 = read(sb + 16, some, EVEN)
    # most programs have fewer patches than this: they are asked for on the way, each program at a step of its own, for
    # their addresses are read one behind another; and multiplied at the end
    x16 = x.to(tl.pointer_type(tl.int16))
    index = begin + warp * 16 + t * 4
    steps = tl.cdiv(columns, 128 * W)
    ask = tl.program_id(0) % steps
    e0, i0, v0 = index * 0 - 1, (index * 0).to(tl.uint8), (index * 0).to(tl.int16)
    e1, e2, e3, i1, i2, i3 = e0, e0, e0, i0, i0, i0
    v1, v2, v3, u0, u1, u2, u3 = v0, v0, v0, v0, v0, v0, v0
    for i in range(steps):
        if i == ask:
            e0, e1, e2, e3, i0, i1, i2, i3, v0, v1, v2, v3, u0, u1, u2, u3 = four_asked(
                x16, plane, patches, patch_directory, index, q, end, first, count, tokens, columns, BLOCK, NT
            )  # fmt: skip
        left -= W
        if EVEN:
            step = tl.where((i + 1) * (128 * W) < columns, 128 * W, 0)  # behind the last, that one is read again
        else:
            step = 128 * W
        some = (left > 0).to(tl.int32)
        pa += step // 2
        pb += step // 2
        sa += step
        sb += step
        nA0, nA1, nA2, nA3 = read(pa, some, EVEN)
        nB0, nB1, nB2, nB3 = read(pb, some, EVEN)
        nL0, nH0, nL1, nH1 = read(sa, some, EVEN)
        nL2, nH2, nL3, nH3 = read(sa + 16, some, EVEN)
        nM0, nN0, nM1, nN1 = read(sb, some, EVEN)
        nM2, nN2, nM3, nN3 = read(sb + 16, some, EVEN)
        if not EVEN:  # of this step
            there = ((q < tokens) & (left + W > 0)).to(tl.int32)
            then = ((q + 8 < tokens) & (left + W > 0)).to(tl.int32)
        c0, c1, c2, c3, d0, d1, d2, d3 = octet_added(
            c0, c1, c2, c3, d0, d1, d2, d3, A0, L0, H0, B0, M0, N0, base, px, second, there, then, NT
        )
        c0, c1, c2, c3, d0, d1, d2, d3 = octet_added(
            c0, c1, c2, c3, d0, d1, d2, d3, A1, L1, H1, B1, M1, N1, base, px + 16, second, there, then, NT
        )
        c0, c1, c2, c3, d0, d1, d2, d3 = octet_added(
            c0, c1, c2, c3, d0, d1, d2, d3, A2, L2, H2, B2, M2, N2, base, px + 32, second, there, then, NT
        )
        c0, c1, c2, c3, d0, d1, d2, d3 = octet_added(
            c0, c1, c2, c3, d0, d1, d2, d3, A3, L3, H3, B3, M3, N3, base, px + 48, second, there, then, NT
        )
        px += 256 * W
        A0, A1, A2, A3, B0, B1, B2, B3 = nA0, nA1, nA2, nA3, nB0, nB1, nB2, nB3
        L0, L1, L2, L3, H0, H1, H2, H3 = nL0, nL1, nL2, nL3, nH0, nH1, nH2, nH3
        M0, M1, M2, M3, N0, N1, N2, N3 = nM0, nM1, nM2, nM3, nN0, nN1, nN2, nN3
    for i in range(begin, tl.maximum(end, begin + 1), 16 * W):
        if i > begin:
            index = i + warp * 16 + t * 4
            e0, e1, e2, e3, i0, i1, i2, i3, v0, v1, v2, v3, u0, u1, u2, u3 = four_asked(
                x16, plane, patches, patch_directory, index, q, end, first, count, tokens, columns, BLOCK, NT
            )  # fmt: skip
        p0, q0 = patched_pair(e0, i0, e1, i1, q), patched_pair(e0, i0, e1, i1, q + 8)
        p1, q1 = patched_pair(e2, i2, e3, i3, q), patched_pair(e2, i2, e3, i3, q + 8)
        c0, c1, c2, c3 = added_product(c0, c1, c2, c3, p0, q0, p1, q1, pair_of_x(v0, v1), pair_of_x(v2, v3))
        if NT == 2:
            d0, d1, d2, d3 = added_product(d0, d1, d2, d3, p0, q0, p1, q1, pair_of_x(u0, u1), pair_of_x(u2, u3))
    out = sums_of(c0, c1, c2, c3, W)
    if NT == 2:
        both = tl.join(out, sums_of(d0, d1, d2, d3, W))
        out = tl.reshape(tl.permute(both, [0, 2, 1]), [16, 16])
    m = tl.arange(0, 8 * NT)
    row = row0 + tl.arange(0, 16)
    there = (m < tokens)[None, :] & (row < rows)[:, None]
    tl.store(y + m[None, :] * rows + row[:, None], rounded(out), mask=there)
