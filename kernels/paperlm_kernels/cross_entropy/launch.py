"""Host side of the kernels: buffers and grids. Nothing here waits for the device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

from paperlm_kernels.cross_entropy import forward, gradient, liveness, products, reorder
from paperlm_kernels.cross_entropy.reorder import unsort_rows
from paperlm_kernels.cross_entropy.repeated import WAVE, Repeated
from paperlm_kernels.cross_entropy.sharing import MOST_PROGRAMS
from paperlm_kernels.cross_entropy.waves import (
    MIB,
    ROUNDING,
    allocated,
    budget,
    most_waves,
    order_room,
    spare_slots,
    wave_count,
)

MAX_SPLITS = 16
L2_BYTES = 20 * MIB  # of an L2 of 50 MiB in two halves, for what is read again and again
FLAT_WIDTH = 1024  # widest embeddings for which the forward kernel is one flat loop
WINDOW = 4  # groups whose rows of C a chunk of row blocks shares through L2 while q is computed
MOST_WINDOWS = 2**15  # CUDA's grids have at most 65,535 programs in their second and third direction
TILES_AT_ONCE = 4096  # of a program that ranks or lists the tiles of some groups
NEGLIGIBLE = 2.0**-12  # of the filter's threshold: probabilities below it are rounded to zero in 16 bits
CHUNK = 3  # column blocks of a product whose operand stays in L2


@dataclass(frozen=True)
class Blocks:
    """Tiles of the kernels for one dtype: columns of the block (gradient: always two groups), K step, warps, stages."""

    forward: tuple[int, int, int, int]
    gradient: tuple[int, int, int]
    products: tuple[int, int, int, int]


HOPPER = Blocks(forward=(256, 64, 8, 3), gradient=(64, 8, 3), products=(256, 64, 8, 3))
AMPERE = Blocks(forward=(128, 32, 8, 3), gradient=(32, 8, 3), products=(128, 32, 8, 3))
THIRTY_TWO_BIT = Blocks(forward=(128, 32, 8, 2), gradient=(32, 8, 2), products=(64, 32, 8, 2))


def is_hopper(device: torch.device) -> bool:
    """Whether the card has TMA and 227 KiB of shared memory, as data-centre cards from sm_90 on; so the interpreter."""
    if device.type != "cuda":
        return True
    card = torch.cuda.get_device_properties(device)
    return (card.major, card.minor) >= (9, 0) and card.shared_memory_per_block_optin >= 227 * 1024


def on_its_device(function: Callable) -> Callable:
    """Launch on the device of the first argument, which need not be the current one."""

    @functools.wraps(function)
    def launch(tensor: torch.Tensor, *rest, **keywords):
        with torch.cuda.device_of(tensor):
            return function(tensor, *rest, **keywords)

    return launch


def blocks_of(hidden: torch.Tensor) -> Blocks:
    """Tiles for a dtype and device: HOPPER are measured, the others made to fit 99 KiB of shared memory."""
    if hidden.dtype.itemsize == 4:
        return THIRTY_TWO_BIT
    return HOPPER if is_hopper(hidden.device) else AMPERE


def programs_of(device: torch.device) -> int:
    """Size of a persistent grid, at most `sharing.MOST_PROGRAMS`."""
    if device.type != "cuda":
        return 4
    return min(torch.cuda.get_device_properties(device).multi_processor_count, MOST_PROGRAMS.value)


def can_use_tma(*matrices: torch.Tensor) -> bool:
    """Whether descriptors apply: a card with TMA, 16-byte aligned bases and row pitches."""
    aligned = (
        m.data_ptr() % 16 == 0 and m.stride(0) * m.element_size() % 16 == 0 and m.stride(0) >= m.shape[1]
        for m in matrices
    )
    return is_hopper(matrices[0].device) and all(aligned)


def use_tma(*matrices: torch.Tensor) -> bool:
    """`can_use_tma`, but for IEEE products of float32 on a GPU: they are no matter of tensor cores, and ptxas compiles
    the kernels' two bodies (rows in place, rows gathered) to code that lives in local memory."""
    first = matrices[0]
    slow = first.is_cuda and first.dtype == torch.float32 and precision_of(first.dtype) == "ieee"
    return not slow and can_use_tma(*matrices)


