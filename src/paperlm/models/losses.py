"""The training losses of a run: cross-entropy from materialised logits, or one fused with the head.

The fused ones are paperlm_kernels.linear_cross_entropy: Triton kernels on a GPU, chunked PyTorch elsewhere. They do not
hold the logits of all tokens, unless the name says so. Names are those of the variants in Cut Cross-Entropy (arXiv
2411.09009, Table 1).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from paperlm_kernels import linear_cross_entropy
from torch import Tensor

from paperlm.errors import SpecError, unknown

MATERIALISED = "cross_entropy"
FUSED: dict[str, dict[str, Any]] = {
    # The published kernel: both gradients filtered, ids sorted by mean logit, sums rounded to the inputs' dtype.
    "cce": {"preset": "cce"},
    # Both filtered, sums in float32: differs from the next by the filter of the head's gradient alone.
    "cce_kahan": {"preset": "cce_kahan"},
    # The head's gradient unfiltered: what the paper pre-trains with.
    "cce_kahan_full_c": {"preset": "cce_kahan_full_c"},
    "cce_kahan_full_e": {"preset": "cce_kahan_full_e"},
    # No filter; logits computed again in the backward pass, or kept for it, whatever their size.
    "cce_exact": {"preset": "cce_exact", "keep_logits": False},
    "cce_exact_kept": {"preset": "cce_exact", "keep_logits": True},
}
"Name of a fused loss -> keywords of linear_cross_entropy."

KEPT = "cce_exact_kept"
UNFILTERED = (MATERIALISED, "cce_exact", KEPT)
ExactLoss = Literal["auto", "torch", "kernels"]
"How the exact loss of a run (MATERIALISED) is computed. kernels: the logits are kept where the kernels can keep them."


def executed_loss(
    loss: str, choice: ExactLoss, vocab_size: int, hidden_size: int, numerics: str, device: torch.device
) -> str:
    """The loss that a run's updates compute: its own, or KEPT in place of MATERIALISED, which differs by rounding.

    loss: RunConfig.loss; choice: Execution.exact_loss. auto takes the kernels where they were measured to train faster
    than the compiled loss: on a Hopper GPU, in bfloat16, with about 32,000 ids, at the sizes 71M to 350M (there hardly)
    and not at 1B (paper_tables/records/bench/pretrain.jsonl).
    """
    if loss != MATERIALISED or choice == "torch":
        return loss
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    # rows of logits that are no multiple of 16 bytes cannot be kept
    ids = 30_000 <= vocab_size <= 33_000 and vocab_size % 8 == 0
    measured = hopper and numerics == "pure_bf16" and ids and hidden_size <= 1024
    return KEPT if choice == "kernels" or measured else loss


def summed_fused_loss(hidden: Tensor, weight: Tensor, labels: Tensor, loss: str, ignore_index: int) -> Tensor:
    """Sum of next-token cross-entropies, float32.

    hidden (B, S, D); weight (V, D) of the head; labels (B, S), ids with ignore_index where they do not count: position
    t predicts label t + 1. Raises SpecError for a loss that is not in FUSED.
    """
    if loss not in FUSED:
        raise SpecError(unknown("loss", loss, [MATERIALISED, *FUSED]))
    # The last position predicts nothing. As an ignored token it would make the kernels gather the rows between; a copy
    # without it, where every token counts, they read in place.
    return linear_cross_entropy(
        hidden[:, :-1], weight, labels[:, 1:], reduction="sum", ignore_index=ignore_index, **FUSED[loss]
    )
