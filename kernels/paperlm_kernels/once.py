"""Refuses second-order gradients, which the hand-written backward passes do not have."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def differentiable_once(operation: str, remedy: str) -> Callable[[Callable], Callable]:
    """Decorates a backward pass: its gradients raise NotImplementedError where they are differentiated again.

    PyTorch's `once_differentiable` does so only if the incoming gradients require one. Those of a plain loss do not:
    there it returns constants, and a penalty on the gradient would be left out without a word.
    """

    def decorate(backward: Callable) -> Callable:
        @functools.wraps(backward)
        def wrapper(ctx, *incoming: Tensor) -> tuple[Tensor | None, ...]:
            with torch.no_grad():
                gradients = backward(ctx, *incoming)
            # torch.compile refuses to differentiate twice by itself
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return gradients
            message = f"{operation} has no second-order gradients here; {remedy}"
            return tuple(g if g is None else _Once.apply(g.detach().requires_grad_(), message) for g in gradients)

        return wrapper

    return decorate


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient, message):
        ctx.message = message
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, incoming):
        raise NotImplementedError(ctx.message)
