"""Linear cross-entropy in plain PyTorch, in chunks: the meaning of the operation, which the kernels are tested against.

With logits `Z = a E C^T + b`, `A = cap(Z)`, `L_n = log sum_v exp(A_nv)` and `S = exp(A - L)`, upstream gradients u of L
and w of the target logit give `dA = u S + w onehot`, `q = dA cap'(Z)` with `cap'(z) = 1 - (A/s)^2`, and from it `dE = a
q C`, `dC = a q^T E`, `db = sum_n q`. Forward and backward walk over chunks of tokens and of ids and recompute the
logits, so that nothing of size tokens x vocabulary is ever held.

Gradient filter (arXiv 2411.09009, section 4.3): the counting tokens, ignored ones left out, are cut into blocks of 128
and the ids, in the order given, into groups of 128. A tile is kept if it holds the target of one of its tokens or any
`S >= eps`. (The authors' code tests `|S - onehot|` and so loses the z-loss gradient of a target with S near 1; this
test does not.) `filter_grads` names the gradients that leave the other tiles out; the bias gradient goes with that of
the classifier.

All arithmetic is fp32 (float64 for float64 inputs); each gradient is rounded once to the input's dtype.
`accumulate="input"` rounds the running sums of dE and dC after every tile instead, as the published kernel does: a
study of that error, nothing more. The kernels also round the entries of q, in 16 bits with both gradients filtered
those below eps / 4096 to zero.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from paperlm_kernels.cross_entropy.once import differentiable_once
from paperlm_kernels.cross_entropy.order import mean_logit_order
from paperlm_kernels.cross_entropy.parallel import combine, reduce_hidden_gradient

TILE = 128
CHUNK_TOKENS = 1024
CHUNK_VOCAB = 8192


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
    chunk_tokens: int
    chunk_vocab: int


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
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and target logit of every token, (N,) each, fp32 or float64, 0 for ignored tokens; both
    differentiable once.

    hidden (N, D), weight (V, D), bias (V,) or None, of one dtype; target (N,) of int32 or int64, -1 for ignored tokens.
    With a process group, weight and bias are the rows [vocab_start, vocab_start + V) and the results are global.
    `vocab_order` is a permutation of the rows of weight, or "mean_logit": ascending by the mean logit of the counting
    tokens. `memory` and `keep_logits` are for the kernels and change nothing here. Chunks are multiples of 128.
    """
    chunk_tokens, chunk_vocab = chunk_tokens or CHUNK_TOKENS, chunk_vocab or CHUNK_VOCAB
    if chunk_tokens % TILE or chunk_vocab % TILE:
        raise ValueError(f"chunk_tokens and chunk_vocab are multiples of {TILE}, not {chunk_tokens} and {chunk_vocab}")
    if filter_eps is None:
        filter_grads = "none"
    order = vocab_order if isinstance(vocab_order, Tensor) else None
    sort = vocab_order == "mean_logit" if order is None else False
    settings = Settings(
        softcap,
        logit_scale,
        filter_eps,
        filter_grads,
        accumulate,
        sort,
        process_group,
        vocab_start,
        chunk_tokens,
        chunk_vocab,
    )
    return _LinearCrossEntropy.apply(hidden, weight, bias, target, order, settings)


def without_autocast(device_type: str) -> AbstractContextManager:
    """Autocast off, on devices that have it."""
    # torch.amp.is_autocast_available would say it, but breaks the graph of torch.compile up to 2.11
    return torch.autocast(device_type, enabled=False) if device_type in ("cpu", "cuda") else nullcontext()


def counting_rows(target: Tensor) -> Tensor:
    """Indices of the counting tokens in order; where the host does not know their number, the ignored ones follow."""
    ignored = target < 0
    rows = torch.argsort(ignored.to(torch.int8), stable=True)
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        rows = rows[: target.numel() - int(ignored.sum())]
    return rows


def kept_tiles(alive: Tensor) -> Tensor:
    """Mask (rows, ids) that is True in every 128 x 128 tile in which `alive` is True anywhere."""
    rows, ids = alive.shape
    padded = torch.nn.functional.pad(alive, (0, -ids % TILE, 0, -rows % TILE))
    tiles = padded.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).any(3).any(1)
    return tiles.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[:rows, :ids]


class _Rows:
    """The tokens of a chunk: their index, embeddings, targets, and which of them count."""

    def __init__(self, hidden: Tensor, target: Tensor, index: Tensor, accumulator: torch.dtype) -> None:
        self.index = index
        self.target = target[index]
        self.counts = self.target >= 0
        # Ignored rows are zeroed, not only masked: 0 * NaN would reach the gradient of the classifier.
        self.hidden = torch.where(self.counts[:, None], hidden[index].to(accumulator), 0.0)

    def hits(self, ids: Tensor, vocab_start: int) -> Tensor:
        """(rows, ids) mask of the targets."""
        return (self.target[:, None] - vocab_start == ids) & self.counts[:, None]


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    logits = hidden @ weight.T
    if settings.logit_scale != 1.0:
        logits = logits * settings.logit_scale
    if bias is not None:
        logits = logits + bias
    return logits if settings.softcap is None else settings.softcap * torch.tanh(logits / settings.softcap)


