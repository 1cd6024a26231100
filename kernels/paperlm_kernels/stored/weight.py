"""A stored weight as autograd sees it: an empty parameter, and a gradient that waits for whoever updates the weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paperlm_kernels.stored.handle import Handle
from paperlm_kernels.stored.stores import WeightStore


class StoredWeight:
    """A store, and the `handle` that stands for it among a model's parameters: one without elements, of its dtype.

    A layer's backward leaves the gradient here and hands an empty one to autograd, whose hooks on `handle` fire once
    all layers that share the weight have left theirs. The hook is the optimizer's (`LomoSgd`).
    keep_recomputed: with activation checkpointing, hold the weight that a block's recomputation decoded until the
    layer's backward: two decodes a step in place of three, at the cost of one block of plain weights.
    layer: its layer's name, for the error of code that computes with `handle`.
    """

    def __init__(self, store: WeightStore, keep_recomputed: bool = False, layer: str = "") -> None:
        self.store, self.keep_recomputed = store, keep_recomputed
        empty = torch.empty(0, dtype=store.dtype, device=store.device)
        self.handle = Handle(empty, store.trainable, layer)
        self.gradient: Tensor | None = None
        self.rows: list[tuple[Tensor, Tensor]] = []
        self.waits = False
        "whether an optimizer waits for gradients"
        self.at_once = False
        "whether it updates the weight as soon as the gradient is whole, and can use what the backward pass decoded"
        self.version = 0
        "how often the values have changed"
        self._pass = -1
        "the backward pass that gradients came from last"
        self._recomputed: Tensor | None = None
        self._decoded: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is pickled, has no optimizer that waits, and no gradient."""
        none = {"gradient": None, "rows": [], "waits": False, "at_once": False, "_pass": -1}
        return self.__dict__ | none | {"_recomputed": None, "_decoded": None}

    # -- the weight --

    def read(self, dtype: torch.dtype) -> Tensor:
        """The values for a forward pass."""
        weight = self.store.read()
        # Within a backward pass a forward one is the recomputation of a checkpointed block.
        if self.keep_recomputed and torch._C._current_graph_task_id() != -1:
            self._recomputed = weight
        return weight if weight.dtype == dtype else weight.to(dtype)

    def read_again(self, dtype: torch.dtype, wants_weight: bool) -> Tensor:
        """The values for the backward pass of the same call: nothing is updated before it is over. wants_weight: the
        weight gets a gradient; an update that follows at once finds it decoded."""
        weight = self._decoded if self._recomputed is None else self._recomputed
        if weight is None:
            weight = self.store.read()
        self._recomputed, self._decoded = None, weight if self.at_once and wants_weight else None
        return weight if weight.dtype == dtype else weight.to(dtype)

    # -- the gradient --

    def receive(self, gradient: Tensor) -> None:
        """Add the gradient of one use, of the weight's shape. Raises RuntimeError where nobody waits for it."""
        self._expect()
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def receive_rows(self, ids: Tensor, gradient: Tensor) -> None:
        """Add the gradient (n, width) of the rows `ids` (n,), which may repeat."""
        self._expect()
        self.rows.append((ids, gradient))

    def _expect(self) -> None:
        if not self.waits:
            raise RuntimeError(
                "a stored weight got a gradient that no optimizer takes: make LomoSgd(model, lr) before the backward "
                "pass, or freeze the weights with model.requires_grad_(False)"
            )
        now = torch._C._current_graph_task_id()
        if now != self._pass and self.handle.grad is None:  # dropped by model.zero_grad(), or its pass did not end
            self.gradient, self.rows = None, []
        self._pass = now

    def drop_gradient(self) -> None:
        """Forget what was received, and what was decoded for it."""
        self.gradient, self.rows = None, []
        self.forget()

    def forget(self) -> None:
        """Drop what was decoded, for instance since the store has other values now."""
        self._recomputed = self._decoded = None

    def changed(self) -> None:
        """The store has other values now: what was decoded is dropped, and backward passes of forward ones before this
        are refused."""
        self.version += 1
        self.forget()

    def update(self, change: Callable[[Tensor, Tensor], None]) -> None:
        """Store what change(weight, gradient) makes of the weight in place, and drop the gradient. Where only rows have
        one, only the blocks that hold them are decoded and stored anew. The store may end it later (`settle`)."""
        gradient, rows = self.gradient, self._summed_rows()
        # a layer whose input has no gradient does not read its recomputed weight again
        decoded = self._recomputed if self._decoded is None else self._decoded
        self.drop_gradient()
        if gradient is None and rows is None:
            return
        if gradient is not None and rows is not None:
            gradient = gradient.index_add(0, rows[0], rows[1].to(gradient.dtype))
        if gradient is None:
            # rows come from an embedding, whose store is one of blocks
            self.store.change_rows(rows[0], lambda weight, part: change(weight, rows[1][part]))
            self.version += 1
            return
        weight = self.store.take(decoded)
        change(weight, gradient)
        self.store.write_later(weight)
        self.version += 1

    def _summed_rows(self) -> tuple[Tensor, Tensor] | None:
        """Rows that have a gradient, ascending and each once, and its sum, summed in float32 in the order of the uses:
        `index_add` would do so on a CPU alone."""
        if not self.rows:
            return None
        ids, gradients = (torch.cat(parts) for parts in zip(*self.rows, strict=True))
        order = torch.argsort(ids, stable=True)
        unique, lengths = torch.unique_consecutive(ids[order], return_counts=True)
        sums = torch.segment_reduce(gradients[order].float(), "sum", lengths=lengths, axis=0, unsafe=True)
        return unique, sums.to(gradients.dtype)
