"""What enters the projections of the decoder's blocks: a visit at each, while the model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from paperlm.errors import JobError
from paperlm.probe.blocks import anatomy

PLACES = {"qkv": ("attention", "q_proj"), "o": ("attention", "o_proj"), "gate_up": ("mlp", "gate_proj"),
          "down": ("mlp", "down_proj")}  # fmt: skip
"Place of a quantizer -> module of a block and one of the projections that read it."
GATE = "gate"
"In the place of these: what leaves the gate projection."

Visit = Callable[[int, str, Tensor, Tensor | None], None]
"Block from 0, place, its input (B, S, N), the codes that enter the product instead; None: there is no quantizer."


@contextlib.contextmanager
def visited_inputs(model: nn.Module, visit: Visit) -> Iterator[int]:
    """While it is open, each forward pass visits every place of every block; gives the number of blocks.

    Nothing is kept between two visits, so that one activation at a time is in memory. Raises JobError for a model whose
    blocks are not this project's decoder's.
    """
    blocks = anatomy(model).blocks
    handles = []
    try:
        for index, block in enumerate(blocks):
            for place, (part, projection) in PLACES.items():
                module = getattr(block, part, None)
                if not isinstance(getattr(module, projection, None), nn.Module):
                    raise JobError(
                        f"{type(model).__name__}: block {index + 1} has no {part}.{projection}; inputs of projections "
                        "are those of this project's decoder"
                    )
                quantizer = getattr(module, f"{place}_input", None)
                if quantizer is None:
                    handles.append(getattr(module, projection).register_forward_pre_hook(_plain(visit, index, place)))
                else:
                    handles.append(quantizer.register_forward_hook(_quantized(visit, index, place)))
            handles.append(block.mlp.gate_proj.register_forward_hook(_leaving(visit, index)))
        yield len(blocks)
    finally:
        for handle in handles:
            handle.remove()


def _plain(visit: Visit, index: int, place: str) -> Callable[..., None]:
    return lambda module, args: visit(index, place, args[0], None)


def _quantized(visit: Visit, index: int, place: str) -> Callable[..., None]:
    return lambda module, args, output: visit(index, place, args[0], output[1])


def _leaving(visit: Visit, index: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        visit(index, GATE, output, None)

    return hook