def _chunks(order: Tensor, weight: Tensor, bias: Tensor | None, size: int, accumulator: torch.dtype):
    """Ids, weight rows and bias of each chunk of the vocabulary, in order."""
    for ids in order.split(size) if order.numel() else ():
        yield ids, weight[ids].to(accumulator), None if bias is None else bias[ids].to(accumulator)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, order, settings):
        accumulator = _accumulator(hidden.dtype)
        natural = torch.arange(weight.shape[0], device=weight.device)
        index = counting_rows(target)
        highest = hidden.new_full(target.shape, -torch.inf, dtype=accumulator)
        total, target_logit = torch.zeros_like(highest), torch.zeros_like(highest)
        with without_autocast(hidden.device.type):
            for chunk in index.split(settings.chunk_tokens):
                rows = _Rows(hidden, target, chunk, accumulator)
                for ids, w, b in _chunks(natural, weight, bias, settings.chunk_vocab, accumulator):
                    logits = _logits(rows.hidden, w, b, settings)
                    old = highest[chunk]
                    new = torch.maximum(old, logits.amax(1))
                    shift = torch.where(new == -torch.inf, 0.0, new)  # all -inf so far: nothing to subtract
                    total[chunk] = total[chunk] * (old - shift).exp() + (logits - shift[:, None]).exp().sum(1)
                    highest[chunk] = new
                    target_logit[chunk] += torch.where(rows.hits(ids, settings.vocab_start), logits, 0.0).sum(1)
        lse = highest + total.log()
        if settings.process_group is not None:
            lse, target_logit = combine(highest, total, target_logit, settings.process_group)
        lse = torch.where(target >= 0, lse, 0.0)
        if settings.sort:
            order = mean_logit_order(hidden, weight, bias, target, settings.logit_scale)
        ctx.settings = settings
        ctx.save_for_backward(hidden, weight, bias, target, lse, natural if order is None else order.long(), index)
        return lse, target_logit

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_lse, grad_target_logit):
        hidden, weight, bias, target, lse, order, index = ctx.saved_tensors
        settings, accumulator = ctx.settings, lse.dtype
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        d_hidden = hidden.new_zeros(hidden.shape, dtype=accumulator) if want_hidden else None
        d_weight = weight.new_zeros(weight.shape, dtype=accumulator) if want_weight else None
        d_bias = bias.new_zeros(bias.shape, dtype=accumulator) if want_bias else None
        rounding = hidden.dtype if settings.accumulate == "input" else None
        with without_autocast(hidden.device.type):
            for chunk in index.split(settings.chunk_tokens):
                rows = _Rows(hidden, target, chunk, accumulator)
                g_lse = torch.where(rows.counts, grad_lse[chunk], 0.0)[:, None]
                g_logit = torch.where(rows.counts, grad_target_logit[chunk], 0.0)[:, None]
                d_rows = torch.zeros_like(rows.hidden)
                for ids, w, b in _chunks(order, weight, bias, settings.chunk_vocab, accumulator):
                    logits = _logits(rows.hidden, w, b, settings)
                    softmax = torch.where(rows.counts[:, None], (logits - lse[chunk, None]).exp(), 0.0)
                    hits = rows.hits(ids, settings.vocab_start)
                    grad = g_lse * softmax + torch.where(hits, g_logit, 0.0)
                    if settings.softcap is not None:
                        grad = grad * (1 - (logits / settings.softcap).square())
                    kept = grad
                    if settings.filter_grads != "none":
                        kept = torch.where(kept_tiles((softmax >= settings.filter_eps) | hits), grad, 0.0)
                    for_hidden = kept if settings.filter_grads in ("both", "hidden") else grad
                    for_weight = kept if settings.filter_grads in ("both", "weight") else grad
                    if want_hidden:
                        d_rows = _add_tiles(d_rows, for_hidden * settings.logit_scale, w, rounding)
                    if want_weight:
                        scaled = for_weight.T * settings.logit_scale
                        d_weight[ids] = _add_tiles(d_weight[ids], scaled, rows.hidden, rounding)
                    if want_bias:
                        d_bias[ids] += for_weight.sum(0)
                if want_hidden:
                    d_hidden[chunk] = d_rows
        if want_hidden and settings.process_group is not None:
            d_hidden = reduce_hidden_gradient(d_hidden, settings.process_group)
        gradients = (g if g is None else g.to(hidden.dtype) for g in (d_hidden, d_weight, d_bias))
        return *gradients, None, None, None


def _add_tiles(total: Tensor, left: Tensor, right: Tensor, rounding: torch.dtype | None) -> Tensor:
    """`total + left @ right`; with `rounding`, the sum is rounded to that dtype after every 128 terms."""
    if rounding is None:
        return total + left @ right
    for part, rows in zip(left.split(TILE, 1), right.split(TILE), strict=True):
        total = (total + part @ rows).to(rounding).to(total.dtype)
    return total
