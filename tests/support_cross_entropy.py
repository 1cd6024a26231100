"""Helpers of the cross-entropy tests: where they run, their data, and the truth in float64."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from paperlm_kernels import linear_cross_entropy


class Place(NamedTuple):
    """A backend on a device in a dtype."""

    backend: str
    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def exact(self) -> bool:
        """Float64: errors are those of another order of summation."""
        return self.dtype == torch.float64


CPU = Place("reference", "cpu", torch.float64)


def _hasten_the_interpreter() -> None:
    """Spare Triton's interpreter what it does beside computing what the kernels say, about half of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    # Each integer sum is computed again in 64 bits; no index of these small problems needs more than 32.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

    # The table from Triton's types to NumPy's is built again for every value.
    np_dtype, found = interpreter._get_np_dtype, {}

    def np_dtype_once(kind):
        name = kind.scalar.name
        if name not in found:
            found[name] = np_dtype(kind)
        return found[name]

    interpreter._get_np_dtype = np_dtype_once

    # Each call of a device function puts the interpreted operators into triton.language, where the kernel's launch
    # has put them already.
    patch, done = interpreter._patch_lang, set()

    def patch_once(fn):
        modules = {id(v) for v in fn.__globals__.values() if v is tl or v is tl.core}
        if modules <= done:
            return None
        scope = patch(fn)
        done.update(modules)
        restore = scope.restore

        def restore_and_forget():
            done.clear()
            restore()

        scope.restore = restore_and_forget
        return scope

    interpreter._patch_lang = patch_once


def _places() -> list[Place]:
    places = [CPU, Place("reference", "cpu", torch.bfloat16)]
    if os.environ.get("TRITON_INTERPRET") == "1":
        _hasten_the_interpreter()
        places.append(Place("triton", "cpu", torch.float32))
    elif torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0):
        places += [Place("triton", "cuda", d) for d in (torch.float32, torch.float16, torch.bfloat16)]
    return places


# With TRITON_INTERPRET=1, or on a GPU, the kernels go through the same tests as the reference.
PLACES = _places()
DENSE = [Place("eager", "cpu", torch.float64)]
everywhere = pytest.mark.parametrize("place", PLACES, ids=str)
also_dense = pytest.mark.parametrize("place", PLACES + DENSE, ids=str)
KERNELS = [p for p in PLACES if p.backend == "triton"]
kernels = pytest.mark.parametrize("place", KERNELS, ids=str)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Problem(NamedTuple):
    """Leaf tensors in the place's dtype, and the targets."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [t for t in self[:3] if t is not None]


IGNORE = ("none", "some", "all but one", "all")


def problem(place, tokens=(2, 65), width=24, vocab=300, *, bias=True, ignore="none", seed=0, spread=1.0):
    """Random tensors; `ignore` says which targets are -100: none, a fifth, all but one, or all."""
    g = torch.Generator().manual_seed(seed)
    hidden = spread * torch.randn(*tokens, width, generator=g, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=g, dtype=torch.float64) / width**0.5
    offset = torch.randn(vocab, generator=g, dtype=torch.float64) if bias else None
    target = torch.randint(0, vocab, tokens, generator=g)
    if ignore == "some":
        target[torch.rand(tokens, generator=g) < 0.2] = -100
    elif ignore != "none":
        # The one that counts is the last, so that a shift keeps it.
        last = target.view(-1)[-1:].clone()
        target.fill_(-100)
        if ignore == "all but one":
            target.view(-1)[-1:] = last
    leaves = (None if t is None else t.to(place.device, place.dtype).requires_grad_() for t in (hidden, weight, offset))
    return Problem(*leaves, target.to(place.device))


def truth(
    p, *, softcap=None, logit_scale=1.0, reduction="mean", shift=0, z_loss=0.0, return_lse=False, dtype=torch.float64
):
    """Loss, log-sum-exp and gradient leaves by PyTorch's own cross-entropy, from the same rounded inputs."""
    leaves = [t.detach().cpu().to(dtype).requires_grad_() for t in p.leaves]
    hidden, weight, target = leaves[0], leaves[1], p.target.cpu()
    columns = target.shape[-1] - shift
    hidden_used, target = hidden[..., :columns, :], target[..., shift:]
    logits = logit_scale * F.linear(hidden_used, weight)
    if p.bias is not None:
        logits = logits + leaves[2]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat = logits.reshape(-1, weight.shape[0])
    lse = torch.where(target != -100, logits.logsumexp(-1), 0.0)
    loss = F.cross_entropy(flat, target.reshape(-1), reduction=reduction)
    loss = loss.reshape(target.shape) if reduction == "none" else loss
    if z_loss:
        squares = lse.square()
        count = (target != -100).sum()
        loss = loss + z_loss * (
            squares if reduction == "none" else squares.sum() / (count if reduction == "mean" else 1)
        )
    return loss, lse, leaves


