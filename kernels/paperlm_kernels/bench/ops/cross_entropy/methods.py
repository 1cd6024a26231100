"""What is measured: our loss in its settings, the losses that hold the logits, and two published packages.

The descriptions name the rows of Table 1 of Cut Cross-Entropy (arXiv 2411.09009, ICLR 2025). Every method gets the
softcap of the case and drops ignored tokens before any product.
"""

from __future__ import annotations

import abc
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paperlm_kernels.bench.ops.cross_entropy.data import IGNORED
from paperlm_kernels.bench.ops.cross_entropy.declared import Case
from paperlm_kernels.bench.peers import AbsentError, why_absent
from paperlm_kernels.bench.rows import version
from paperlm_kernels.cross_entropy import linear_cross_entropy

CHUNKS = 8


class Contender(abc.ABC):
    """A method on one case.

    `settings` go into the row, `package` is a peer's, `modules` take long to import; `compiles`: by torch.compile;
    `own_gradient`: the backward pass can be measured by itself.
    """

    package: str | None = None
    modules: tuple[str, ...] = ()
    needs_gpu = False
    compiles = False
    own_gradient = True

    def __init__(self, case: Case, device: torch.device, **settings: Any) -> None:
        self.case, self.device, self.settings = case, device, settings

    @abc.abstractmethod
    def loss(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """Mean negative log-likelihood of the counting tokens, a differentiable scalar."""

    def per_token(self, hidden: Tensor, weight: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Those of "nll" and "lse" that the method can give for each token (N,), 0 where ignored."""
        return {}

    def counting(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that count."""
        if self.case.counting == 1:
            return hidden, target
        kept = (target != IGNORED).nonzero()[:, 0]
        return hidden[kept], target[kept]

    @classmethod
    def absent(cls, device: str) -> str | None:
        """Why the method cannot run on `cpu` or `cuda` here, as far as can be told without trying."""
        return why_absent(device, package=cls.package, needs_gpu=cls.needs_gpu, compiles=cls.compiles)


class Ours(Contender):
    """`paperlm_kernels.linear_cross_entropy`."""

    modules = ("paperlm_kernels.cross_entropy.ops",)

    def __init__(self, case: Case, device: torch.device, **settings: Any) -> None:
        if device.type != "cuda":
            settings["backend"] = "reference"
        super().__init__(case, device, **settings)

    def loss(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, target, softcap=self.case.softcap, **self.settings)

    def per_token(self, hidden: Tensor, weight: Tensor, target: Tensor) -> dict[str, Tensor]:
        options = {**self.settings, "softcap": self.case.softcap}
        nll, lse = linear_cross_entropy(hidden, weight, target, reduction="none", return_lse=True, **options)
        return {"nll": nll, "lse": lse}


class Eager(Contender):
    """Logits in the dtype of the inputs, capped, then cross-entropy in fp32, as models are usually written."""

    def loss(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return _materialised(*self.counting(hidden, target), weight, self.case.softcap)

    def per_token(self, hidden: Tensor, weight: Tensor, target: Tensor) -> dict[str, Tensor]:
        kept = target != IGNORED
        rows, ids = hidden[kept], target[kept]
        logits = _logits(rows, weight, self.case.softcap).float()
        full = {name: torch.zeros(len(target), device=target.device) for name in ("nll", "lse")}
        full["nll"][kept] = F.cross_entropy(logits, ids, reduction="none")
        full["lse"][kept] = logits.logsumexp(1)
        return full


class Compiled(Eager):
    """The same function in torch.compile, static shapes."""

    modules = ("torch._inductor.compile_fx",)
    compiles = True

    def __init__(self, case: Case, device: torch.device, **settings: Any) -> None:
        super().__init__(case, device, **settings)
        self.compiled = torch.compile(_materialised, dynamic=False)

    def loss(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return self.compiled(*self.counting(hidden, target), weight, self.case.softcap)

    def per_token(self, hidden: Tensor, weight: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {}


class Chunked(Contender):
    """Logits of an eighth of the tokens at a time, all kept for the backward pass; the rest of the loss is compiled."""

    modules = ("torch._inductor.compile_fx",)
    compiles = True

    def __init__(self, case: Case, device: torch.device, **settings: Any) -> None:
        super().__init__(case, device, **settings)
        self.summed = torch.compile(_summed, dynamic=False)

    def loss(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        hidden, target = self.counting(hidden, target)
        chunks = zip(hidden.chunk(CHUNKS), target.chunk(CHUNKS), strict=True)
        parts = [self.summed(_logits(rows, weight, self.case.softcap), ids) for rows, ids in chunks]
        return torch.stack(parts).sum() / len(target)


class Liger(Contender):
    """LinkedIn's fused linear cross-entropy in Triton; it makes both gradients in the forward pass."""

    package = "liger-kernel"
    modules = ("liger_kernel.ops.fused_linear_cross_entropy",)
    needs_gpu = True
    own_gradient = False

    def __init__(self, case: Case, device: torch.device, **settings: Any) -> None:
        super().__init__(case, device, **settings)
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        self.apply = LigerFusedLinearCrossEntropyFunction.apply

    def loss(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        hidden, target = self.counting(hidden, target)
        # Positions: bias, class weights, ignored id, z-loss, label smoothing, reduction, softcap.
        return self.apply(hidden, weight, target, None, None, IGNORED, 0.0, 0.0, "mean", self.case.softcap)[0]


class Authors(Contender):
    """The authors' package. Its release on PyPI has the preset cce alone; the accurate ones are in its repository."""

    package = "cut-cross-entropy"
    modules = ("cut_cross_entropy",)
    needs_gpu = True

    def __init__(self, case: Case, device: torch.device, **settings: Any) -> None:
        super().__init__(case, device, **settings)
        import cut_cross_entropy

        known = [name.lower() for name in cut_cross_entropy.LinearCrossEntropyImpl.__members__]
        if settings["impl"] not in known:
            found = f"{self.package} {version(self.package)}"
            raise AbsentError(f"{found} has no {settings['impl']!r}, only {', '.join(known)}")
        self.function = cut_cross_entropy.linear_cross_entropy

    def loss(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return self.function(hidden, weight, target, softcap=self.case.softcap, **self.settings)

    def per_token(self, hidden: Tensor, weight: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {
            "nll": self.function(hidden, weight, target, softcap=self.case.softcap, reduction="none", **self.settings)
        }


def _logits(hidden: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    logits = hidden @ weight.T
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _materialised(hidden: Tensor, target: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    # The named logits stay alive through the cross-entropy, as they do in a model that returns them.
    logits = _logits(hidden, weight, softcap)
    return F.cross_entropy(logits.float(), target)


def _summed(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target, reduction="sum")


def _ours(**settings: Any) -> partial:
    return partial(Ours, **settings)


METHODS: dict[str, partial] = {
    "ours": _ours(),
    "ours_published_scheme": _ours(memory="lean", vocab_order="mean_logit"),
    "ours_sorted": _ours(vocab_order="mean_logit"),
    "ours_lean": _ours(memory="lean"),
    "ours_lean_unfiltered": _ours(memory="lean", filter_eps=None, backend="triton", keep_logits=False),
    "ours_fast": _ours(memory="fast"),
    "ours_full_c": _ours(filter_grads="hidden"),
    "ours_full_e": _ours(filter_grads="weight"),
    "ours_exact": _ours(filter_eps=None, backend="triton", keep_logits=False),
    "ours_auto_exact": _ours(filter_eps=None),
    "ours_eps_2^-10": _ours(filter_eps=2.0**-10),
    "ours_rounded": _ours(preset="cce"),
    "eager": partial(Eager),
    "torch.compile": partial(Compiled),
    "chunked": partial(Chunked),
    "liger-kernel": partial(Liger),
    "cut-cross-entropy": partial(Authors, impl="cce", filter_eps="auto"),
    "cut-cross-entropy unfiltered": partial(Authors, impl="cce", filter_eps=None),
    "cut-cross-entropy full_c": partial(Authors, impl="cce_kahan_full_c"),
    "cut-cross-entropy full_e": partial(Authors, impl="cce_kahan_full_e"),
    "cut-cross-entropy exact": partial(Authors, impl="cce_exact"),
}
"Constructor, called with (case, device), of each method that `declared` describes."
