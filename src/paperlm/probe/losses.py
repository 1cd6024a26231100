"""Next-token losses of any causal model, and the perplexity of a text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paperlm.evaluate.perplexity import ValidationLosses
from paperlm.probe.blocks import require_decoder

IGNORED = -100
"Label of padding."


def next_token_losses(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy of each next token in nats, float32, (B, S-1), 0 where that token is padding.

    ids, mask: (B, S), padded on the right; position t predicts token t+1.
    """
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORED)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view(targets.shape)


@torch.no_grad()
def sequence_losses(model: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> ValidationLosses:
    """Summed next-token losses of each sequence. Raises JobError for a model that predicts no next token."""
    require_decoder(model)
    sums, counts = [], []
    for ids, mask in batches:
        sums.append(next_token_losses(model, ids, mask).double().sum(1).cpu().numpy())
        counts.append(mask[:, 1:].sum(1).cpu().numpy())
    return ValidationLosses(np.concatenate(sums), np.concatenate(counts))
