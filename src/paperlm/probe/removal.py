"""A model without one of its blocks: the residual stream passes it unchanged, and nothing is trained again.

The other blocks keep what they are: their number, wiring and place in a cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from paperlm.errors import JobError
from paperlm.probe.blocks import anatomy, first_argument


@contextlib.contextmanager
def removed(model: nn.Module, block: int) -> Iterator[None]:
    """While it is open, block `block`, counted from 1, is the identity. Raises JobError if there is no such block.

    The block still runs, and its output is put aside: caches and what else it does for others stay in order.
    """
    blocks = anatomy(model).blocks
    if not 1 <= block <= len(blocks):
        raise JobError(f"{type(model).__name__} has no block {block} to remove; its blocks are 1 to {len(blocks)}")

    def pass_by(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        stream = first_argument(args, kwargs)
        return stream if isinstance(output, Tensor) else (stream, *output[1:])

    handle = blocks[block - 1].register_forward_hook(pass_by, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