def operand(matrix: torch.Tensor, block: list[int], tma: bool):
    """What a kernel gets for a matrix: a descriptor, or the tensor as a pointer."""
    if not tma:
        return matrix
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, block)


def row_chunk(hidden: torch.Tensor) -> int:
    """Row blocks whose embeddings stay in L2 beside the rows of the classifier that pass through; all blocks divided
    evenly."""
    n_blocks = triton.cdiv(hidden.shape[0], 128)
    most = max(1, L2_BYTES // (128 * hidden.shape[1] * hidden.element_size()))
    return triton.cdiv(n_blocks, triton.cdiv(n_blocks, most))


def precision_of(dtype: torch.dtype) -> str:
    """Matrix products of float32 inputs are IEEE unless the global precision is lowered, as everywhere in PyTorch."""
    return "tf32" if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"


@dataclass
class Saved:
    """What the forward pass leaves for the backward pass. No tensor here but `kept` has a side N and a side V or D."""

    lse: torch.Tensor
    target_logit: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    control: torch.Tensor
    maxima: torch.Tensor
    base: torch.Tensor
    kept: torch.Tensor


@on_its_device
def run_forward(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, softcap: float | None,
    logit_scale: float, maxima: float, keep: bool, vocab_start: int,
) -> Saved:  # fmt: skip
    """Log-sum-exp and target logit of every counting token. Shapes as in `ops.linear_cross_entropy_core`.

    maxima: logarithm of the filter's threshold, which is negative, for byte maxima; 0 for none. keep: also the logits
    (see kept.py).
    """
    if keep and not can_use_tma(hidden, weight):
        hidden, weight = hidden.clone(), weight.clone()
    (N, D), V, device = hidden.shape, weight.shape[0], hidden.device
    BN, BK, warps, stages = blocks_of(hidden).forward
    n_blocks = triton.cdiv(N, 128)
    n_pad, tiles = n_blocks * 128, triton.cdiv(V, BN)
    programs = programs_of(device)
    rows, targets = (torch.empty(n_pad, dtype=torch.int32, device=device) for _ in range(2))
    control = torch.empty(5, dtype=torch.int32, device=device)
    forward.compact_kernel[(1,)](
        target, target.stride(0), rows, targets, control, N, n_pad, V, vocab_start, tiles, programs, row_chunk(hidden),
        EVERY_ROW=keep, MAX_SPLITS=MAX_SPLITS, BLOCK=4096, num_warps=16,
    )  # fmt: skip
    parts = torch.empty(2, MAX_SPLITS, n_pad, dtype=torch.float32, device=device)
    lse, target_logit = (torch.zeros(N, dtype=torch.float32, device=device) for _ in range(2))
    base = torch.empty((2, n_pad) if maxima else (0,), dtype=torch.float32, device=device)
    max_bytes = torch.empty((tiles * BN // 128, n_pad) if maxima else (0,), dtype=torch.int8, device=device)
    kept = torch.empty((N, V) if keep else (0,), dtype=hidden.dtype, device=device)
    tma = can_use_tma(hidden, weight) if keep else use_tma(hidden, weight)
    logit = dict(
        HAS_BIAS=bias is not None, HAS_CAP=softcap is not None, PRECISION=precision_of(hidden.dtype),
    )  # fmt: skip
    if maxima:
        forward.base_kernel[(n_blocks, 2)](
            hidden, weight, bias, rows, targets, control, base, n_pad, V, D, hidden.stride(0),
            weight.stride(0), float(logit_scale), float(softcap or 1.0), BK=BK, **logit, num_warps=8,
        )  # fmt: skip
    flat = D <= FLAT_WIDTH
    forward.forward_kernel[(min(programs, n_blocks * MAX_SPLITS),)](
        operand(hidden, [128, BK], tma), hidden, operand(weight, [BN, BK], tma), bias, rows, targets, control,
        parts[0], parts[1], target_logit, max_bytes, base, operand(kept, [128, BN], keep), n_pad, V, D,
        hidden.stride(0), weight.stride(0),
        float(logit_scale), float(softcap or 1.0), float(maxima),
        BN=BN, BK=BK, TMA=tma, FLAT=flat, MAXIMA=maxima < 0, KEEP=keep,
        DTYPE=triton_dtype(hidden.dtype), **logit, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    forward.combine_kernel[(n_blocks,)](
        parts[0], parts[1], rows, targets, control, lse, n_pad, EVERY_ROW=keep, num_warps=4
    )
    return Saved(lse, target_logit, rows, targets, control, max_bytes, base, kept)


@on_its_device
def run_backward(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, saved: Saved, order: torch.Tensor | None,
    d_lse: torch.Tensor, d_target: torch.Tensor, softcap: float | None, logit_scale: float, filter_eps: float | None,
    filter_grads: str, accumulate: str, memory: str, need: tuple[bool, bool, bool], hidden_fp32: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of hidden, weight and bias (empty where not needed). `hidden_fp32`: dE in float32, for a sum over
    ranks.

    order: (V,) int32 permutation in which ids are grouped into tiles, or None.
    """
    (N, D), V, device, dtype = hidden.shape, weight.shape[0], hidden.device, hidden.dtype
    config, precision = blocks_of(hidden), precision_of(dtype)
    need_hidden, need_weight, need_bias = need
    ordered = order is not None
    in_weight = need_weight or ordered  # what the waves share with their scratch; the rows in the order lie there too
    n_blocks, groups = triton.cdiv(N, 128), triton.cdiv(V, 128)
    filtered = filter_eps is not None and filter_grads != "none"
    drop_hidden, drop_weight = filtered and filter_grads != "weight", filtered and filter_grads != "hidden"
    flag = filtered and saved.maxima.numel() == 0  # no maxima: all tiles are recomputed and tested then
    listed = drop_hidden and drop_weight and not flag
    visit = "listed" if listed else "some" if drop_weight else "all"
    tiny = filter_eps * NEGLIGIBLE if drop_hidden and drop_weight and dtype.itemsize == 2 else 0.0

    # which tiles, in which waves
    empty = functools.partial(torch.empty, device=device)
    int32 = functools.partial(empty, dtype=torch.int32)
    control, rows, targets = saved.control, saved.rows, saved.targets
    if ordered:
        places = int32(V).scatter_(0, order.long(), torch.arange(V, dtype=torch.int32, device=device))
        targets = torch.where(targets >= 0, places[targets.clamp(min=0)], -1)
        del places
    alive = empty((n_blocks, groups) if filtered else 0, dtype=torch.int8)
    rank = empty((n_blocks, groups) if listed else 0, dtype=torch.int16)
    small = functools.partial(empty, dtype=torch.int16 if max(groups + 1, n_blocks) < 2**15 else torch.int32)
    row_slots = int32((n_blocks, groups) if listed else 0)
    row_groups = small((n_blocks, groups) if drop_hidden else 0)
    row_starts = small((n_blocks, groups + 1) if drop_hidden else 0)
    slot_blocks = small(n_blocks * groups if listed else 0)
    group_blocks = small((groups + 1, n_blocks) if visit == "some" else 0)  # one more, for what is read ahead
    group_counts, offsets = int32(groups), int32(groups + 1)
    as_float = hidden_fp32 or memory == "fast" or dtype == torch.float32
    pair = memory == "balanced" and not as_float and accumulate == "fp32" and need_hidden
    kept = (alive, rank, row_slots, row_groups, row_starts, slot_blocks, group_blocks, saved.maxima)
    bound = (N + V) * D * dtype.itemsize
    # what the allocator adds to dE, and what dE is carried in
    carry = allocated(N * D * dtype.itemsize) - N * D * dtype.itemsize
    carry += allocated(4 * N * D) if as_float and dtype != torch.float32 else 0
    carry += allocated(n_blocks * 128 * D) if pair else 0
    vectors = 40 * N + 8 * V * need_bias  # of a number or two a token, and db in float32 and in its dtype
    other = sum(t.nbytes for t in kept) + carry + ROUNDING + vectors
    other += 2 * groups * n_blocks * listed  # units
    row_size = D / 128 if in_weight else 0.0
    columns = triton.cdiv(D, config.products[0])
    programs, together = programs_of(device), row_chunk(hidden)
    most = most_waves(memory, not filtered, not in_weight, groups, columns, programs)
    afforded = budget(memory, not filtered, bound)
    slots = spare_slots(afforded, other, n_blocks, groups, row_size, dtype.itemsize, most)
    slots += math.ceil(groups * row_size)
    waves = wave_count(groups, n_blocks, slots, row_size)
    pair = pair and waves > 1
    plan = int32(3 * waves + 1)
    units, unit_counts = int32((groups // 2 + 1 + waves) * n_blocks if listed else 0), int32(waves)

    # The slots of a wave lie in the part of dC that no wave has written yet, then in a tail behind it.
    scratch = empty((slots * 128, 128), dtype=dtype)
    d_weight = scratch.view(-1)[: V * D].view(V, D) if in_weight else empty(0, dtype=dtype)
    carried_as = torch.float32 if as_float and need_hidden else dtype
    d_hidden = torch.zeros((N, D) if need_hidden else 0, dtype=carried_as, device=device)
    remainder = empty((n_blocks * 128, D) if pair else 0, dtype=torch.int8)
    d_bias = empty(V if need_bias else 0, dtype=torch.float32)

    if filtered and not flag:
        liveness.alive_kernel[(n_blocks, triton.cdiv(groups, 32))](
            saved.maxima, saved.base, saved.lse, rows, targets, control, alive, n_blocks * 128, groups, GROUPS=32,
            num_warps=4,
        )  # fmt: skip
    BLOCKS = triton.next_power_of_2(n_blocks)
    at_once = max(1, min(16, TILES_AT_ONCE // BLOCKS))
    if listed:
        liveness.rank_kernel[(triton.cdiv(groups, at_once),)](
            alive, rank, group_counts, control, groups, BLOCKS=BLOCKS, GROUPS=at_once, num_warps=4
        )
    liveness.plan_kernel[(1,)](
        group_counts, control, offsets, plan, groups, D, slots, waves, LISTED=listed, ALIASED=in_weight,
        BLOCK=min(4096, triton.next_power_of_2(groups)), num_warps=4,
    )  # fmt: skip

    lists = Repeated(
        liveness.lists_kernel, n_blocks + triton.cdiv(groups, at_once), alive, rank, offsets, control, plan, WAVE,
        row_slots, row_groups, row_starts, slot_blocks, group_blocks, group_counts, groups, n_blocks, WAVE=flag,
        LISTED=listed, ROW_LISTS=drop_hidden, GROUP_LISTS=visit == "some", BLOCK=256, BLOCKS=BLOCKS, GROUPS=at_once,
        num_warps=4,
    )  # fmt: skip
    if filtered and not flag:
        lists(0)
    if listed:
        window = max(WINDOW, triton.cdiv(groups, MOST_WINDOWS))
        liveness.units_kernel[(waves, triton.cdiv(groups, window), triton.cdiv(n_blocks, together))](
            row_starts, offsets, control, plan, waves, units, unit_counts, groups, n_blocks, together, BLOCKS=BLOCKS,
            WINDOW=window, num_warps=4,
        )  # fmt: skip

    upstream = empty((3, n_blocks * 128), dtype=torch.float32)
    gradient.upstream_kernel[(triton.cdiv(n_blocks, 8),)](
        rows, saved.lse, d_lse, d_target, upstream, n_blocks * 128, BLOCK=1024, num_warps=4
    )  # fmt: skip
    C = d_weight if ordered else weight
    tma = use_tma(hidden, C, scratch)
    scale, cap = float(logit_scale), float(softcap or 1.0)
    BK, warps, stages = config.gradient
    hidden_in = operand(hidden, [128, BK], tma)
    weight_in, weight_wide = operand(C, [128, BK], tma), operand(C, [256, BK], tma)
    slot_out = operand(scratch, [128, 128], tma)
    BD, BKP, product_warps, product_stages = config.products
    if accumulate == "input":
        BD, BKP, product_stages = min(BD, 128), 128, 2  # the published rounding happens once a tile
    hidden_block, weight_block = operand(hidden, [BKP, BD], tma), operand(C, [BKP, BD], tma)
    q_rows, q_columns = operand(scratch, [128, BKP], tma), operand(scratch, [BKP, 128], tma)
    sort = Repeated(
        reorder.sort_kernel, 4 * programs, weight, order, plan, WAVE, d_weight, V, D, weight.stride(0), ROWS=16,
        BLOCK=min(512, triton.next_power_of_2(D)), num_warps=8,
    )  # fmt: skip
    write_q = Repeated(
        gradient.gradient_kernel, programs, hidden_in, hidden, weight_in, weight_wide,
        bias.index_select(0, order) if ordered and bias is not None else bias, rows, targets, control, upstream,
        row_slots, row_groups, units, unit_counts, plan, WAVE, waves, slot_out, alive, V, D, hidden.stride(0),
        C.stride(0), scale, cap, filter_eps if flag else 0.0, tiny, groups, n_blocks, together, BK=BK, TMA=tma,
        LISTED=listed, FLAG=flag, HAS_BIAS=bias is not None, HAS_CAP=softcap is not None, PRECISION=precision,
        DTYPE=triton_dtype(dtype), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    product = functools.partial(
        Repeated, products.products_kernel, programs, hidden_block, hidden, weight_block, rows, control, row_slots,
        row_groups, row_starts, slot_blocks, group_blocks, group_counts, offsets, plan, WAVE, waves, q_rows, q_columns,
        d_hidden, remainder, d_weight, V, D, hidden.stride(0), C.stride(0), scale, groups, n_blocks, BD=BD, BK=BKP,
        TMA=tma, SOME=drop_hidden, VISIT=visit, PAIR=pair, ROUND=accumulate == "input", PRECISION=precision,
        CHUNK=CHUNK, num_warps=product_warps, num_stages=product_stages,
    )  # fmt: skip
    # with an order dC overwrites the rows of C that dE needs, so it waits for dE
    multiply = product(HIDDEN=need_hidden, WEIGHT=need_weight and not ordered)
    multiply_weight = product(HIDDEN=False, WEIGHT=need_weight)
    sum_up = Repeated(
        products.bias_kernel, groups, control, group_blocks, group_counts, offsets, plan, WAVE, waves, scratch, d_bias,
        V, n_blocks, VISIT=visit, num_warps=4,
    )  # fmt: skip
    for wave in range(waves):
        if ordered:
            sort(wave)
        write_q(wave)
        if flag:
            lists(wave)
        if need_hidden or (need_weight and not ordered):
            multiply(wave)
        if need_weight and ordered:
            multiply_weight(wave)
        if need_bias:
            sum_up(wave)
    if need_bias:
        d_bias = d_bias.to(bias.dtype)
    if ordered:
        del sort, lists, write_q, product, multiply, multiply_weight, sum_up
        del alive, rank, row_slots, row_groups, row_starts, slot_blocks, group_blocks, kept, remainder
        free = scratch.view(-1)[V * D :]
        room = order_room(afforded, bound, [scratch.nbytes, d_hidden.nbytes], vectors + order.nbytes)
        if need_weight:
            unsort_rows(d_weight, order, free, room)
        else:
            d_weight = empty(0, dtype=dtype)
        if need_bias:
            unsort_rows(d_bias[:, None], order, free, room)
    if need_hidden and not hidden_fp32:
        d_hidden = d_hidden.to(dtype)
    return d_hidden, d_weight, d_bias


def triton_dtype(dtype: torch.dtype):
    """The Triton name of a floating dtype."""
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]
