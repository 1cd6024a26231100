"""What a model's weights are and take: exact bytes, and hashes that tell whether two models are equal to the bit."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paperlm_kernels.stored.layers import named_plain_tensors, stored_weights
from paperlm_kernels.stored.lomo import AHEAD
from paperlm_kernels.stored.stores import PackedStore, RawStore, runs_ahead


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a model's weights between their uses."""

    stored: int
    "of those in stores, tables included"
    plain: int
    "of the other parameters"
    stored_weights: int
    "values in stores"
    plain_weights: int
    "values of the other parameters"
    gradients: int
    "of all gradients together"
    in_update: int
    """what an update within the backward pass has at most beside the weights: one gradient, and of a packed weight its
    values and its new bytes. Weights that `keep_recomputed` holds are not counted"""
    under_way: int
    "values of packed weights on a card whose update has begun, while it has others to do; at most so many bytes"

    @property
    def total(self) -> int:
        """All bytes that stay."""
        return self.stored + self.plain

    def in_training(self, fused: bool) -> int:
        """Weights and gradients at their most, activations left out. fused: as LomoSgd updates, one at a time."""
        return self.total + (self.in_update + self.under_way if fused else self.gradients)

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of a stored value; None without stored weights."""
        return 8 * self.stored / self.stored_weights if self.stored_weights else None


def weight_bytes(model: nn.Module) -> WeightBytes:
    """The exact bytes of a model's parameters, each counted once; buffers are not counted."""
    stored = {id(weight.handle): weight.store for weight in stored_weights(model).values()}
    plain = [p for p in model.parameters() if id(p) not in stored]
    sizes = {key: store.shape.numel() * store.dtype.itemsize for key, store in stored.items()}
    gradients = [*sizes.values(), *(p.nbytes for p in plain)]
    # a raw weight is changed where it lies
    packed = [2 * sizes[key] + store.nbytes for key, store in stored.items() if not isinstance(store, RawStore)]
    waiting = [
        size for key, size in sizes.items() if isinstance(stored[key], PackedStore) and runs_ahead(stored[key].device)
    ]
    return WeightBytes(
        stored=sum(store.nbytes for store in stored.values()),
        plain=sum(p.nbytes for p in plain),
        stored_weights=sum(store.shape.numel() for store in stored.values()),
        plain_weights=sum(p.numel() for p in plain),
        gradients=sum(gradients),
        in_update=max([*gradients, *packed], default=0),
        under_way=sum(sorted(waiting)[-AHEAD:]),
    )


def weight_hashes(model: nn.Module) -> dict[str, str]:
    """Parameter -> sha256 of its dtype, sizes and bytes; of a stored weight those of its values, so that the same
    weights have the same hash in any store without loss."""
    found = {}
    for name, tensor in named_plain_tensors(model):
        found[name] = _hash(tensor)
        del tensor  # or it would lie there beside the next one
    return found


def model_hash(model: nn.Module) -> str:
    """One sha256 of all parameters, by name."""
    lines = "".join(f"{name} {value}\n" for name, value in sorted(weight_hashes(model).items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _hash(tensor: Tensor) -> str:
    head = f"{tensor.dtype} {tuple(tensor.shape)}\n".encode()
    values = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(head + values.numpy().tobytes()).hexdigest()
