"""Where the blocks of a model are, and the residual streams between them.

x_l, l = 1..L, is the stream entering block l, so that x_1 is the embedding's output; x_{L+1} leaves block L, before the
final norm. (The last of transformers' `hidden_states` lies behind the final norm, which is why hooks are used.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from paperlm.errors import JobError

BLOCK_LISTS = ("layers", "h", "blocks", "decoder.layers", "encoder.layer")
"Below the base model: LLaMA, Qwen, Mistral, GPT-NeoX and this project's decoder; GPT-2 and Falcon; MPT; OPT; BERT."
FINAL_NORMS = ("norm", "ln_f", "norm_f", "final_layer_norm", "final_layernorm", "decoder.final_layer_norm")
"In the same families and Phi; BERT has none, its blocks end in a norm of their own."


class NotFiniteError(JobError):
    """A stream or a gradient of the model holds numbers that are not finite."""


@dataclass(frozen=True)
class Anatomy:
    """The modules that the residual stream passes."""

    embedding: nn.Module
    blocks: list[nn.Module]
    final_norm: nn.Module | None
    "None: the family has none"


def anatomy(model: nn.Module) -> Anatomy:
    """Embedding, blocks and final norm of a transformers model, with or without a head.

    Raises JobError where none of the known names leads to a list of blocks.
    """
    base = getattr(model, "base_model", model)
    blocks = next((found for name in BLOCK_LISTS if isinstance(found := _below(base, name), nn.ModuleList)), None)
    embedding = base.get_input_embeddings() if hasattr(base, "get_input_embeddings") else None
    if not blocks or embedding is None:
        raise JobError(
            f"{type(model).__name__}: no list of blocks and embedding found; looked in {type(base).__name__} for "
            f"{', '.join(BLOCK_LISTS)} and get_input_embeddings(). A new family: add its name to probe/blocks.py"
        )
    final_norm = next((found for name in FINAL_NORMS if (found := _below(base, name)) is not None), None)
    return Anatomy(embedding=embedding, blocks=list(blocks), final_norm=final_norm)


def _below(module: nn.Module, path: str) -> nn.Module | None:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def require_decoder(model: Any) -> None:
    """Raise JobError unless the model predicts next tokens."""
    if not (hasattr(model, "can_generate") and model.can_generate()):
        raise JobError(
            f"{type(model).__name__} predicts no next token, so that it has no loss or perplexity on text; of an "
            "encoder, angular distance and output variance can be measured"
        )


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The stream among the arguments of a block: the first one, by position or as `hidden_states`."""
    return args[0] if args else kwargs["hidden_states"]


@contextlib.contextmanager
def recorded_streams(blocks: list[nn.Module]) -> Iterator[list[Tensor]]:
    """While it is open, each forward pass fills the list anew with x_1 .. x_{L+1}, (B, S, D), part of the graph."""
    streams: list[Tensor] = []

    def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if block is blocks[0]:
            streams.clear()
        streams.append(first_argument(args, kwargs))

    def leave(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        streams.append(output if isinstance(output, Tensor) else output[0])

    handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
    handles.append(blocks[-1].register_forward_hook(leave))
    try:
        yield streams
    finally:
        for handle in handles:
            handle.remove()


def forward_streams(model: nn.Module, ids: Tensor, mask: Tensor) -> list[Tensor]:
    """x_1 .. x_{L+1} of one forward pass without the head, float32. ids, mask: (B, S), mask 1 on real tokens.

    Raises NotFiniteError if one of them is not finite at a real token.
    """
    base = getattr(model, "base_model", model)
    with recorded_streams(anatomy(model).blocks) as streams:
        base(input_ids=ids, attention_mask=mask, use_cache=False)
    for number, stream in enumerate(streams, start=1):
        if not stream[mask.bool()].isfinite().all():
            where = f"entering block {number}" if number < len(streams) else f"leaving block {number - 1}"
            raise NotFiniteError(f"{type(model).__name__}: the stream {where} is not finite on this text")
    return [stream.float() for stream in streams]
