"""Layers whose weight lies in a store: `StoredLinear`, `StoredConv1D` (GPT-2's), `StoredEmbedding`.

Their parameter `weight` has no elements, but the weight's dtype and device. A state dict has the values, under the
names of the plain layers, and loads into either. Code that computes with `layer.weight` gets an error (`Handle`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paperlm_kernels.stored.functions import stored_embedding, stored_linear
from paperlm_kernels.stored.weight import StoredWeight

not_compiled = torch.compiler.disable
"Stores decode in code that torch.compile cannot trace, NumPy's on a CPU: it breaks its graph at their layers."


class StoredLayer(nn.Module):
    """What the layers share. Layers that share a weight share the StoredWeight."""

    def __init__(self, weight: StoredWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.stored = weight
        self.weight = weight.handle
        self.register_parameter("bias", bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredLayer:
        self.stored.store.apply(fn)  # first: it refuses what a store cannot do
        self.stored.forget()
        with torch._C.DisableTorchFunctionSubclass():  # the parameter refuses to be cast by others
            super()._apply(fn, recurse)
        self.stored.handle = self.weight
        return self

    def _weight(self) -> StoredWeight:
        """The stored weight. Raises RuntimeError where `weight` is no longer the parameter that stands for it."""
        if self.weight is not self.stored.handle or self.weight.numel():
            raise RuntimeError(
                "the parameter `weight` of a stored layer was replaced or filled, and its values are in a store: load "
                "others with load_state_dict, or leave the layer plain, convert(model, ..., leave=[its name])"
            )
        return self.stored

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.stored.store.read()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # the parent class would copy the values into the empty parameter
        others = {key: value for key, value in state_dict.items() if key != f"{prefix}weight"}
        others[f"{prefix}weight"] = self.weight.detach()
        with torch._C.DisableTorchFunctionSubclass():
            super()._load_from_state_dict(
                others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        if self.weight is not self.stored.handle:  # assign=True: the bias is the other one now, the store takes values
            self.weight = self.stored.handle
        values = state_dict.get(f"{prefix}weight")
        if values is None:
            missing_keys.append(f"{prefix}weight")
        elif values.shape != self.stored.store.shape:
            error_msgs.append(
                f"size mismatch for {prefix}weight: {tuple(values.shape)} for a weight of "
                f"{tuple(self.stored.store.shape)}"
            )
        else:
            self.stored.changed()
            self.stored.store.write(values.to(self.stored.store.dtype))

    def extra_repr(self) -> str:
        """Sizes and store."""
        store = self.stored.store
        size = " x ".join(map(str, store.shape))
        return f"{size}, bias={self.bias is not None}, {type(store).__name__}, {store.nbytes} bytes"


class StoredLinear(StoredLayer):
    """y = x W^T + b, W (out, in): in the place of an nn.Linear."""

    def __init__(self, weight: StoredWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__(weight, bias)
        self.out_features, self.in_features = weight.store.shape

    @not_compiled
    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        return stored_linear(x, self._weight(), self.bias)


class StoredConv1D(StoredLayer):
    """y = x W + b, W (in, out): in the place of the Conv1D of transformers, which GPT-2 is made of."""

    def __init__(self, weight: StoredWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__(weight, bias)
        self.nx, self.nf = weight.store.shape

    @not_compiled
    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        return stored_linear(x, self._weight(), self.bias, transposed=True)


class StoredEmbedding(StoredLayer):
    """Rows of W (rows, width), in the place of an nn.Embedding: only blocks with a requested row are decoded, and only
    those are updated. The weight's store is a RowBlocks."""

    def __init__(self, weight: StoredWeight, padding_idx: int | None = None) -> None:
        super().__init__(weight)
        self.num_embeddings, self.embedding_dim = weight.store.shape
        self.padding_idx = padding_idx

    @not_compiled
    def forward(self, ids: Tensor) -> Tensor:
        """ids (...), int64 or int32 -> (..., width). Raises what `stored_embedding` does."""
        return stored_embedding(ids, self._weight(), self.padding_idx)


def stored_weights(model: nn.Module) -> dict[str, StoredWeight]:
    """Name of the parameter -> its stored weight, each once, for all stored layers of a model."""
    found: dict[int, tuple[str, StoredWeight]] = {}
    for name, module in model.named_modules():
        if isinstance(module, StoredLayer):
            found.setdefault(id(module.stored), (f"{name}.weight".lstrip("."), module.stored))
    return dict(found.values())


def named_plain_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter's name and values, each once, those of stored weights decoded when their turn comes."""
    stored = {id(weight.handle): weight for weight in stored_weights(model).values()}
    for name, p in model.named_parameters():
        with torch.no_grad():
            values = stored[id(p)].store.read() if id(p) in stored else p.detach()
        yield name, values
        del values  # or it would lie there beside the next one


def plain_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Those of `named_plain_tensors`, all of them at once."""
    return dict(named_plain_tensors(model))
