"""`paperlm probe-ranks`: how fast softmax probabilities fall with their rank, trained and untrained.

Figure 3 of Cut Cross-Entropy: for each token the softmax is sorted in descending order and averaged over tokens at each
rank. Logits are float32 products of the model's final states and head; sums over tokens are float64.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from paperlm.data.shards import BatchOrder, TokenShards
from paperlm.errors import DataError
from paperlm.models.llama import IGNORE_INDEX, PaperLlamaForCausalLM
from paperlm.record.environment import capture
from paperlm.record.ranks import RankCurve, RankRecord
from paperlm.spec.run import RunConfig

THRESHOLD = 2.0**-12
"The gradient filter's in bfloat16."
TILE = 128
CHUNK = 8 * TILE
Tokens = tuple[torch.Tensor, torch.Tensor]
"Final-normed states (N, D) of counting tokens, in order, and their targets (N,)."
PER_DECADE = 24
"Ranks of the stored curve in each factor of ten."


def probe_ranks(run: RunConfig, manifest: Path, folder: Path, tokens: int, device: torch.device) -> RankRecord:
    """The record of a run whose trained model lies in `folder`, on its first `tokens` validation tokens.

    Raises DataError if there is no model in the folder, or one of another shape.
    """
    from paperlm.train.loop import build_model

    train = TokenShards(manifest, "train")
    first = train.rows(BatchOrder(len(train), run.global_batch, run.seed).indices(0))[: run.loss_group]
    models = {
        "trained": _trained(run, folder),
        "initial": build_model(run, torch.from_numpy(first), torch.device("cpu")),
    }
    shards = TokenShards(manifest, "validation")
    curves, counted = {}, 0
    for state, model in models.items():
        model.to(device).eval()
        curves[state], counted = rank_curve(_hidden(model, shards, tokens, run.numerics), model.lm_head.weight)
    return RankRecord(
        run_id=run.run_id,
        run=run,
        threshold=THRESHOLD,
        tokens=counted,
        states=curves,
        environment=capture(device),
    )


def _trained(run: RunConfig, folder: Path) -> PaperLlamaForCausalLM:
    if not (folder / "config.json").is_file():
        raise DataError(
            f"{folder}: no trained model of {run.run_id}; delete its record, so that it is trained again, or give the "
            "folder that `pretrain --model` wrote"
        )
    model = PaperLlamaForCausalLM.from_pretrained(folder)
    found = (model.config.vocab_size, model.config.hidden_size, model.config.num_hidden_layers)
    if found != (run.vocab_size, run.hidden_size, run.n_layers):
        raise DataError(f"{folder}: a model of vocabulary, width and depth {found}, not that of {run.run_id}")
    return model


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
