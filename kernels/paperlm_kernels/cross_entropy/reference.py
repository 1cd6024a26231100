"""Linear cross-entropy in plain PyTorch, in chunks: the meaning of the operation, which the kernels are tested against.

With logits `Z = a E C^T + b`, `A = cap(Z)`, `L_n = log sum_v exp(A_nv)` and `S = exp(A - L)`, upstream gradients u of L
and w of the target logit give `dA = u S + w onehot`, `q = dA cap'(Z)` with `cap'(z) = 1 - (A/s)^2`, and from it `dE = a
q C`, `dC = a q^T E`, `db = sum_n q`. Forward and backward walk over chunks of ids and of tokens and recompute the
logits, so that nothing of size tokens x vocabulary is ever held. On a CPU the chunks fit its cache: there the fourth
matrix product costs less than reading and writing all logits would.

Gradient filter (arXiv 2411.09009, section 4.3): the counting tokens, ignored ones left out, are cut into blocks of 128
and the ids, in the order given, into groups of 128. A tile is kept if it holds the target of one of its tokens or any
`S >= eps`. (The authors' code tests `|S - onehot|` and so loses the z-loss gradient of a target with S near 1; this
test does not.) `filter_grads` names the gradients that leave the other tiles out; the bias gradient goes with that of
the classifier.

All arithmetic is fp32 (float64 for float64 inputs); each gradient is rounded once to the input's dtype.
`accumulate="input"` rounds the running sums of dE and dC after every tile instead, as the published kernel does: a
study of that error, nothing more. The kernels also round the entries of q, in 16 bits with both gradients filtered
those below eps / 4096 to zero.

torch.compile calls the two passes as operators and does not look inside, so that a compiled function has the gradients
of the uncompiled one whatever the compiler makes of masks, and is compiled once for all sizes. (Inductor of PyTorch
2.13 compiled a mask of tiles wrongly on a CPU, without a word.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paperlm_kernels.backends import without_autocast
from paperlm_kernels.cross_entropy.order import mean_logit_order
from paperlm_kernels.cross_entropy.parallel import combine, reduce_hidden_gradient
from paperlm_kernels.once import differentiable_once

TILE = 128
# Tokens and ids of a chunk. On a CPU its logits take 1 MiB a thread, half of the second-level cache of a core of a
# server, and are read and written several times before they leave it; elsewhere a launch is what costs.
CPU_CHUNK, CPU_MOST_IDS = (256, 1024), 8192
DEVICE_CHUNK = (1024, 8192)


class Settings(NamedTuple):
    """What forward and backward both need besides tensors."""

    softcap: float | None
    logit_scale: float
    filter_eps: float | None
    filter_grads: str
    accumulate: str
    sort: bool
    process_group: object
    vocab_start: int


def linear_cross_entropy_core(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    filter_eps: float | None = None,
    filter_grads: str = "none",
    accumulate: str = "fp32",
    memory: str = "balanced",
    vocab_order: str | Tensor | None = None,
    keep_logits: bool = False,
    process_group: object = None,
    vocab_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and target logit of every token, (N,) each, fp32 or float64, 0 for ignored tokens; both
    differentiable once.

    hidden (N, D), weight (V, D), bias (V,) or None, of one dtype; target (N,) of int32 or int64, -1 for ignored tokens.
    With a process group, weight and bias are the rows [vocab_start, vocab_start + V) and the results are global.
    `vocab_order` is a permutation of the rows of weight, or "mean_logit": ascending by the mean logit of the counting
    tokens. `memory` and `keep_logits` are for the kernels and change nothing here.
    """
    if filter_eps is None:
        filter_grads = "none"
    order = vocab_order if isinstance(vocab_order, Tensor) else None
    sort = vocab_order == "mean_logit" if order is None else False
    settings = Settings(softcap, logit_scale, filter_eps, filter_grads, accumulate, sort, process_group, vocab_start)
    return _LinearCrossEntropy.apply(hidden, weight, bias, target, order, settings)


