"""Cut Cross-Entropy (arXiv 2411.09009): the loss of a linear classifier that never holds the logits of all tokens.

One direction of imports: kernels (`ops`) or plain PyTorch (`reference`, `dense`) -> `function` -> users.
"""

from paperlm_kernels.cross_entropy.function import LinearCrossEntropyLoss, compute_z_loss, linear_cross_entropy
from paperlm_kernels.cross_entropy.parallel import vocab_slice

__all__ = ["LinearCrossEntropyLoss", "compute_z_loss", "linear_cross_entropy", "vocab_slice"]
