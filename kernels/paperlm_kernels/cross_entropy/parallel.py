"""Vocabulary parallel: every rank owns a slice of the classifier's rows and sees all tokens.

With rank r owning ids [a_r, b_r), the log-sum-exp is the maximum over ranks plus the logarithm of the sum of
`sum_r exp(max_r - max)`; the target logit comes from the one rank that owns the id; the gradient of the embeddings is
the sum over ranks, and the gradient of the classifier stays local. One all-gather of 3 N numbers carries all of the
forward pass, and combining it in rank order makes the result the same on every rank and on every run.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_slice(rank: int, world: int, vocab: int) -> tuple[int, int]:
    """Ids [start, stop) of a rank: equal slices, the first `vocab % world` ranks one id longer.

    >>> [vocab_slice(rank, 3, 8) for rank in range(3)]
    [(0, 3), (3, 6), (6, 8)]
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not one of a group of {world}")
    short, longer = divmod(vocab, world)
    start = rank * short + min(rank, longer)
    return start, start + short + (rank < longer)


def combine(maximum: Tensor, total: Tensor, target_logit: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Global log-sum-exp and target logit, both (N,), from those of the slices.

    `maximum` is the largest logit of the slice (-inf for an empty one), `total` the sum of exp(logit - maximum),
    natural base; `target_logit` is 0 where another rank owns the target. All (N,) and of one dtype.
    """
    mine = torch.stack([maximum, total, target_logit])
    world = dist.get_world_size(group)
    everyone = mine.new_empty(world, *mine.shape)
    dist.all_gather_into_tensor(everyone.flatten(0, 1), mine, group=group)
    maxima, totals, logits = everyone.unbind(1)
    highest = maxima.amax(0)
    return highest + (totals * (maxima - highest).exp()).sum(0).log(), logits.sum(0)


def reduce_hidden_gradient(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of the ranks' gradients of the embeddings, in the dtype given (fp32 or float64: sum before rounding)."""
    dist.all_reduce(gradient, group=group)
    return gradient


def check_slice(process_group: object, vocab_range: tuple[int, int] | None, rows: int) -> int:
    """First id of this rank's slice; 0 without a process group. ValueError if the two do not fit the weight."""
    if process_group is None:
        if vocab_range is not None:
            raise ValueError("vocab_range names a slice of the vocabulary; give process_group too, or drop it")
        return 0
    if vocab_range is None or len(vocab_range) != 2 or vocab_range[0] < 0 or vocab_range[1] - vocab_range[0] != rows:
        raise ValueError(
            f"with process_group, vocab_range is the (start, stop) of this rank's ids and stop - start = {rows}, the "
            f"rows of weight; got {vocab_range}. vocab_slice(rank, world, V) gives it"
        )
    return int(vocab_range[0])


def vocabulary_size(vocab_start: int, rows: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Ids of all ranks together. A collective that waits for the device: for checks only."""
    end = torch.tensor(vocab_start + rows, device=device)
    dist.all_reduce(end, op=dist.ReduceOp.MAX, group=group)
    return int(end)
