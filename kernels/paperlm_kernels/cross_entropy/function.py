"""`linear_cross_entropy`: the cross-entropy of `F.linear(hidden, weight, bias)` without the logits of all tokens.

    nll_n = L_n - A_{n, target_n},   A = cap(a hidden weight^T + bias),   L_n = log sum_v exp(A_nv)

A core (Triton kernels, the chunked reference, or materialised logits) gives L and the target logit of each token, both
differentiable; what follows - z-loss, reduction, the mean over the tokens that count - is PyTorch on N numbers. Nothing
here waits for the device: the number of counting tokens stays there.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paperlm_kernels.backends import without_autocast
from paperlm_kernels.cross_entropy import options as checks
from paperlm_kernels.cross_entropy.dense import dense_core, dense_nll
from paperlm_kernels.cross_entropy.parallel import check_slice, vocabulary_size
from paperlm_kernels.cross_entropy.reference import linear_cross_entropy_core as reference_core

DEBUG = "PAPERLM_KERNELS_DEBUG"
KEPT_SHARE = 0.05
KEPT_BYTES = 1 << 30

log = logging.getLogger(__name__)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    shift: int = 0,
    z_loss: float = 0.0,
    return_lse: bool = False,
    filter_eps: float | str | None = "auto",
    filter_grads: str = "both",
    accumulate: str = "fp32",
    memory: str = "balanced",
    vocab_order: str | Tensor | None = None,
    process_group: object = None,
    vocab_range: tuple[int, int] | None = None,
    preset: str | None = None,
    backend: str = "auto",
    keep_logits: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of a linear classifier; the value of `F.cross_entropy(F.linear(hidden, weight, bias).float(),
    target)`.

    Args:
        hidden: (..., D) embeddings, floating point.
        weight: (V, D) classifier as in `nn.Linear`, of hidden's dtype (any under autocast).
        target: (...) ids, int32 or int64.
        bias: (V,), of the same dtype; added before the cap.
        ignore_index: targets of this value do not count: their loss and log-sum-exp read 0, their gradient rows are
            zero.
        softcap: s in `s tanh(z / s)`, or None.
        logit_scale: factor on `hidden weight^T`, before the bias.
        reduction: "mean" over the tokens that count (NaN with zero gradients if none does), "sum", or "none".
        shift: the embedding at position t predicts the target at t + shift, along the last axis of target.
        z_loss: weight of the squared log-sum-exp, added to each token's loss before the reduction.
        return_lse: return (loss, lse); both differentiable.
        filter_eps: drop 128 x 128 tiles of the logits' gradient in which every probability is below it and that hold no
            target. "auto": 2^-12 in bf16, 2^-15 in fp16, 2^-28 in fp32; None: exact. A number of 0 or more, below 1.
            Where both gradients are filtered, the 16-bit kernels also round probabilities below a 4096th of it to zero.
        filter_grads: which gradient the filter touches: "both", "hidden", "weight" (with the bias) or "none".
        accumulate: "fp32", or "input": running sums of the gradients in the input's dtype, as published. For study;
            with a logit_scale the sum of hidden's gradient is rounded before it and after it, once more a wave.
        memory: what the kernels may hold: "fast", "balanced" or "lean".
        vocab_order: order in which ids are grouped into tiles: None (natural), "mean_logit" (ascending), or a
            permutation. With an order every tile is recomputed: it pays only where it saves more tiles than that. A
            frozen weight then takes the memory of its gradient all the same.
        process_group, vocab_range: vocabulary parallel. weight and bias are the rows [start, stop) = vocab_range of
            this rank (`vocab_slice` gives them), targets are global ids, all ranks see the same tokens; a vocab_order
            tensor permutes the local rows. The loss and the gradient of hidden are those of the whole vocabulary, on
            every rank.
        preset: a variant of the paper by name; see the table in `paperlm_kernels.cross_entropy.options`. A keyword that
            differs both from its default and from the preset is an error.
        backend: "triton", "reference" (chunked PyTorch), "eager" or "compile" (both hold the logits, have exact
            gradients under "auto", and refuse an explicit filter), or "auto": Triton on GPUs of compute capability 8.0
            or newer, the reference elsewhere.
        keep_logits: let the Triton forward pass store its logits for the backward pass; None decides by their size
            beside the memory that is free at the first call of that size, without a filter and unless memory is "lean".
            The logits are rounded then, as in every loss that holds them, and ignored tokens take part in the products
            with gradients of zero. Like `memory` it is about the kernels: the other backends ignore both.

    Returns:
        The loss in fp32 (float64 for float64 inputs), also under autocast: a scalar, or with reduction "none" of the
        shape of target without its first `shift` columns. With return_lse also the log-sum-exp, of that shape, in every
        reduction.

    Raises:
        ValueError, TypeError: keywords or tensors that do not fit; the message names the fix. Target ids outside the
            vocabulary are found on the CPU (with a process_group only negative ones), and elsewhere, or against the
            vocabulary of all ranks, if the environment variable PAPERLM_KERNELS_DEBUG is 1; never under torch.compile.
        NotImplementedError: when the gradient is differentiated again; that of "eager" can be.

    Source: Cut Cross-Entropy, arXiv 2411.09009, section 4; the filter and the order of the vocabulary, 4.3.
    """
    checks.check_tensors(hidden, weight, target, bias)
    checks.check_choice("reduction", reduction)
    checks.check_keep_logits(keep_logits)
    checks.check_numbers(softcap, logit_scale, z_loss, shift, ignore_index)
    hidden, weight, bias = _autocast(hidden, weight, bias)
    checks.check_dtypes(hidden, weight, bias)
    vocab_start = check_slice(process_group, vocab_range, weight.shape[0])
    given = {
        "filter_eps": filter_eps,
        "filter_grads": filter_grads,
        "accumulate": accumulate,
        "memory": memory,
        "vocab_order": vocab_order,
        "backend": backend,
    }
    chosen = checks.resolve(preset, given, hidden.dtype, weight.shape[0])
    if weight.shape[0] == 0 and process_group is None:
        raise ValueError("weight has no rows, so there is nothing to choose from; pass (V, D) with V of 1 or more")

    _check_permutation(chosen.vocab_order, hidden.device)
    _check_ids(target, ignore_index, vocab_start, weight.shape[0], process_group)
    columns = max(target.shape[-1] - shift, 0) if target.ndim else 1
    ids = _internal_ids(target, ignore_index, shift).reshape(-1)
    flat = hidden.reshape(target.numel(), hidden.shape[-1])
    where = _automatic(flat) if chosen.backend == "auto" else chosen.backend
    common = {"softcap": softcap, "logit_scale": logit_scale}
    with without_autocast(hidden.device.type):
        if where in checks.DENSE_BACKENDS:
            if process_group is not None:
                raise ValueError(
                    f"backend {where!r} holds the whole vocabulary; use backend='auto' with a process_group"
                )
            if not return_lse and z_loss == 0:
                kind = "none" if reduction == "none" else "sum"
                nll = dense_nll(flat, weight, bias, ids, backend=where, reduction=kind, **common)
                return _reduced(nll, ids, target.shape, columns, reduction)
            lse, target_logit = dense_core(flat, weight, bias, ids, backend=where, **common)
        else:
            # Without a token or (a rank's empty slice) an id there is nothing to launch.
            core = reference_core if where == "reference" or 0 in (*flat.shape, *weight.shape) else _triton_core(flat)
            lse, target_logit = core(
                flat,
                weight,
                bias,
                ids,
                filter_eps=chosen.filter_eps,
                filter_grads=chosen.filter_grads,
                accumulate=chosen.accumulate,
                memory=chosen.memory,
                vocab_order=chosen.vocab_order,
                keep_logits=_keep(keep_logits, chosen, flat, weight),
                process_group=process_group,
                vocab_start=vocab_start,
                **common,
            )
    loss = lse - target_logit
    if z_loss:
        loss = loss + z_loss * lse.square()
    loss = _reduced(loss, ids, target.shape, columns, reduction)
    return (loss, _trimmed(lse, target.shape, columns)) if return_lse else loss


class LinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` with its keywords bound: `LinearCrossEntropyLoss(softcap=30.0)(hidden, weight, target,
    bias=None)`.

    Keywords are those of the function but bias, and are checked here already, the tensors when it is called.
    """

    def __init__(self, **keywords: object) -> None:
        super().__init__()
        known = {
            k: p.default
            for k, p in inspect.signature(linear_cross_entropy).parameters.items()
            if p.kind is p.KEYWORD_ONLY
        }
        known.pop("bias")
        for name in keywords:
            if name not in known:
                raise TypeError(checks.unknown("keyword", name, known))
        full = {**known, **keywords}
        checks.check_choice("reduction", full["reduction"])
        checks.check_keep_logits(full["keep_logits"])
        checks.check_numbers(*(full[k] for k in ("softcap", "logit_scale", "z_loss", "shift", "ignore_index")))
        order = full["vocab_order"]
        rows = order.numel() if isinstance(order, Tensor) else 1
        checks.resolve(full["preset"], {k: full[k] for k in checks.DEFAULTS}, torch.float32, rows)
        self.keywords = keywords

    def forward(
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See `linear_cross_entropy`."""
        return linear_cross_entropy(hidden, weight, target, bias=bias, **self.keywords)

    def extra_repr(self) -> str:
        """Keywords that were given."""
        return ", ".join(f"{k}={v!r}" for k, v in self.keywords.items())


def compute_z_loss(
    lse: Tensor, target: Tensor | None = None, *, shift: int = 0, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Squared log-sum-exp, reduced over the tokens that count: the z-loss to be weighted and added.

    lse is what `linear_cross_entropy(..., return_lse=True)` returned, (...) float32 (float64 for float64 inputs);
    target, shift and ignore_index are what it was given. Without target every position counts. No counting token: mean
    is NaN, its gradient zero. Returns a scalar of lse's dtype, or lse's shape with reduction "none". Raises ValueError
    for an unknown reduction, and for an lse that has not the shape of target without its first `shift` columns.

    Source: PaLM, arXiv 2204.02311, section 5 (there with a weight of 1e-4).
    """
    checks.check_choice("reduction", reduction)
    squares = lse.square()
    if target is None:
        return squares if reduction == "none" else squares.sum() if reduction == "sum" else squares.mean()
    columns = max(target.shape[-1] - shift, 0) if target.ndim else 1
    shape = (*target.shape[:-1], columns) if target.ndim else target.shape
    if lse.shape != shape:
        raise ValueError(
            f"lse has the shape of target without its first {shift} columns, {tuple(shape)}, not {tuple(lse.shape)}"
        )
    counts = (target[..., shift:] if target.ndim else target) != ignore_index
    squares = torch.where(counts, squares, 0.0)
    if reduction == "none":
        return squares
    return squares.sum() if reduction == "sum" else _mean(squares.sum(), counts)


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs in the autocast dtype, as autocast casts them for a linear layer (float64 stays)."""
    device = hidden.device.type
    # torch.amp.is_autocast_available would say the same but breaks the graph of torch.compile up to 2.11
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.dtype.is_floating_point or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(dtype)

    return cast(hidden), cast(weight), cast(bias)


def _internal_ids(target: Tensor, ignore_index: int, shift: int) -> Tensor:
    """Targets shifted left, in the shape of target; -1 for ignored ones and in the last `shift` columns."""
    ids = torch.where(target == ignore_index, -1, target)
    if shift and target.ndim:
        shift = min(shift, target.shape[-1])
        ids = F.pad(ids[..., shift:], (0, shift), value=-1)
    return ids


def _trimmed(values: Tensor, shape: torch.Size, columns: int) -> Tensor:
    values = values.reshape(shape)
    return values[..., :columns] if shape else values


def _mean(total: Tensor, counts: Tensor) -> Tensor:
    """total / number of True; NaN if there is none, from a branch that carries no gradient."""
    count = counts.sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def _reduced(values: Tensor, ids: Tensor, shape: torch.Size, columns: int, reduction: str) -> Tensor:
    if reduction == "none":
        return _trimmed(values, shape, columns)
    return values.sum() if reduction == "sum" else _mean(values.sum(), ids >= 0)


def _check_permutation(order: object, device: torch.device) -> None:
    """Refuse a vocab_order on another device; that it is a permutation is checked where target ids are."""
    if not isinstance(order, Tensor):
        return
    if order.device != device:
        raise ValueError(
            f"vocab_order is on {order.device} and hidden on {device}; move it: vocab_order.to(hidden.device)"
        )
    if torch.compiler.is_compiling() or not (os.environ.get(DEBUG) == "1" or device.type == "cpu"):
        return
    if not torch.equal(order.sort().values, torch.arange(len(order), device=device, dtype=order.dtype)):
        raise ValueError("vocab_order is a permutation of the rows of weight, each once, e.g. from torch.argsort")


def _check_ids(target: Tensor, ignore_index: int, vocab_start: int, rows: int, process_group: object) -> None:
    """Refuse target ids outside the vocabulary: on the CPU always, elsewhere only in debug mode, which synchronizes."""
    debug = os.environ.get(DEBUG) == "1"
    if torch.compiler.is_compiling() or not (debug or target.device.type == "cpu"):
        return
    bound = rows
    if process_group is not None:
        # Only the ranks together know the size of the vocabulary.
        bound = vocabulary_size(vocab_start, rows, process_group, target.device) if debug else None
    wrong = (target != ignore_index) & (target < 0)
    if bound is not None:
        wrong |= (target != ignore_index) & (target >= bound)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        limit = f"[0, {bound})" if bound is not None else "0 and above"
        raise ValueError(
            f"target id {int(target[tuple(place)])} at {place} is not in {limit} and not ignore_index={ignore_index}; "
            "mask it with ignore_index, or check that tokenizer and weight belong together"
        )


def _automatic(hidden: Tensor) -> str:
    """Backend "auto"."""
    if not hidden.is_cuda:
        return "reference"
    why = _no_triton(hidden)
    if why is None:
        return "triton"
    if not torch.compiler.is_compiling():
        _warn_fallback(why)
    return "reference"


@cache
def _warn_fallback(why: str) -> None:
    log.warning("linear_cross_entropy runs in chunked PyTorch on this GPU, many times slower than its kernels: %s", why)


def _no_triton(hidden: Tensor) -> str | None:
    """Why the kernels cannot run on a tensor of a GPU, or None."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(hidden.device) < (8, 0):
        return "it is not an NVIDIA GPU of compute capability 8.0 or newer"
    if hidden.dtype == torch.float64:
        return "the kernels take no float64"
    # torch.compile on a GPU cannot do without triton, and cannot trace the look-up.
    return None if torch.compiler.is_compiling() else _import_error()


@cache
def _import_error() -> str | None:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    try:
        from paperlm_kernels.cross_entropy import ops  # noqa: F401
    except ImportError as error:
        return f"the kernels cannot be imported ({error})"
    return None


def _triton_core(hidden: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    if not hidden.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "backend 'triton' runs on a GPU; use backend='reference' for tensors on the CPU, or set TRITON_INTERPRET=1 "
            "to interpret the kernels there"
        )
    if not hidden.is_cuda and hidden.dtype == torch.bfloat16:
        raise ValueError(
            "Triton's interpreter multiplies bfloat16 wrongly; interpret the kernels in float16 or float32"
        )
    from paperlm_kernels.cross_entropy.ops import linear_cross_entropy_core

    return linear_cross_entropy_core


def _keep(keep_logits: bool | None, chosen: checks.Options, hidden: Tensor, weight: Tensor) -> bool:
    """Whether the forward pass may store its logits: as told, else when unfiltered, not lean, and they are small."""
    if keep_logits is not None:
        return keep_logits
    if chosen.filter_eps is not None or chosen.memory == "lean" or not hidden.is_cuda:
        return False
    size = hidden.element_size() * hidden.shape[0] * weight.shape[0]
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return size < KEPT_BYTES
    return _fits(hidden.device, size)


@cache
def _fits(device: torch.device, size: int) -> bool:
    """Decided once per size, so that a run does not change its rounding when memory fills up."""
    return size < KEPT_SHARE * torch.cuda.mem_get_info(device)[0]