def scalar(loss, lse=None):
    """A number that depends on every entry of the loss, and of lse if given, with unequal weights."""
    weights = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype, device=loss.device).view(loss.shape)
    total = (weights * loss).sum()
    return (
        total
        if lse is None
        else total + 0.01 * (lse * torch.linspace(-1, 1, lse.numel()).to(lse).view(lse.shape)).sum()
    )


def relative(actual, expected):
    """Norm of the difference over the norm of the truth."""
    expected = expected.double().cpu()
    return ((actual.double().cpu() - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def check_gradients(place, gradients, expected, bounds=None):
    """Relative error of each gradient; in 16 bits one rounding, so 5e-3 unless a bound is given."""
    limits = {torch.float64: 1e-12, torch.float32: 1e-5}
    for k, (mine, right) in enumerate(zip(gradients, expected, strict=True)):
        bound = (bounds or {}).get(k, limits.get(place.dtype, 5e-3))
        assert mine.dtype == place.dtype and mine.shape == right.shape
        assert relative(mine, right) <= bound, f"gradient {k}: {relative(mine, right):.2e} > {bound:.2e}"


def check_values(place, values, expected, largest=1.0):
    """Loss or log-sum-exp; products of 16-bit inputs are exact and summed in float32."""
    bound = 1e-12 if place.exact else (1e-5 if place.dtype == torch.float32 else 2e-5) * max(1.0, largest)
    assert values.dtype == (torch.float64 if place.exact else torch.float32)
    assert values.shape == expected.shape
    torch.testing.assert_close(values.double().cpu(), expected.double(), atol=bound, rtol=bound, equal_nan=True)


def compare(place, p, **keywords):
    """Loss, log-sum-exp and gradients of every leaf against the truth, unfiltered."""
    loss, lse = run(place, p, return_lse=True, filter_eps=None, **keywords)
    keywords.pop("keep_logits", None)
    right, right_lse, leaves = truth(p, **keywords)
    check_values(place, loss, right)
    check_values(place, lse, right_lse)
    if right.isfinite().all():
        mine = torch.autograd.grad(scalar(loss, lse), p.leaves)
        check_gradients(place, mine, torch.autograd.grad(scalar(right, right_lse), leaves))
    return loss


def run(place, p, **keywords):
    """The function on a problem. Kept logits are rounded to the dtype and have tests of their own, so not by
    default."""
    if place.backend == "triton":
        keywords = {"keep_logits": False, **keywords}
    return linear_cross_entropy(p.hidden, p.weight, p.target, bias=p.bias, backend=place.backend, **keywords)


def pairwise(choices):
    """Settings in which every pair of choices of two keywords occurs: the greedy all-pairs cover."""
    names = list(choices)
    missing = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in choices[a] for y in choices[b]}
    everything = [dict(zip(names, values, strict=True)) for values in itertools.product(*choices.values())]

    def covers(setting):
        return {(a, setting[a], b, setting[b]) for a, b in itertools.combinations(names, 2)}

    picked = []
    while missing:
        best = max(everything, key=lambda s: len(covers(s) & missing))
        picked.append(best)
        missing -= covers(best)
    return picked


def gradients(place, p, **keywords):
    """The loss and the gradients of the leaves."""
    loss = run(place, p, **keywords)
    return [loss.detach(), *torch.autograd.grad(loss, p.leaves)]


@contextlib.contextmanager
def poisoned():
    """Every torch.empty holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def tighten(monkeypatch):
    """No scratch beyond one group of tiles, so that there are as many waves as can be (few if dC has no storage)."""
    from paperlm_kernels.cross_entropy import launch, waves

    most = launch.most_waves

    monkeypatch.setattr(waves, "BUDGETS", {k: (0.0, 0) for k in waves.BUDGETS})
    monkeypatch.setattr(waves, "UNFILTERED_BALANCED", 0.0)
    monkeypatch.setattr(launch, "most_waves", lambda m, e, frozen, *rest: most(m, e, frozen, *rest) if frozen else None)
