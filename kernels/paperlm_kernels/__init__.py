"""Fused operations of the project, importable on their own: they depend on PyTorch and, on a GPU, on Triton.

    from paperlm_kernels import linear_cross_entropy
    loss = linear_cross_entropy(hidden, lm_head.weight, labels, shift=1)

`use_fused_loss` puts the loss into one instance of a Hugging Face model; it alone needs transformers.
"""

from paperlm_kernels.cross_entropy import LinearCrossEntropyLoss, compute_z_loss, linear_cross_entropy

__all__ = ["LinearCrossEntropyLoss", "compute_z_loss", "linear_cross_entropy", "use_fused_loss"]


def __getattr__(name: str) -> object:
    """`use_fused_loss`, imported when it is asked for."""
    if name == "use_fused_loss":
        from paperlm_kernels.huggingface import use_fused_loss

        return use_fused_loss
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
