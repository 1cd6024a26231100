"""Backends "eager" and "compile": the same loss through a materialised logit matrix, as stock models compute it.

`logits = cap(a hidden weight^T + bias)` in the input's dtype, then fp32, then PyTorch's cross-entropy. These are the
baselines that Table 1 of arXiv 2411.09009 compares with, and the fastest path for a small vocabulary. Gradients are
exact: nothing is filtered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, logit_scale: float
) -> Tensor:
    """(N, V) in fp32 (float64 for float64 inputs); scale, bias and cap act in the input's dtype, as in stock models."""
    if logit_scale == 1.0:
        logits = F.linear(hidden, weight, bias)
    else:
        logits = F.linear(hidden, weight) * logit_scale
        logits = logits if bias is None else logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits if logits.dtype == torch.float64 else logits.float()


def _nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    softcap: float | None,
    logit_scale: float,
    reduction: str,
) -> Tensor:
    logits = dense_logits(hidden, weight, bias, softcap, logit_scale)
    return F.cross_entropy(logits, target.long(), ignore_index=-1, reduction=reduction)


def _lse_and_target_logit(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, softcap: float | None, logit_scale: float
) -> tuple[Tensor, Tensor]:
    logits = dense_logits(hidden, weight, bias, softcap, logit_scale)
    counts = target >= 0
    picked = logits.gather(1, target.clamp(min=0).long()[:, None])[:, 0]
    return torch.where(counts, logits.logsumexp(1), 0.0), torch.where(counts, picked, 0.0)


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)


def _for_backend(function: Callable, backend: str) -> Callable:
    return _compiled(function) if backend == "compile" and not torch.compiler.is_compiling() else function


def dense_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    backend: str,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "sum",
) -> Tensor:
    """Sum, or (N,) with reduction "none", of the negative log-likelihoods; targets of -1 are ignored."""
    return _for_backend(_nll, backend)(hidden, weight, bias, target, softcap, logit_scale, reduction)


def dense_core(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    backend: str,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and target logit, (N,) each, fp32 or float64, 0 where ignored; PyTorch differentiates them."""
    return _for_backend(_lse_and_target_logit, backend)(hidden, weight, bias, target, softcap, logit_scale)