def chunk_sizes(device: torch.device) -> tuple[int, int]:
    """Tokens and ids of a chunk, multiples of TILE."""
    if device.type != "cpu":
        return DEVICE_CHUNK
    tokens, ids = CPU_CHUNK
    return tokens, min(ids * torch.get_num_threads(), CPU_MOST_IDS)


def counting_rows(target: Tensor) -> Tensor:
    """Indices of the counting tokens in order; where the host does not know their number, the ignored ones follow."""
    ignored = target < 0
    rows = torch.argsort(ignored.to(torch.int8), stable=True)
    return rows[: target.numel() - int(ignored.sum())] if target.device.type == "cpu" else rows


def kept_tiles(softmax: Tensor, column: Tensor, here: Tensor, eps: float) -> Tensor:
    """Mask (row blocks, groups of ids) of the 128 x 128 tiles with a probability of `eps` or more, or with a target.

    softmax (rows, ids), whose last tiles may be smaller; column (rows,) of the targets that are `here`.
    """
    # By row first: the NaN of one token must not decide for the other tokens of its block.
    alive = _whole_tiles(softmax, 1).amax(2) >= eps
    alive |= here[:, None] & (column[:, None] // TILE == torch.arange(alive.shape[1], device=alive.device))
    return _whole_tiles(alive, 0).any(1)


def _whole_tiles(values: Tensor, axis: int) -> Tensor:
    """`values` with an axis cut into (tiles, TILE), the last tile filled with zeros."""
    missing = -values.shape[axis] % TILE
    if missing:  # without, F.pad would copy
        values = F.pad(values, (0, missing) if axis == 1 else (0, 0, 0, missing))
    return values.unflatten(axis, (-1, TILE))


def only_tiles(entries: Tensor, tiles: Tensor) -> Tensor:
    """`entries` (rows, ids) where their tile is True, 0 elsewhere; `entries` itself if the host sees that all are."""
    if tiles.device.type == "cpu" and tiles.all():
        return entries
    # Expanded by views: a mask made by repeat_interleave is what Inductor compiled wrongly.
    blocks, groups = tiles.shape
    mask = tiles[:, None, :, None].expand(blocks, TILE, groups, TILE).reshape(blocks * TILE, groups * TILE)
    return torch.where(mask[: entries.shape[0], : entries.shape[1]], entries, 0.0)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _spans(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


class _Tokens:
    """The tokens that take part: their index, embeddings in the accumulator's dtype, and the row of the classifier of
    each one's target, -1 where another rank has it or the token does not count."""

    def __init__(self, hidden: Tensor, target: Tensor, vocab_start: int, vocab: int) -> None:
        self.index = counting_rows(target)
        place = target[self.index].long()
        self.counts = place >= 0
        place = place - vocab_start
        self.place = torch.where(self.counts & (place >= 0) & (place < vocab), place, -1)
        # Ignored rows are zeroed, not only masked: 0 * NaN would reach the gradient of the classifier.
        self.hidden = torch.where(self.counts[:, None], hidden[self.index].to(_accumulator(hidden.dtype)), 0.0)

    def counting(self, values: Tensor, otherwise: float) -> Tensor:
        """(N,) values of these tokens."""
        return torch.where(self.counts, values[self.index], otherwise)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, logit_scale: float) -> Tensor:
    logits = hidden @ weight.T
    if logit_scale != 1.0:
        logits *= logit_scale
    if bias is not None:
        logits += bias
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _classifier(
    weight: Tensor, bias: Tensor | None, rows: slice | Tensor, accumulator: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    return weight[rows].to(accumulator), None if bias is None else bias[rows].to(accumulator)


def forward_pass(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, softcap: float | None, logit_scale: float,
    vocab_start: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Largest logit (-inf without ids), sum of exp(logit - largest), and target logit (0 where another rank has it), of
    these ids; (N,) each, of no meaning for ignored tokens."""
    tokens = _Tokens(hidden, target, vocab_start, weight.shape[0])
    accumulator = tokens.hidden.dtype
    token_chunk, vocab_chunk = chunk_sizes(hidden.device)
    highest = tokens.hidden.new_full(tokens.index.shape, -torch.inf)
    total, target_logit = torch.zeros_like(highest), torch.zeros_like(highest)
    for ids in _spans(weight.shape[0], vocab_chunk):
        w, b = _classifier(weight, bias, ids, accumulator)
        for at in _spans(len(highest), token_chunk):
            logits = _logits(tokens.hidden[at], w, b, softcap, logit_scale)
            column, here = _columns(tokens.place[at], ids)
            target_logit[at] += torch.where(here, logits.gather(1, column[:, None])[:, 0], 0.0)
            old = highest[at]
            new = torch.maximum(old, logits.amax(1))
            shift = torch.where(new == -torch.inf, 0.0, new)  # all -inf so far: nothing to subtract
            total[at] = total[at] * (old - shift).exp() + logits.sub_(shift[:, None]).exp_().sum(1)
            highest[at] = new
    everyone = hidden.new_zeros((3, target.numel()), dtype=accumulator)
    everyone[:, tokens.index] = torch.stack([highest, total, target_logit])
    return everyone[0].clone(), everyone[1].clone(), everyone[2].clone()


def backward_pass(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, order: Tensor | None, lse: Tensor,
    grad_lse: Tensor, grad_target_logit: Tensor, softcap: float | None, logit_scale: float, filter_eps: float | None,
    filter_grads: str, accumulate: str, sort: bool, vocab_start: int, need: list[bool], wide_hidden: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of hidden, weight and bias, in the inputs' dtype, empty where `need` says no; that of hidden in the
    accumulator's dtype with `wide_hidden`. order: permutation of weight's rows that groups the ids into tiles; with
    `sort`, that by the mean logit."""
    tokens = _Tokens(hidden, target, vocab_start, weight.shape[0])
    accumulator = tokens.hidden.dtype
    token_chunk, vocab_chunk = chunk_sizes(hidden.device)
    if sort:
        order = mean_logit_order(hidden, weight, bias, target, logit_scale)
    if order is not None and len(order):
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device)
        place = torch.where(tokens.place >= 0, rank[tokens.place], -1)
    else:
        place = tokens.place
    lse = tokens.counting(lse, torch.inf)  # of ignored tokens every probability is 0
    grad_lse, grad_target_logit = (tokens.counting(g, 0.0) for g in (grad_lse, grad_target_logit))
    rounding = hidden.dtype if accumulate == "input" and hidden.dtype != accumulator else None
    d_tokens = torch.zeros_like(tokens.hidden)
    d_weight = weight.new_empty(weight.shape) if need[1] else weight.new_empty(0)
    d_bias = bias.new_empty(bias.shape) if need[2] else weight.new_empty(0)
    for ids in _spans(weight.shape[0], vocab_chunk):
        rows = ids if order is None else order[ids]
        w, b = _classifier(weight, bias, rows, accumulator)
        # Transposed, (D, ids): with q^T as its left factor the product takes some BLAS libraries twice as long.
        d_w, d_b = w.new_zeros(w.shape[::-1]), w.new_zeros(len(w))
        for at in _spans(len(place), token_chunk):
            entries = _logits(tokens.hidden[at], w, b, softcap, logit_scale)
            slope = None if softcap is None else (entries / softcap).square_().neg_().add_(1)
            entries.sub_(lse[at, None]).exp_()
            column, here = _columns(place[at], ids)
            tiles = kept_tiles(entries, column, here, filter_eps) if filter_eps is not None else None
            entries.mul_(grad_lse[at, None])
            entries.scatter_add_(1, column[:, None], torch.where(here, grad_target_logit[at], 0.0)[:, None])
            if slope is not None:
                entries.mul_(slope)
            kept = entries if tiles is None else only_tiles(entries, tiles)
            for_hidden = kept if filter_grads in ("both", "hidden") else entries
            for_weight = kept if filter_grads in ("both", "weight") else entries
            if need[0]:
                _add_product(d_tokens[at], for_hidden, w, logit_scale, rounding)
            if need[1]:
                _add_product(d_w, tokens.hidden[at].T, for_weight, logit_scale, rounding)
            if need[2]:
                d_b += for_weight.sum(0)
        if need[1]:
            d_weight[rows] = d_w.T.to(weight.dtype)
        if need[2]:
            d_bias[rows] = d_b.to(bias.dtype)
    if not need[0]:
        return hidden.new_empty(0), d_weight, d_bias
    d_hidden = hidden.new_zeros(hidden.shape, dtype=accumulator if wide_hidden else hidden.dtype)
    d_hidden[tokens.index] = d_tokens.to(d_hidden.dtype)
    return d_hidden, d_weight, d_bias


def _columns(place: Tensor, ids: slice) -> tuple[Tensor, Tensor]:
    """Column of each target in the chunk `ids`, 0 where it is in none, and whether it is in one."""
    here = (place >= ids.start) & (place < ids.stop)
    return torch.where(here, place - ids.start, 0), here


def _add_product(total: Tensor, left: Tensor, right: Tensor, factor: float, rounding: torch.dtype | None) -> None:
    """`total += factor * left @ right`; with `rounding`, the sum is rounded to that dtype after every 128 terms."""
    if rounding is None:
        total.addmm_(left, right, alpha=factor)
        return
    for part, rows in zip(left.split(TILE, 1), right.split(TILE), strict=True):
        total.addmm_(part, rows, alpha=factor)
        total.copy_(total.to(rounding))


forward_op = torch.library.custom_op("paperlm_kernels::reference_forward", forward_pass, mutates_args=())
backward_op = torch.library.custom_op("paperlm_kernels::reference_backward", backward_pass, mutates_args=())


@forward_op.register_fake
def _(hidden, weight, bias, target, softcap, logit_scale, vocab_start):
    return tuple(hidden.new_empty(target.shape, dtype=_accumulator(hidden.dtype)) for _ in range(3))


@backward_op.register_fake
def _(
    hidden, weight, bias, target, order, lse, grad_lse, grad_target_logit, softcap, logit_scale, filter_eps,
    filter_grads, accumulate, sort, vocab_start, need, wide_hidden,
):  # fmt: skip
    return (
        hidden.new_empty(hidden.shape, dtype=lse.dtype if wide_hidden else hidden.dtype)
        if need[0]
        else hidden.new_empty(0),
        weight.new_empty(weight.shape) if need[1] else weight.new_empty(0),
        bias.new_empty(bias.shape) if need[2] else weight.new_empty(0),
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, order, settings):
        run = forward_op if torch.compiler.is_compiling() else forward_pass
        with without_autocast(hidden.device.type):
            highest, total, target_logit = run(
                hidden, weight, bias, target, settings.softcap, settings.logit_scale, settings.vocab_start
            )
        lse = highest + total.log()
        if settings.process_group is not None:
            lse, target_logit = combine(highest, total, target_logit, settings.process_group)
        lse = torch.where(target >= 0, lse, 0.0)
        ctx.settings = settings
        ctx.save_for_backward(hidden, weight, bias, target, lse, None if order is None else order.long())
        return lse, target_logit

    @staticmethod
    @differentiable_once("linear_cross_entropy", "use backend='eager' (it holds the logits)")
    def backward(ctx, grad_lse, grad_target_logit):
        hidden, weight, bias, target, lse, order = ctx.saved_tensors
        settings, need = ctx.settings, [bool(n) for n in ctx.needs_input_grad[:3]]
        run = backward_op if torch.compiler.is_compiling() else backward_pass
        with without_autocast(hidden.device.type):
            d_hidden, d_weight, d_bias = run(
                hidden, weight, bias, target, order, lse, grad_lse, grad_target_logit, settings.softcap,
                settings.logit_scale, settings.filter_eps, settings.filter_grads, settings.accumulate,
                settings.sort, settings.vocab_start, need, settings.process_group is not None,
            )  # fmt: skip
        if need[0] and settings.process_group is not None:
            d_hidden = reduce_hidden_gradient(d_hidden, settings.process_group).to(hidden.dtype)
        gradients = (d_hidden, d_weight, d_bias)
        return *(g if wanted else None for g, wanted in zip(gradients, need, strict=True)), None, None, None
