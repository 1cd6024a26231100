"""Inputs for measuring linear cross-entropy: the classifier shapes of open models, and synthetic data like theirs.

The generator is calibrated so that three facts known of trained models hold at once at V = 256,000 (Cut
Cross-Entropy, arXiv 2411.09009): under 0.02 % of the softmax is 2^-12 or larger, the mean probability falls below
2^-12 near the 50th most likely id, and about a quarter of the 128 x 128 tiles of the probability gradient hold an
entry of 2^-12 or more. `describe` measures all three on any inputs, so a time can be reported together with the data
it was taken on.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from paperlm_kernels.bench.ops.cross_entropy.declared import TILES, Case
from paperlm_kernels.cross_entropy.options import auto_filter_eps

IGNORED = -100

ZIPF, BIAS, NOISE, PULL = 1.125, 32.0, 2.4, 14.5
"Slope of the log unigram probability, hidden state's entry that carries it, noise, and pull towards the target."


@dataclasses.dataclass(frozen=True)
class Inputs:
    """`hidden` (N, D), `weight` (V, D), `target` (N,) int64 with IGNORED where a token does not count."""

    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor

    @property
    def counting(self) -> torch.Tensor:
        """Indices of the tokens that count."""
        return (self.target != IGNORED).nonzero()[:, 0]


def make_inputs(case: Case, *, device: str | torch.device = "cpu", seed: int = 0, permute: bool = False) -> Inputs:
    """Synthetic inputs of a case; one seed gives the same inputs on the same kind of device.

    With u_v = -1.125 ln(v + 1): C[v, 0] = u_v / 32, other entries N(0, 1 / D); targets x ~ softmax(u); E[n, 0] = 32,
    other entries 2.4 N(0, 1) + 14.5 C[x_n]. The ids are in the order of their frequency, nearly as a tokenizer's;
    `permute` relabels them at random. With `case.counting` < 1 the other tokens are ignored, in runs like prompts of
    chats.
    """
    generator = torch.Generator(device).manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=generator, device=device)  # noqa: E731
    unigram = -ZIPF * torch.arange(1, case.vocab + 1, device=device, dtype=torch.float64).log()
    weight = torch.empty(case.vocab, case.width, device=device, dtype=getattr(torch, case.dtype))
    for rows in weight.split(2**15):
        rows.copy_(normal(*rows.shape) / math.sqrt(case.width))
    weight[:, 0] = unigram / BIAS
    below = unigram.softmax(0).cumsum(0)
    draws = torch.rand(case.tokens, generator=generator, device=device, dtype=torch.float64)
    target = torch.searchsorted(below, draws).clamp_(max=case.vocab - 1)
    hidden = (NOISE * normal(case.tokens, case.width)).add_(weight[target], alpha=PULL)
    hidden[:, 0] = BIAS
    if permute:
        order = torch.randperm(case.vocab, generator=generator, device=device)
        weight, target = weight[order], torch.argsort(order)[target]
    if case.counting < 1:
        target[_ignored(case.tokens, case.counting, seed).to(target.device)] = IGNORED
    return Inputs(hidden.to(getattr(torch, case.dtype)), weight, target)


def _ignored(tokens: int, counting: float, seed: int) -> torch.Tensor:
    """Mask (tokens,) with `counting` of the entries False: prompts (True) and replies (False) in turn."""
    generator = torch.Generator().manual_seed(seed)
    replies = round(tokens * counting)
    turns = max(1, min(tokens // 180, replies, tokens - replies))

    def lengths(total: int) -> torch.Tensor:
        cuts = torch.randperm(total - 1, generator=generator)[: turns - 1].sort().values + 1
        return torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([total]))

    spans = torch.stack([lengths(tokens - replies), lengths(replies)], dim=1).flatten()
    return torch.arange(2 * turns).remainder(2).eq(0).repeat_interleave(spans)


@dataclasses.dataclass(frozen=True)
class Description:
    """What `describe` found. `above`: share of the softmax that is `eps` or more. `rank`: how many of the most likely
    ids have a mean probability of `eps` or more (at most 512 are looked at). `alive`: share of tiles with an entry of
    |softmax - onehot| of `eps` or more, by tile as "128x64" (tokens, ids), and as "128x64 sorted" with the ids in the
    order of their mean logit.
    """

    eps: float
    above: float
    rank: int
    alive: dict[str, float]


@torch.no_grad()
def describe(inputs: Inputs, softcap: float | None, *, chunk: int = 512, tiles: tuple = TILES) -> Description:
    """Measure the softmax of `inputs` against the gradient filter's threshold for their dtype (2^-12 for bfloat16).

    It holds the logits of `chunk` tokens at a time, a multiple of every tile's. Products of bfloat16 entries are exact
    in float32 and TF32, so the fastest float32 product of the device will do.
    """
    eps = auto_filter_eps(inputs.weight.dtype)
    counting = inputs.counting
    vocab = inputs.weight.shape[0]
    heights = {tokens for tokens, _ in tiles}
    maxima: dict[int, list[torch.Tensor]] = {tokens: [] for tokens in heights}
    above = torch.zeros((), dtype=torch.int64, device=counting.device)
    top = torch.zeros(min(512, vocab), dtype=torch.float64, device=counting.device)
    mean_logit = torch.zeros(vocab, dtype=torch.float64, device=counting.device)
    for rows in counting.split(chunk):
        logits = capped_logits(inputs.hidden[rows].float(), inputs.weight, softcap)
        mean_logit += logits.sum(0, dtype=torch.float64)
        softmax = logits.softmax(1)
        above += (softmax >= eps).sum()
        top += softmax.topk(len(top)).values.sum(0, dtype=torch.float64)
        softmax[torch.arange(len(rows), device=rows.device), inputs.target[rows]] -= 1
        entries = softmax.abs_()
        for tokens in heights:
            maxima[tokens] += [block.amax(0) for block in entries.split(tokens)]
    order = mean_logit.argsort()
    alive = {}
    for tokens, ids in tiles:
        stacked = torch.stack(maxima[tokens])
        alive[f"{tokens}x{ids}"] = _share_alive(stacked, ids, eps)
        alive[f"{tokens}x{ids} sorted"] = _share_alive(stacked[:, order], ids, eps)
    rank = int((top / len(counting) >= eps).sum())
    return Description(eps=eps, above=above.item() / (len(counting) * vocab), rank=rank, alive=alive)


def capped_logits(hidden: torch.Tensor, weight: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Logits (n, V) of a few tokens in the dtype of `hidden`, without a copy of all of `weight` in it."""
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0])
    for columns, rows in zip(logits.split(2**14, dim=1), weight.split(2**14), strict=True):
        torch.mm(hidden, rows.to(hidden.dtype).T, out=columns)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _share_alive(maxima: torch.Tensor, ids: int, eps: float) -> float:
    padded = torch.nn.functional.pad(maxima, (0, -maxima.shape[1] % ids))
    return (padded.view(len(maxima), -1, ids).amax(2) >= eps).double().mean().item()
