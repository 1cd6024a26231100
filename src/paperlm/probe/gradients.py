"""Gradient norms, block by block: of a block's matrices, of each of them, and of the stream entering it.

Mix-LN, Figures 3e and 6a, without released code. One batch's loss is the mean over its next tokens, in float32 and
without clipping; L2 norms are averaged over batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from paperlm.probe.blocks import NotFiniteError, anatomy, recorded_streams, require_decoder
from paperlm.probe.losses import next_token_losses

Batch = tuple[Tensor, Tensor]
"ids and mask, (B, S), padded on the right, on the model's device"


@dataclass(frozen=True)
class GradientNorms:
    """One entry per block, (L,), averaged over batches."""

    blocks: np.ndarray
    "of the concatenated gradients of a block's attention and feed-forward matrices; norms and other vectors left out"
    inputs: np.ndarray
    "of the loss by x_l, the stream entering the block, over all tokens of the batch"
    tensors: list[dict[str, float]]
    "per block: name of the matrix in it -> norm"
    loss: float
    "mean over batches"


def gradient_norms(model: nn.Module, batches: Iterable[Iterable[Batch]]) -> GradientNorms:
    """Norms over batches that come in parts small enough for a pass each. The model is left without gradients.

    Raises JobError for a model that predicts no next token, NotFiniteError for a norm that is no finite number.
    """
    require_decoder(model)
    blocks = anatomy(model).blocks
    matrices = [{_name(name): p for name, p in block.named_parameters() if p.ndim >= 2} for block in blocks]
    model.requires_grad_(True)
    found: list[tuple[Tensor, Tensor, float]] = []
    for batch in batches:
        parts = list(batch)
        model.zero_grad(set_to_none=True)
        labels = sum(int(mask[:, 1:].sum()) for _, mask in parts)
        squares: Tensor | float = 0.0
        loss = 0.0
        for ids, mask in parts:
            with recorded_streams(blocks) as streams:
                part = next_token_losses(model, ids, mask).sum() / labels
            for stream in streams[:-1]:
                stream.retain_grad()
            part.backward()
            squares = squares + torch.stack([_gradient(stream).square().sum() for stream in streams[:-1]])
            loss += float(part.detach())
        tensors = torch.stack([_gradient(p).norm() for block in matrices for p in block.values()])
        if not (tensors.isfinite().all() and squares.isfinite().all()):
            raise NotFiniteError(f"{type(model).__name__}: gradients are not finite on this text")
        found.append((tensors.cpu(), squares.sqrt().cpu(), loss))
    model.zero_grad(set_to_none=True)
    per_tensor, per_input, losses = zip(*found, strict=True)
    sizes = [len(block) for block in matrices]
    per_block = [torch.stack([t.norm() for t in norms.split(sizes)]) for norms in per_tensor]
    means = iter(torch.stack(per_tensor).mean(0).tolist())
    return GradientNorms(
        blocks=torch.stack(per_block).mean(0).numpy(),
        inputs=torch.stack(per_input).mean(0).numpy(),
        tensors=[{name: next(means) for name in block} for block in matrices],
        loss=sum(losses) / len(losses),
    )


def _gradient(tensor: Tensor) -> Tensor:
    """In float64; 0 for a tensor that the loss does not depend on: autograd leaves it without one."""
    return tensor.new_zeros((), dtype=torch.float64) if tensor.grad is None else tensor.grad.double()


def _name(parameter: str) -> str:
    return parameter.removesuffix(".weight")
