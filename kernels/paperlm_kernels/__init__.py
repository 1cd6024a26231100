"""Fused operations of the project, importable on their own: they depend on PyTorch and, on a GPU, on Triton.

    from paperlm_kernels import linear_cross_entropy
    loss = linear_cross_entropy(hidden, lm_head.weight, labels, shift=1)

`TernaryLinear`, `rmsnorm_quantize`, `rmsnorm_fake_quantize` and `QuantizedKV` are for models with ternary weights and
activations in few bits; each has a folder with more.
`paperlm_kernels.neuzip` packs weights into fewer bits, with and without loss.

`paperlm_kernels.stored` keeps the weights of any model packed between their uses, and trains it so.

`use_fused_loss` puts the loss into one instance of a Hugging Face model; it alone needs transformers. Each name is
imported when it is asked for, so that `paperlm_kernels.behaviour` can be read without PyTorch.
"""

import importlib

_MODULES = {
    "LinearCrossEntropyLoss": "cross_entropy",
    "QuantizedKV": "kv_attention",
    "TernaryLinear": "ternary_linear",
    "compute_z_loss": "cross_entropy",
    "linear_cross_entropy": "cross_entropy",
    "rmsnorm_fake_quantize": "rmsnorm_quantize.function",
    "use_fused_loss": "huggingface",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # from now on an ordinary attribute, which torch.compile can trace
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
