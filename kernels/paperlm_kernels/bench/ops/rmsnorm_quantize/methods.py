"""What is measured: our kernel, and what a model does that has none."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from paperlm_kernels.bench.declared import Contender
from paperlm_kernels.bench.ops.rmsnorm_quantize.declared import SITES, Case
from paperlm_kernels.bench.peers import why_absent
from paperlm_kernels.rmsnorm_quantize import rmsnorm_quantize

EPS = 1e-5
Codes = tuple[Tensor, Tensor, Tensor]
"int8 (tokens, width), float32 (tokens,): what a code is worth, int32 (tokens,): the sum of the codes"


class Inputs:
    """Gaussian rows in bfloat16, and gains about 1. `x`: the gate of a GLU, whose `up` and whose `residual` are None
    where the site has none."""

    def __init__(self, case: Case, device: torch.device, seed: int) -> None:
        g = torch.Generator(device).manual_seed(seed)
        self.case, self.device, self.site = case, device, SITES[case.site]

        def rows() -> Tensor:
            return torch.randn(case.tokens, case.width, generator=g, device=device).bfloat16()

        self.x = rows()
        self.up = rows() if self.site.glu else None
        self.residual = rows() if self.site.residual else None
        self.gain = (1 + 0.1 * torch.randn(case.width, generator=g, device=device)).bfloat16()

    def copied(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x, up and residual, each a copy of its own."""
        x, up, residual = (None if t is None else t.clone() for t in (self.x, self.up, self.residual))
        assert x is not None
        return x, up, residual


class Quantizing(Contender):
    """Norm and quantizer; what `call` returns gives `Codes`."""

    parts = ("quantize",)

    def truth(self) -> Tensor:
        """The integers in float64, of the same stream: a residual's sum is rounded to bfloat16, as a model keeps it."""
        i, site = self.inputs, self.inputs.site
        x = i.x if i.residual is None else i.x + i.residual
        y = x.double() if i.up is None else i.up.double() * x.double().relu().square()
        y = y * (y.square().mean(-1, keepdim=True) + EPS).rsqrt() * i.gain.double()
        if site.keep is not None:
            kept = y.abs().sort(dim=-1, descending=True, stable=True).indices[:, : round(site.keep * y.shape[-1])]
            y = torch.zeros_like(y).scatter(-1, kept, y.gather(-1, kept))
        if site.mode == "int4_absmean":
            return (y * math.sqrt(7) / y.abs().mean(-1, keepdim=True)).round().clamp(-8, 7)
        return (y * 127 / y.abs().amax(-1, keepdim=True)).round().clamp(-128, 127)


class Ours(Quantizing):
    """`rmsnorm_quantize`."""

    def call(self, part: str) -> Callable[[], Codes]:
        (x, up, residual), i, site = self.inputs.copied(), self.inputs, self.inputs.site
        D = self.case.width

        def quantize() -> Codes:
            q = rmsnorm_quantize(x, i.gain, site.mode, eps=EPS, keep=site.keep, residual=residual, up=up)
            return q.codes[:, :D], q.scale, q.rowsum

        return quantize


class Torch(Quantizing):
    """The norm's result is kept in bfloat16, as a layer that knows no quantizer gives it."""

    def norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.inputs.gain, EPS)

    def quantized(self, x: Tensor, up: Tensor | None, residual: Tensor | None) -> Codes:
        """The operations, one after the other."""
        site = self.inputs.site
        if residual is not None:
            x = x + residual
        if up is not None:
            x = up * x.relu().square()
        y = self.norm(x)
        if site.keep is not None:
            kept = y.abs().topk(round(site.keep * y.shape[-1]), dim=-1).indices
            y = torch.zeros_like(y).scatter(-1, kept, y.gather(-1, kept))
        y = y.float()
        if site.mode == "int4_absmean":
            low, high, scale = -8, 7, y.abs().mean(-1) / math.sqrt(7)
        else:
            low, high, scale = -128, 127, y.abs().amax(-1) / 127
        codes = (y / scale[:, None]).round().clamp(low, high).to(torch.int8)
        return codes, scale, codes.sum(-1, dtype=torch.int32)

    def call(self, part: str) -> Callable[[], Codes]:
        given = self.inputs.copied()
        return lambda: self.quantized(*given)


class TorchCompiled(Torch):
    """Whatever Inductor makes of it for this one shape."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.compiled = torch.compile(self.quantized, dynamic=False)

    @classmethod
    def absent(cls, device: str) -> str | None:
        return why_absent(device, compiles=True)

    def call(self, part: str) -> Callable[[], Codes]:
        given = self.inputs.copied()
        return lambda: self.compiled(*given)


class Liger(Torch):
    """Its norm, in Triton."""

    package = "liger-kernel"
    needs_gpu = True

    def norm(self, x: Tensor) -> Tensor:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return LigerRMSNormFunction.apply(x, self.inputs.gain, EPS, 0.0, "llama", False)


METHODS: dict[str, type[Contender]] = {
    "ours": Ours,
    "torch": Torch,
    "torch compiled": TorchCompiled,
    "liger-kernel": Liger,
}
