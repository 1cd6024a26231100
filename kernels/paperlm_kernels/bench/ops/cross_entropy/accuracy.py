"""Errors of losses and gradients against float64 arithmetic on the same inputs, and reproducibility."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from paperlm_kernels.bench.ops.cross_entropy.data import Inputs
from paperlm_kernels.bench.ops.cross_entropy.measure import step
from paperlm_kernels.bench.ops.cross_entropy.methods import Contender


@dataclasses.dataclass(frozen=True)
class Truth:
    """In float64: `nll` and `lse` (N,), 0 where ignored; gradients (N, D), (V, D) of the mean over counting tokens."""

    nll: Tensor
    lse: Tensor
    d_hidden: Tensor
    d_weight: Tensor


@torch.no_grad()
def truth(inputs: Inputs, softcap: float | None, chunk: int = 8192) -> Truth:
    """The loss and its gradients, `chunk` ids at a time: never more than a few matrices of all tokens x `chunk`."""
    kept = inputs.counting
    hidden, target = inputs.hidden[kept].double(), inputs.target[kept]
    every = torch.arange(len(kept), device=kept.device)
    lse = torch.full((len(kept),), -torch.inf, dtype=torch.float64, device=kept.device)
    picked = torch.zeros_like(lse)

    def capped(start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Capped logits of a chunk, which tokens have their target in it, and the column of each one's target."""
        logits = hidden @ inputs.weight[start : start + chunk].double().T
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        column = target - start
        here = (column >= 0) & (column < logits.shape[1])
        return logits, every[here], column[here]

    starts = range(0, inputs.weight.shape[0], chunk)
    for start in starts:
        logits, rows, columns = capped(start)
        lse = torch.logaddexp(lse, logits.logsumexp(1))
        picked[rows] = logits[rows, columns]
    d_kept = torch.zeros_like(hidden)
    d_weight = torch.empty(inputs.weight.shape, dtype=torch.float64, device=kept.device)
    for start in starts:
        logits, rows, columns = capped(start)
        gradient = (logits - lse[:, None]).exp_()
        gradient[rows, columns] -= 1
        gradient /= len(kept)
        if softcap is not None:
            gradient *= 1 - (logits / softcap) ** 2
        d_kept.addmm_(gradient, inputs.weight[start : start + chunk].double())
        torch.mm(gradient.T, hidden, out=d_weight[start : start + chunk])
    full = lambda values: values.new_zeros(len(inputs.target), *values.shape[1:]).index_copy_(0, kept, values)  # noqa: E731
    return Truth(full(lse - picked), full(lse), full(d_kept), d_weight)


def errors(contender: Contender, inputs: Inputs, exact: Truth) -> dict[str, float]:
    """Relative error (Frobenius norm) of the gradients "dE" and "dC", and as "dE norm" and "dC norm" their norms over
    the exact ones; largest error of "nll" and "lse", if given."""
    _gradients(contender, inputs)
    found = {
        "dE": _relative(inputs.hidden.grad, exact.d_hidden),
        "dC": _relative(inputs.weight.grad, exact.d_weight),
    }
    for name, leaf, right in (("dE", inputs.hidden, exact.d_hidden), ("dC", inputs.weight, exact.d_weight)):
        found[f"{name} norm"] = (leaf.grad.norm(dtype=torch.float64) / right.norm()).item()
    inputs.hidden.grad = inputs.weight.grad = None
    with torch.no_grad():
        for name, values in contender.per_token(inputs.hidden, inputs.weight, inputs.target).items():
            found[name] = (values.double() - getattr(exact, name)).abs().max().item()
    return found


def _relative(values: Tensor, exact: Tensor) -> float:
    squares = sum((a.double() - b).square().sum() for a, b in zip(values.split(2**14), exact.split(2**14), strict=True))
    return (squares.sqrt() / exact.norm()).item()


def reproducible(contender: Contender, inputs: Inputs, runs: int = 3) -> dict[str, bool]:
    """Whether `runs` runs give the same bits, for the loss and both gradients."""
    first = _gradients(contender, inputs)
    same = dict.fromkeys(("loss", "dE", "dC"), True)
    for _ in range(runs - 1):
        for name, a, b in zip(same, first, _gradients(contender, inputs), strict=True):
            same[name] &= torch.equal(a, b)
    inputs.hidden.grad = inputs.weight.grad = None
    return same


def _gradients(contender: Contender, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    both = step(contender, inputs, "gradient")
    loss = both.prepare()
    both.run(loss)
    return loss.detach(), inputs.hidden.grad, inputs.weight.grad
