"""Hopper: weights and codes come by the copy engine, and are unpacked on their way into the matrix units (Gluon).

What `gemm.gemm_kernel` computes, from the same packed bytes. A program keeps several steps of copies in flight; codes
of weights are read from shared memory in the layout that wgmma takes its left operand in, unpacked in registers with
one or two instructions for four, and multiplied with 32 activations a token, which wgmma reads from shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

all_threads = getattr(gl, "thread_barrier", None) or gl.barrier  # its name before Triton 3.7, and since
PLANE_0 = gl.constexpr("and.b32 $0, $1, 0x03030303;")
PLANE_1 = gl.constexpr("{ .reg .b32 t; shr.u32 t, $1, 2; and.b32 $0, t, 0x03030303; }")
PLANE_2 = gl.constexpr("{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x03030303; }")
PLANE_3 = gl.constexpr("{ .reg .b32 t; shr.u32 t, $1, 6; and.b32 $0, t, 0x03030303; }")
WAIT = gl.constexpr("griddepcontrol.wait; mov.u32 $0, 0;")
LAUNCH = gl.constexpr("griddepcontrol.launch_dependents; mov.u32 $0, 0;")


def swizzled(columns: int, rank: int = 2) -> gl.NVMMASharedLayout:
    """The layout of bytes in shared memory, so many a row: 32, 64 or 128."""
    return gl.NVMMASharedLayout(swizzle_byte_width=columns, element_bitwidth=8, rank=rank)


ROWS = gl.constexpr(swizzled(128))
"Of the activations of a chunk, (tokens, 128)."


@gluon.jit
def plane_of(packed, S: gl.constexpr):
    """Codes of plane S of packed bytes."""
    if S == 0:
        return gl.inline_asm_elementwise(PLANE_0, "=r,r", [packed], gl.int8, True, 4)
    elif S == 1:
        return gl.inline_asm_elementwise(PLANE_1, "=r,r", [packed], gl.int8, True, 4)
    elif S == 2:
        return gl.inline_asm_elementwise(PLANE_2, "=r,r", [packed], gl.int8, True, 4)
    else:
        return gl.inline_asm_elementwise(PLANE_3, "=r,r", [packed], gl.int8, True, 4)


@gluon.jit
def copy_weights(w_desc, buffer, bar, n0, N, step, C: gl.constexpr, BYTES: gl.constexpr, HALF: gl.constexpr, pred):
    """Begins the copy of a step's weights; `bar` is told how many bytes of both operands it waits for.

    HALF: rows of gate and up take turns, so many of each, which lie one below the other in memory.
    """
    mbarrier.expect(bar, BYTES, pred=pred)
    if HALF == 0:
        tma.async_copy_global_to_shared(w_desc, [n0, step * 32 * C], bar, buffer, pred=pred)
    else:
        for i in gl.static_range(buffer.shape[0] // HALF):
            row = n0 // 2 + (i // 2) * HALF + (i % 2) * (N // 2)
            part = buffer.slice(i * HALF, HALF, dim=0)
            tma.async_copy_global_to_shared(w_desc, [row, step * 32 * C], bar, part, pred=pred)


@gluon.jit(do_not_specialize=["M", "steps", "m_tiles", "n_tiles", "early"])
def stream_kernel(
    x_desc, w_desc, scale, rowsum, alpha, y, parts, M, N, steps, m_tiles, n_tiles, early,
    BM: gl.constexpr, BN: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    PARTS: gl.constexpr, HALF: gl.constexpr, EIGHT: gl.constexpr,
):  # fmt: skip
    """y (M, N). A step takes C chunks of 128 columns; what lies beyond the matrices is zeros, which add nothing.

    It is started before the kernel in front of it has ended, and waits for that before it reads or writes anything that
    another kernel may write; but weights are read before if `early`, which says that they were written before an
    earlier product of this kernel with them (`hopper.settled`). As that one lets the next kernel start behind its own
    wait, whatever starts behind it finds them written; so this one does the same.

    PARTS: so many programs share a tile, if not one: `sum_of_parts`. HALF: y is (M, N / 2), up * relu(gate)^2.
    EIGHT: N is a multiple of 8, so that eight rows are stored at once; Triton itself looks for multiples of 16 alone.
    """
    if EIGHT:
        N = N // 8 * 8
    W: gl.constexpr = gl.num_warps()
    tile = gl.program_id(0)
    # GROUP tiles of tokens go through all weights together, which then stay in L2
    group = tile // (GROUP * n_tiles)
    high = gl.minimum(m_tiles - group * GROUP, GROUP)
    rest = tile - group * GROUP * n_tiles
    m0 = (group * GROUP + rest % high) * BM
    n0 = (rest // high) * BN
    first = 0
    last = steps
    if PARTS > 1:
        share = (steps + PARTS - 1) // PARTS
        first = gl.program_id(1) * share
        last = gl.minimum(first + share, steps)
    count = last - first
    weights = gl.allocate_shared_memory(gl.int8, [STAGES, BN, 32 * C], w_desc.layout)
    codes = gl.allocate_shared_memory(gl.int8, [STAGES, C, BM, 128], x_desc.layout)
    operands = codes._reinterpret(gl.int8, [STAGES * C, BM, 128], ROWS)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    BYTES: gl.constexpr = BN * 32 * C + BM * 128 * C
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    for i in gl.static_range(STAGES):
        soon = (i < count) & (early != 0)
        copy_weights(w_desc, weights.index(i), bars.index(i), n0, N, first + i, C, BYTES, HALF, soon)
    gl.inline_asm_elementwise(WAIT, "=r", [], gl.int32, False, 1)
    gl.inline_asm_elementwise(LAUNCH, "=r", [], gl.int32, False, 1)
    for i in gl.static_range(STAGES):
        late = (i < count) & (early == 0)
        copy_weights(w_desc, weights.index(i), bars.index(i), n0, N, first + i, C, BYTES, HALF, late)
        start = (first + i) * C
        tma.async_copy_global_to_shared(x_desc, [start, m0, 0], bars.index(i), codes.index(i), pred=i < count)
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, BM, 32])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=4)
    inner = gl.arange(0, BN, gl.SliceLayout(1, mma))
    token = gl.arange(0, BM, gl.SliceLayout(0, mma))
    if BM <= 32:  # of more, they would take registers that a third program of the multiprocessor needs
        less, times, alphas = scales_of(m0 + token, inner, n0, scale, rowsum, alpha, M, N, HALF)
    acc = gl.zeros([BN, BM], gl.int32, mma)
    for it in range(count):
        slot = it % STAGES
        mbarrier.wait(bars.index(slot), (it // STAGES) & 1)
        for c in gl.static_range(C):
            packed = weights.index(slot).slice(32 * c, 32, dim=1).load(left)
            x = operands.index(slot * C + c)
            for s in gl.static_range(4):
                right = x.slice(32 * s, 32, dim=1).permute((1, 0))
                acc = warpgroup_mma(plane_of(packed, s), right, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        all_threads()  # all warps have read the buffers that are filled next
        ahead = it + STAGES
        copy_weights(w_desc, weights.index(slot), bars.index(slot), n0, N, first + ahead, C, BYTES, HALF, ahead < count)
        start = (first + ahead) * C
        tma.async_copy_global_to_shared(x_desc, [start, m0, 0], bars.index(slot), codes.index(slot), pred=ahead < count)
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(i))
    store = True
    if PARTS > 1:
        own = gl.program_id(1)
        at = parts + tile.to(gl.int64) * (PARTS - 1) * (BN * BM) + place_of(inner[:, None], token[None, :], BN)
        store = own == PARTS - 1
        if store:
            acc = sum_of_parts(acc, at, PARTS - 1, BN * BM)
        else:
            gl.store(at + own * (BN * BM), 2 * acc + 1)
    if store:
        if BM > 32:
            less, times, alphas = scales_of(m0 + token, inner, n0, scale, rowsum, alpha, M, N, HALF)
        value = (acc - less[None, :]).to(gl.float32) * times[None, :] * alphas[:, None]
        if HALF == 0:
            store_rows(value.to(y.dtype.element_ty), n0, m0, y, M, N)
        else:
            store_gated(value, n0, m0, y, M, N, HALF)


@gluon.jit
def place_of(inner, token, BN: gl.constexpr):
    """Where a sum of a tile lies among those that are handed over: by 8 x 8, as a warp has them at once, so that what
    it loads or stores lies in two lines of the cache and not in eight."""
    block = inner // 8 + token // 8 * (BN // 8)
    return block * 64 + inner % 8 * 8 + token % 8


@gluon.jit
def sum_of_parts(acc, at, OTHERS: gl.constexpr, SIZE: gl.constexpr):
    """acc + the sums of so many other programs, which store 2 sum + 1 at `at` + i SIZE, where 0 is before and after.

    So a number says itself that it is there: it should be added one way to L2 and back after it was stored, where a
    count of who has stored takes two more, for it may be raised only when the sums have arrived. Who adds up is of the
    last programs of the grid. Those it waits for have lower numbers and so run already: programs were seen to start in
    the order of their numbers, which CUDA does not promise. A sum is below 2^30, as that of four million columns is.
    """
    absent = 1
    total = acc
    while absent != 0:
        total = acc
        missing = gl.zeros_like(acc)
        for i in gl.static_range(OTHERS):
            part = gl.load(at + i * SIZE, volatile=True)
            missing = missing | (part ^ 1)
            total += part >> 1
        absent = gl.max(gl.max(missing & 1, 1), 0)
    for i in gl.static_range(OTHERS):
        gl.store(at + i * SIZE, gl.zeros_like(acc))
    return total


@gluon.jit
def scales_of(m, inner, n0, scale, rowsum, alpha, M, N, HALF: gl.constexpr):
    """rowsum[m], scale[m], and alpha of a tile's rows of weights, as in `tiles.scales_of`."""
    if HALF == 0:
        n = n0 + inner
        inside = n < N
    else:
        pair = n0 // 2 + inner // (2 * HALF) * HALF + inner % HALF
        n = pair + (inner // HALF % 2) * (N // 2)
        inside = pair < N // 2
    less = gl.load(rowsum + m, mask=m < M, other=0)
    times = gl.load(scale + m, mask=m < M, other=0.0)
    return less, times, gl.load(alpha + n, mask=inside, other=0.0)


@gluon.jit
def store_gated(value, n0, m0, y, M, N, HALF: gl.constexpr):
    """What a tile of gate and up (rows of weights, tokens) becomes, as in `tiles.store_linear`."""
    pairs = value.reshape([value.shape[0] // (2 * HALF), 2, HALF, value.shape[1]]).permute((0, 2, 3, 1))
    gate, up = gl.split(pairs)
    gate = gl.where(gate < 0.0, 0.0, gate)  # which leaves what is no number
    z = (up * (gate * gate)).to(y.dtype.element_ty).reshape([value.shape[0] // 2, value.shape[1]])
    store_rows(z, n0 // 2, m0, y, M, N // 2)


@gluon.jit
def store_rows(value, n0, m0, y, M, N):
    """y[m0 + j, n0 + i] = value[i, j], where there is one: eight rows of a token a thread, 16 bytes in bfloat16."""
    wide: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    out = gl.convert_layout(value, wide)
    n = n0 + gl.arange(0, value.shape[0], gl.SliceLayout(1, wide))
    m = m0 + gl.arange(0, value.shape[1], gl.SliceLayout(0, wide))
    gl.store(y + (m.to(gl.int64)[None, :] * N + n[:, None]), out, mask=(n < N)[:, None] & (m < M)[None, :])
