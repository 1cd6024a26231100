"""Exact zeros among the whole-number codes that enter each projection (BitNet a4.8, Table 2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from paperlm.probe.inputs import GATE, PLACES, visited_inputs
from paperlm.quantizers.scheme import InputQuantizer
from paperlm.quantizers.topk import largest_entries

COUNTED = (*PLACES, GATE)
NUMBERS = 2**22
"Normally distributed numbers that a theory is computed from: a share of zeros of 12 % is then known to 0.02 points."


@dataclass(frozen=True)
class Zeros:
    """Zeros by sequence, block and place (N, L, 5), in the order of COUNTED, and how many numbers were looked at there
    (N, 5), the same in each block."""

    zeros: np.ndarray
    numbers: np.ndarray
    tokens: int

    def shares(self) -> np.ndarray:
        """Of each block and place, (L, 5)."""
        return self.zeros.sum(0) / self.numbers.sum(0)


@torch.no_grad()
def count_zeros(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Zeros:
    """Counts over the real tokens of batches of ids and mask, (B, S). Without a quantizer the inputs themselves count;
    of the gate what leaves its activation."""
    base, activation = getattr(model, "base_model", model), _activation(model)
    zeros, numbers, tokens = [], [], 0
    here: dict[str, Tensor] = {}

    def visit(block: int, place: str, x: Tensor, codes: Tensor | None) -> None:
        values = activation(x) if place == GATE else x if codes is None else codes
        counted = ((values == 0).sum(-1) * here["mask"]).sum(-1)
        here["zeros"][:, block, COUNTED.index(place)] = counted
        here["widths"][COUNTED.index(place)] = values.shape[-1]

    with visited_inputs(model, visit) as blocks:
        for ids, mask in batches:
            here["mask"] = mask
            here["zeros"] = torch.zeros(len(ids), blocks, len(COUNTED), dtype=torch.int64, device=ids.device)
            here["widths"] = torch.zeros(len(COUNTED), dtype=torch.int64)
            base(input_ids=ids, attention_mask=mask, use_cache=False)
            zeros.append(here["zeros"].cpu().numpy())
            numbers.append(np.outer(mask.sum(-1).cpu().numpy(), here["widths"].numpy()))
            tokens += int(mask.sum())
    return Zeros(np.concatenate(zeros), np.concatenate(numbers), tokens)


def _activation(model: nn.Module):
    """What the feed-forward applies to its gate."""
    if getattr(model.config, "hidden_act", "silu") == "relu2":
        return lambda gate: torch.relu(gate).square()
    return torch.nn.functional.silu


def columns(zeros: Mapping[str, float], width: int, glu: int) -> dict[str, float]:
    """The columns of Table 2 as shares, from the shares of zeros at each place; `width`, `glu`: of the model.

    Of the up projection a channel whose gate is zero need not be computed: up = 1 - (1 - gate)(1 - zeros of the gate's
    activation). overall: the mean of the projections by their weights, of which query, key and value have `width`^2
    each, as the output projection has, and gate, up and down `width` * `glu`.
    """
    up = 1 - (1 - zeros["gate_up"]) * (1 - zeros[GATE])
    square, glu_square = width * width, width * glu
    weighted = square * (3 * zeros["qkv"] + zeros["o"]) + glu_square * (up + zeros["gate_up"] + zeros["down"])
    return {
        "qkv": zeros["qkv"], "out": zeros["o"], "up": up, "gate": zeros["gate_up"], "down": zeros["down"],
        "gate_act": zeros[GATE], "overall": weighted / (4 * square + 3 * glu_square),
    }  # fmt: skip


def gaussian_zeros(described: InputQuantizer | None, width: int) -> float:
    """Share of zeros that a quantizer makes of tokens of `width` independent normally distributed numbers; 0 without
    one. From fixed draws. A norm in front of it changes nothing: each quantizer's codes are free of scale."""
    if described is None:
        return 0.0
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(1, NUMBERS // width), width, generator=generator)
    if (kept := described.kept(width, "theory")) is not None:
        rows = rows * largest_entries(rows, kept)
    codes, _ = described.quantizer.codes_and_step(rows)
    return float((codes == 0).double().mean())
