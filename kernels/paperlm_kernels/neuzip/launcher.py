"""Launches of kernels that were compiled before, without looking for them again.

At each launch Triton's front end looks at every argument to find the compiled kernel that fits, which takes it as long
as a small tensor's decoding. Here a kernel is found by what is constant in it, and its buffers are given as addresses,
of which the driver is asked nothing. So a kernel's arguments are in this order: tensors, numbers (not specialized),
constants.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

WARPS = 4
"One thread a lane."
_WIDE = 2**31
"A number from which on a kernel is compiled for 64 bits."


def addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Of the tensors' first elements."""
    return tuple([t.data_ptr() for t in tensors])


def all_aligned(places: tuple[int, ...]) -> bool:
    """Whether all are multiples of 16."""
    return not functools.reduce(operator.or_, places) & 15


def aligned_alike(places: tuple[int, ...]) -> bool | tuple[bool, ...]:
    """Which of them are multiples of 16; True for all. A kernel is compiled for each such pattern."""
    return all_aligned(places) or tuple([place & 15 == 0 for place in places])


_HERE = contextlib.nullcontext()


@functools.cache
def _is_alone() -> bool:
    """Whether this process has one card, which is always the current one."""
    return torch.cuda.device_count() == 1


def on_device(t: Tensor) -> AbstractContextManager:
    """A context in which launches go to a tensor's device; it takes time only where that is not the current one."""
    if t.device.type != "cuda" or _is_alone() or t.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(t.device)


def _stream_of(device: torch.device | None) -> Callable[[], int | None]:
    """What tells the current stream of a device. None, elsewhere than on a card, leaves it to Triton, which asks for
    the device first."""
    if device is None or device.type != "cuda":
        return lambda: None
    return functools.partial(torch._C._cuda_getCurrentRawStream, device.index)


def _wide(numbers: Sequence[float]) -> bool | tuple[bool, ...]:
    """Which of them need 64 bits; False if none does."""
    return max(numbers, default=0) >= _WIDE and tuple([n >= _WIDE for n in numbers])


Start = tuple[Callable[..., None], tuple]
"A compiled kernel with its grid, to be called with buffers' addresses, numbers and constants; and its constants."


class Launcher:
    """A kernel with its compiled forms."""

    def __init__(self, kernel: Any, warps: int = WARPS, **options: Any) -> None:
        """options: of the compiler. A kernel with the constant PDL is started as that says (`overlap`)."""
        self.kernel, self.options = kernel, {"num_warps": warps, **options}
        self._compiled: dict[tuple, Any] = {}
        self._own: tuple[str, ...] = ()

    def __call__(
        self, programs: int, tensors: Sequence[Tensor], numbers: Sequence[float], constants: dict[str, int],
        places: tuple[int, ...] | None = None,
    ) -> Start | None:  # fmt: skip
        """Starts so many programs on the current device, which is the tensors'.

        constants: by name, among them all that the kernel has; they determine the dtypes of the tensors. places:
        `addresses(tensors)`, where they are known already. Returns with what the same is started again, without
        looking for it: for tensors of the same dtypes, of which the same ones begin on 16 bytes.
        """
        if places is None:
            places = addresses(tensors)
        ready, own = self.found(tensors, numbers, constants, places)
        if ready is not None:
            start = ready[(programs, 1, 1)]
            start(*places, *numbers, *own)
            return start, own
        given = dict(zip(self._own, own, strict=True))
        options = self.options | ({"launch_pdl": True} if given.get("PDL") else {})
        compiled = self.kernel[(programs,)](*tensors, *numbers, **given, **options)
        if compiled is not None:  # the interpreter compiles nothing
            self._compiled[self._key(tensors, numbers, places, own)] = compiled
        return None

    def found(
        self, tensors: Sequence[Tensor], numbers: Sequence[float], constants: dict[str, int], places: tuple[int, ...]
    ) -> tuple[Any, tuple]:
        """The compiled kernel for such arguments, or None, and its constants."""
        if not self._own:
            self._own = tuple(self.kernel.arg_names[len(tensors) + len(numbers) :])
        own = tuple([constants[name] for name in self._own])
        return self._compiled.get(self._key(tensors, numbers, places, own)), own

    def _key(self, tensors: Sequence[Tensor], numbers: Sequence[float], places: tuple[int, ...], own: tuple) -> tuple:
        return tensors[0].device, aligned_alike(places), _wide(numbers), *own  # it is compiled for short numbers


class Starts:
    """Kernels with the same constants on one device, each found once."""

    def __init__(self, constants: dict[str, int], device: torch.device | None = None) -> None:
        self.constants, self._stream = constants, _stream_of(device)
        self._found: dict[tuple[Launcher, Any], tuple[Any, tuple, list[str]]] = {}

    def run(
        self, launcher: Launcher, programs: int, at: Mapping[str, int], tensor: Callable[[str], Tensor], *numbers: int
    ) -> None:
        """Starts so many programs on the current device. at: addresses of buffers, by the names that the kernel's
        arguments have. tensor: makes tensors of them, by name, for the first start alone, and for the interpreter. All
        starts of a launcher are alike in dtypes and in which buffers begin on 16 bytes."""
        form = launcher, _wide(numbers)
        found = self._found.get(form)
        if found is not None:
            ready, own, names = found
            ready[(programs, 1, 1)](*[at[name] for name in names], *numbers, *own, stream=self._stream())
            return
        names = [name for name in launcher.kernel.arg_names if name not in self.constants]
        names = names[: len(names) - len(numbers)]
        tensors, places = [tensor(name) for name in names], tuple([at[name] for name in names])
        launcher(programs, tensors, numbers, self.constants, places)
        ready, own = launcher.found(tensors, numbers, self.constants, places)
        if ready is not None:
            self._found[form] = ready, own, names

    def start(
        self, launcher: Launcher, programs: int, at: Mapping[str, int], free: str, *numbers: int
    ) -> Callable[[int], None] | None:
        """What does the same `run` again and again: it is called with the address of the buffer `free`, which `at` has
        none of. None before the first `run`."""
        found = self._found.get((launcher, _wide(numbers)))
        if found is None:
            return None
        ready, own, names = found
        place, stream, begin = names.index(free), self._stream, ready[(programs, 1, 1)]
        before, behind = [at[n] for n in names[:place]], (*[at[n] for n in names[place + 1 :]], *numbers, *own)

        def again(address: int) -> None:
            begin(*before, address, *behind, stream=stream())

        return again
