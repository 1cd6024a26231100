"""What a tensor becomes, by the kernels or in NumPy: header, sections, codebook."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from paperlm_kernels.neuzip import reference
from paperlm_kernels.neuzip.codebook import Codebook
from paperlm_kernels.neuzip.container import WORDS, Arrays, aligned
from paperlm_kernels.neuzip.header import Header, Section
from paperlm_kernels.neuzip.sample import UnlikeError, runs_of
from paperlm_kernels.neuzip.streams import TooLongError

Taken = tuple[int, int]
"Words of streams, and patches, that a tensor took."


@dataclasses.dataclass
class Later:
    """Sections that become tensors when somebody asks for them: of a card's buffers that takes the host as long as the
    card takes to write them."""

    device: torch.device
    stored: int
    "bytes of all"
    taken: Taken
    make: Callable[[], dict[Section, Tensor]]
    places: Callable[[], dict[str, int]]
    "where the buffers lie, by the names that arguments of kernels have"


Coded = tuple[Header, dict[Section, Tensor] | Later, Codebook | None, int | None]
"Header, sections, codebook, and of FIX4 the lowest exponent where it is known."


def begin_coding(
    t: Tensor, header: Header, book: Codebook | None, backend: str, like: Taken | None = None
) -> Callable[[], Coded]:
    """Begins to code a contiguous bfloat16 tensor on its device; what is returned waits, and ends it.

    book: one to code with; without, one is made of counts of some blocks, and of all where that one does not fit the
    others. backend: "triton" or "reference". like: what a tensor took that had about the same values. Raises
    TooLongError, at the end.
    """
    begin = _on_device if backend == "triton" else _on_host
    in_part = book is None and runs_of(header)[1] > 1
    held = [begin(t, header, book, not in_part, like)]

    def finish() -> Coded:
        try:
            return held.pop()()  # so that nothing of it is kept while all is done again
        except (TooLongError, UnlikeError):
            if not in_part:
                raise
        return begin(t, header, None, True, like)()

    return finish


def _on_device(
    t: Tensor, header: Header, book: Codebook | None, all_counted: bool, like: Taken | None
) -> Callable[[], Coded]:
    from paperlm_kernels.neuzip.launch_encode import begin_encode

    return begin_encode(t, header, book, all_counted=all_counted, like=like)


def _on_host(
    t: Tensor, header: Header, book: Codebook | None, all_counted: bool, like: Taken | None
) -> Callable[[], Coded]:
    """Begins nothing, and needs to expect nothing."""

    def encoded() -> Coded:
        found, arrays, own = reference.encode(bits_of(t.cpu()), header, book, all_counted=all_counted)
        return found, owned(arrays, t.device), own, None

    return encoded


def bits_of(t: Tensor) -> np.ndarray:
    """Patterns of a contiguous bfloat16 tensor on the CPU, flat; the same memory."""
    return t.detach().view(torch.int16).reshape(-1).numpy().view(np.uint16)


def owned(arrays: Arrays, device: torch.device) -> dict[Section, Tensor]:
    """On a device, with zeros up to a multiple of 64 bytes behind them, so that a kernel can read whole words."""
    found = {}
    for section, array in arrays.items():
        data = np.ascontiguousarray(array).view(np.uint8)
        whole = np.zeros(aligned(max(1, data.size)), np.uint8)
        whole[: data.size] = data
        tensor = torch.from_numpy(whole).to(device)[: data.size]
        found[section] = tensor.view(torch.int32) if section in WORDS else tensor
    return found
