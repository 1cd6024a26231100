"""The parameter that stands for a stored weight among a model's: it has a dtype and a device, and no values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

PRODUCTS = (
    "matmul rmatmul imatmul mm bmm mv dot inner outer addmm addbmm baddbmm addmv einsum tensordot linear bilinear "
    "embedding embedding_bag conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
)
VIEWS = (
    "t T mT H mH adjoint transpose swapaxes swapdims movedim permute view view_as reshape reshape_as flatten unflatten "
    "squeeze unsqueeze expand expand_as repeat narrow chunk split unbind select index_select gather getitem cat concat "
    "concatenate stack"
)
SUMS = (
    "add radd iadd sub rsub isub mul rmul imul div rdiv idiv truediv rtruediv itruediv subtract multiply divide "
    "true_divide addcmul addcdiv neg pow square abs sum mean std var "
    "norm max min amax amin equal allclose isclose lerp"
)
CASTS = "to float half double bfloat16 type_as numpy tolist"
WRITES = (
    "copy zero fill clamp clip normal uniform trunc_normal foreach_copy foreach_lerp foreach_add foreach_sub "
    "foreach_mul foreach_div foreach_addcdiv"
)
READS_VALUES = frozenset(f"{PRODUCTS} {VIEWS} {SUMS} {CASTS} {WRITES}".split())
"""What is refused, by name: reading values, and writing them, which would change nothing. Not every function: code that
asks a weight for its dtype, device or gradient (as T5 and Falcon do) goes on working."""


class Handle(nn.Parameter):
    """An empty parameter that refuses to be computed with.

    Code beside the layer that multiplies by `layer.weight` itself, as Mamba does, would otherwise meet a tensor without
    elements: an error about sizes at best. Autograd, moves (`StoredLayer._apply`) and copies see an ordinary parameter.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = True, layer: str = "") -> Handle:
        """layer: the name of a layer that has the weight, for the message."""
        self = super().__new__(cls, data, requires_grad)
        self.layer = layer
        return self

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        return type(self), (self.data, self.requires_grad, self.layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        if id(self) not in memo:
            memo[id(self)] = type(self)(self.data.clone(), self.requires_grad, self.layer)
        return memo[id(self)]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run anything but what reads values. Raises RuntimeError for that."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute; before Python 3.13 a property has no name
            name = getattr(func.__self__, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name.strip("_") in READS_VALUES:
                raise RuntimeError(_message(_first((*args, *kwargs.values()))))
            return func(*args, **kwargs)


def _first(values: Iterable[Any]) -> Handle:
    """The handle among a function's arguments, which lie in lists at times."""
    for value in values:
        if isinstance(value, Handle):
            return value
        if isinstance(value, (tuple, list)) and any(isinstance(one, Handle) for one in value):
            return _first(value)
    raise AssertionError("torch asks a handle only about a function of one")


def _message(handle: Handle) -> str:
    last = handle.layer.rpartition(".")[2]
    # a number in a list says nothing, and is part of others
    part = f"{handle.layer if last.isdigit() else last}.weight"
    name = f"{handle.layer}.weight" if handle.layer else "a weight"
    leave = f"leave=[{part!r}]" if handle.layer else "leave=[...] and its name"
    return (
        f"{name} is in a store, and code beside its layer computes with it, where only a call of the layer decodes it. "
        f"Leave such layers as they are: convert(model, ..., {leave})"
    )
