"""The training losses of a run: cross-entropy from materialised logits, or one fused with the head.

The fused ones are paperlm_kernels.linear_cross_entropy: Triton kernels on a GPU, chunked PyTorch elsewhere. They do not
hold the logits of all tokens, unless the name says so. Names are those of the variants in Cut Cross-Entropy (arXiv
2411.09009, Table 1).
"""

from __future__ import annotations

from typing import Any

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

UNFILTERED = (MATERIALISED, "cce_exact", "cce_exact_kept")


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
