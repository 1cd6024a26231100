"""How fast softmax probabilities fall with their rank.

Figure 3 of Cut Cross-Entropy: for each token the softmax is sorted in descending order and averaged over tokens at each
rank. Logits are float32 products of the model's final states and head; sums over tokens are float64.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from paperlm.data.shards import TokenShards
from paperlm.jobs.base import Inputs, Machine
from paperlm.models.folder import load_model
from paperlm.models.llama import IGNORE_INDEX, PaperLlamaForCausalLM
from paperlm.result import Result, Series

if TYPE_CHECKING:
    from paperlm.jobs.rank_probability import RankProbability

THRESHOLD = 2.0**-12
"The gradient filter's in bfloat16."
TILE = 128
CHUNK = 8 * TILE
Tokens = tuple[torch.Tensor, torch.Tensor]
"Final-normed states (N, D) of counting tokens, in order, and their targets (N,)."
PER_DECADE = 24
"Ranks of the stored curve in each factor of ten."


def rank_probability(job: RankProbability, inputs: Inputs, machine: Machine) -> Result:
    """The record of a model on the first validation tokens of its run. Raises JobError for a folder without a model."""
    device = machine.torch_device()
    model = load_model(inputs.models["of"]).to(device)
    shards = TokenShards(inputs.data[0], "validation")
    curve, counted = rank_curve(_hidden(model, shards, job.tokens, job.of.numerics), model.lm_head.weight)
    rows = [list(pair) for pair in zip(curve.ranks, curve.mean_probability, strict=True)]
    # a rank is measured, no count that every machine finds alike: float, as `record.agreement` tells the two apart
    metrics = {
        key: float(getattr(curve, key))
        for key in ("share_above", "mass_above", "first_rank_below", "alive_tiles", "loss")
    }
    return Result(
        outcome="measured",
        metrics={**metrics, "threshold": THRESHOLD, "tokens": counted},
        series={"ranks": Series(columns=["rank", "mean_probability"], rows=rows)},
    )


@dataclass(frozen=True)
class RankCurve:
    """Softmax probabilities of a model, sorted in descending order for each token."""

    ranks: list[int]
    "from 1, spaced evenly in the logarithm"
    mean_probability: list[float]
    "mean over the tokens, one a rank"
    share_above: float
    "share of all probabilities that are at or above the threshold"
    mass_above: float
    "what those sum to, mean over the tokens"
    first_rank_below: int
    "first rank whose mean probability is below the threshold; vocabulary + 1 if there is none"
    alive_tiles: float
    "share of tiles of 128 tokens x 128 ids, in natural order, that hold a target or a probability at the threshold"
    loss: float
    "mean next-token loss on these tokens, nats"


@torch.no_grad()
def _hidden(model: PaperLlamaForCausalLM, shards: TokenShards, tokens: int, numerics: str) -> Iterator[Tokens]:
    """The first `tokens` counting tokens, a few sequences at a time."""
    device = model.lm_head.weight.device
    autocast = torch.autocast(device.type, torch.bfloat16) if numerics == "fp32_master" else contextlib.nullcontext()
    for start in range(0, len(shards), 8):
        ids = shards.rows(np.arange(start, min(start + 8, len(shards))))
        labels = torch.from_numpy(np.where(ids == shards.pad_id, IGNORE_INDEX, ids))[:, 1:].to(device)
        with autocast:
            hidden = model.model.hidden(torch.from_numpy(ids)[:, :-1].to(device))
        counts = labels != IGNORE_INDEX
        targets = labels[counts][:tokens]
        yield hidden[counts][:tokens], targets
        tokens -= len(targets)
        if tokens <= 0:
            return


def rank_curve(parts: Iterator[Tokens], weight: torch.Tensor, chunk: int = CHUNK) -> tuple[RankCurve, int]:
    """Curve of a head (V, D), and the number of tokens. `chunk`: tokens at a time, a multiple of 128."""
    vocab = len(weight)
    head = weight.detach().float()
    sums = torch.zeros(vocab, dtype=torch.float64, device=weight.device)
    loss = torch.zeros((), dtype=torch.float64, device=weight.device)
    above = torch.zeros((), dtype=torch.int64, device=weight.device)
    mass, tokens, alive, tiles = torch.zeros_like(loss), 0, torch.zeros_like(above), 0
    for hidden, targets in _chunks(parts, chunk):
        logits = F.linear(hidden.float(), head)
        loss += F.cross_entropy(logits, targets, reduction="sum").double()
        probability = logits.softmax(-1)
        large = probability >= THRESHOLD
        above += large.sum()
        mass += torch.where(large, probability, 0.0).sum(dtype=torch.float64)
        kept = F.pad(large.scatter(1, targets[:, None], True), (0, -vocab % TILE, 0, -len(targets) % TILE))
        alive += kept.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).any(3).any(1).sum()
        tiles += math.ceil(len(targets) / TILE) * math.ceil(vocab / TILE)
        sums += probability.sort(dim=1, descending=True).values.sum(0, dtype=torch.float64)
        tokens += len(targets)
    means = (sums / tokens).cpu().numpy()
    below = np.flatnonzero(means < THRESHOLD)
    ranks = log_ranks(vocab)
    curve = RankCurve(
        ranks=ranks,
        mean_probability=[float(means[rank - 1]) for rank in ranks],
        share_above=int(above) / (tokens * vocab),
        mass_above=float(mass) / tokens,
        first_rank_below=int(below[0]) + 1 if len(below) else vocab + 1,
        alive_tiles=int(alive) / tiles,
        loss=float(loss) / tokens,
    )
    return curve, tokens


def log_ranks(vocab: int) -> list[int]:
    """Ranks 1 to vocab, PER_DECADE to a factor of ten where there are so many."""
    steps = math.ceil(PER_DECADE * math.log10(vocab)) + 1
    return sorted({round(rank) for rank in np.geomspace(1, vocab, steps)} | {1, vocab})


def _chunks(parts: Iterator[Tokens], size: int) -> Iterator[Tokens]:
    """The same tokens in chunks of `size`, so that tiles do not end where sequences do."""
    hidden: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    waiting = 0
    for part, ids in parts:
        hidden.append(part)
        targets.append(ids)
        waiting += len(ids)
        if waiting >= size:
            rows, ids = torch.cat(hidden), torch.cat(targets)
            whole = waiting - waiting % size
            yield from zip(rows[:whole].split(size), ids[:whole].split(size), strict=True)
            hidden, targets, waiting = [rows[whole:]], [ids[whole:]], waiting - whole
    if waiting:
        yield torch.cat(hidden), torch.cat(targets)
