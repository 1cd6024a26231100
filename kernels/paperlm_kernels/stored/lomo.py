"""Stochastic gradient descent that updates a weight as soon as its gradient is there, and keeps no gradient: LOMO.

Lv et al., Full Parameter Fine-tuning for Large Language Models with Limited Resources, arXiv 2306.09782; NeuZip's
training (arXiv 2410.20650, section 3.2) is this with compressed weights.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paperlm_kernels.backends import chosen_backend
from paperlm_kernels.neuzip import raise_decode_errors
from paperlm_kernels.stored.layers import stored_weights
from paperlm_kernels.stored.stores import WeightStore
from paperlm_kernels.stored.weight import StoredWeight

CHUNK = 1 << 20
"Values of a weight that are in float32 at a time."
AHEAD = 4
"""Stored weights whose update may be under way: to end one, the host waits until the device has got there, which has
the work of those behind it left to do. Their plain values are there meanwhile."""


def sgd_update(weight: Tensor, gradient: Tensor, lr: float, *, backend: str = "auto") -> None:
    """weight <- weight - lr * gradient in place, in float32 and rounded once to the weight's dtype.

    Product and difference are rounded apart, never fused, so that every device gives the same bits. weight is
    contiguous, and the gradient of its shape and on its device; ValueError otherwise. backend: "triton", "reference" or
    "auto", which is Triton on a GPU, in one kernel.
    """
    if not weight.is_contiguous():
        raise ValueError("the weight is a view with gaps or turned axes; give weight.contiguous()")
    if gradient.shape != weight.shape or gradient.device != weight.device:
        raise ValueError(
            f"a gradient of shape {tuple(gradient.shape)} on {gradient.device} for a weight of {tuple(weight.shape)} "
            f"on {weight.device}; give one of its own"
        )
    if chosen_backend(backend, weight, weight.dtype) == "triton":
        from paperlm_kernels.stored.kernel import run_sgd

        run_sgd(weight, gradient.contiguous(), lr)
        return
    parts = (t.reshape(-1).split(CHUNK) for t in (weight, gradient))
    for w, g in zip(*parts, strict=True):
        w.copy_(w.float() - g.float() * lr)


class LomoSgd(torch.optim.Optimizer):
    """w <- w - lr * g within the backward pass, for every parameter of a model, stored or not: no momentum, no decay.

        optimizer = LomoSgd(model, lr=0.1)
        loss.backward()     # updates
        optimizer.step()    # counts the step, and sets the next rate

    lr: the rate, or a function of the steps that were made; torch's schedulers set it as well. One backward pass a
    step: the weights have changed when it is over, so gradients cannot be accumulated over several, nor clipped by
    their common norm. fused=False keeps all gradients until `step()`, ordinary SGD with the same arithmetic: the
    baseline, whose results are the same to the last bit. Gradients of stored weights are with the weights, not in
    `.grad`: what reads that, as torch.nn.utils.clip_grad_norm_ does, cuts those of plain parameters alone.

    With activation checkpointing use its form without re-entrance (use_reentrant=False).
    """

    def __init__(self, model: nn.Module, lr: float | Callable[[int], float], *, fused: bool = True) -> None:
        """Raises ValueError for a model without trainable parameters, a stored weight that is rounded, one that another
        optimizer waits for, or a rate that is no number of 0 or above."""
        self._schedule = lr if callable(lr) else None
        first = float(lr(0) if callable(lr) else lr)
        if not 0 <= first < float("inf"):
            raise ValueError(f"lr is {first}; a rate is a number of 0 or above")
        stored = {weight.handle: (name, weight) for name, weight in stored_weights(model).items()}
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError("no parameter of the model requires a gradient: model.requires_grad_(True)")
        self.fused, self._stored = fused, {}
        for parameter in parameters:
            if parameter in stored:
                name, weight = stored[parameter]
                if not weight.store.trainable:
                    raise ValueError(
                        f"{name} is in a {type(weight.store).__name__} that rounds: train with one that does not, and "
                        "convert afterwards, or freeze it"
                    )
                if weight.waits:
                    raise ValueError(f"{name}: another LomoSgd updates it; call its close() first")
                self._stored[parameter] = weight
        if stored and not self._stored:
            warnings.warn(
                f"none of the {len(stored)} stored weights is trained: they are frozen, as convert() leaves those of a "
                f"store that rounds; the {len(parameters)} parameters beside them are",
                stacklevel=2,
            )
        super().__init__(parameters, {"lr": first, "steps": 0})
        self._updated: set[Tensor] = set()
        self._under_way: collections.deque[WeightStore] = collections.deque()
        for weight in self._stored.values():
            weight.waits, weight.at_once = True, fused
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in parameters]

    @property
    def steps(self) -> int:
        """Steps that were made."""
        return self.param_groups[0]["steps"]

    def close(self) -> None:
        """Take the hooks off the model, whose backward pass then updates nothing."""
        for hook in self._hooks:
            hook.remove()
        for weight in self._stored.values():
            weight.waits = weight.at_once = False
            weight.drop_gradient()
        self._settle(0)
        self._hooks = []

    @torch.no_grad()
    def _arrived(self, parameter: Tensor) -> None:
        """A parameter's gradient is whole."""
        if not self.fused:
            return
        if parameter in self._updated:
            parameter.grad = None
            if parameter in self._stored:
                self._stored[parameter].drop_gradient()
            raise RuntimeError(
                "a second gradient of a weight before LomoSgd.step(): the first has changed it already. Call step() "
                "after each backward pass, take the whole batch in one instead of accumulating, and checkpoint "
                "activations with use_reentrant=False"
            )
        self._update(parameter)
        self._updated.add(parameter)

    def _update(self, parameter: Tensor) -> None:
        lr = self.param_groups[0]["lr"]
        weight: StoredWeight | None = self._stored.get(parameter)
        if weight is not None:
            weight.update(lambda old, gradient: sgd_update(old, gradient, lr))
            self._under_way.append(weight.store)
            self._settle(AHEAD)
        else:
            sgd_update(parameter.data, parameter.grad, lr)
        parameter.grad = None

    def _settle(self, left: int) -> None:
        """End updates of stored weights, the oldest first, but for so many."""
        while len(self._under_way) > left:
            self._under_way[0].settle()
            self._under_way.popleft()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """End a step; without `fused`, make its updates.

        Raises ValueError for a closure, and neuzip's StreamError if a packed weight was found damaged while a card
        decoded it: what was computed since the last step is of no use then.
        """
        if closure is not None:
            raise ValueError("LomoSgd updates within the backward pass and takes no closure")
        self._settle(0)
        for device in {weight.store.device for weight in self._stored.values()}:
            raise_decode_errors(device)
        group = self.param_groups[0]
        for parameter in group["params"] if not self.fused else ():
            if parameter.grad is not None:
                self._update(parameter)
        self._settle(0)
        self._updated.clear()
        group["steps"] += 1
        if self._schedule is not None:
            group["lr"] = float(self._schedule(group["steps"]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what gradients there are."""
        super().zero_grad(set_to_none)
        for weight in self._stored.values():
            weight.drop_gradient()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only the group of the constructor: others would not have hooks. Raises ValueError for a second."""
        if self.param_groups:
            raise ValueError("LomoSgd has one group, the model's parameters; make a new one for another model")
        super().add_param_group(param_group)
