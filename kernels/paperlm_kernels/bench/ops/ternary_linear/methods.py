"""What is measured: ours, PyTorch's, and other people's products with ternary weights."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paperlm_kernels.bench.declared import Contender
from paperlm_kernels.bench.ops.ternary_linear.declared import Case
from paperlm_kernels.bench.peers import AbsentError
from paperlm_kernels.rmsnorm_quantize import Quantized, rmsnorm_quantize
from paperlm_kernels.ternary_linear import pack_ternary, sparse_columns_linear, ternary_linear, unpack_ternary
from paperlm_kernels.ternary_linear.packing import padded

Call = Callable[[], Tensor]
EPS = 1e-5


class Inputs:
    """Gaussian activations (tokens, columns) in bfloat16, ternary weights with -1, 0 and 1 equally often, scales."""

    def __init__(self, case: Case, device: torch.device, seed: int) -> None:
        g = torch.Generator(device).manual_seed(seed)
        shape = (case.rows, case.columns)
        self.case, self.device = case, device
        self.x = torch.randn(case.tokens, case.columns, generator=g, device=device).bfloat16()
        self.weight = torch.randint(-1, 2, shape, generator=g, device=device, dtype=torch.int8)
        self.alpha = torch.rand(case.rows, generator=g, device=device) + 0.5
        self.gain = torch.ones(case.columns, device=device, dtype=torch.bfloat16)


class Product(Contender):
    """A product. `bits` of a weight in its operands; `parts` that it can be asked for."""

    bits: ClassVar[float] = 2
    parts: ClassVar[tuple[str, ...]] = ("product", "layer")

    @abc.abstractmethod
    def call(self, part: str) -> Call:
        """A call with its own copy of the weights. product: the input is quantized already; layer: RMSNorm, quantizer
        and product of the bfloat16 input."""

    def truth(self) -> Tensor:
        """What the product should give, float64."""
        i = self.inputs
        return i.x.double() @ i.weight.double().T * i.alpha.double()


class Ours(Product):
    """Packed weights."""

    mode: ClassVar[str] = "int8_absmax"
    keep: ClassVar[float | None] = None

    def quantized(self, gain: Tensor | None) -> Quantized:
        return rmsnorm_quantize(self.inputs.x, gain, self.mode, eps=EPS, keep=self.keep, compact=self.keep is not None)

    def operand(self) -> Callable[[Quantized], Tensor]:
        packed, alpha = pack_ternary(self.inputs.weight), self.inputs.alpha.clone()
        return lambda q: ternary_linear(q.codes, q.scale, q.rowsum, packed, alpha)

    def call(self, part: str) -> Call:
        multiply = self.operand()
        if part == "layer":
            return lambda: multiply(self.quantized(self.inputs.gain))
        given = self.quantized(None)
        return lambda: multiply(given)

    def truth(self) -> Tensor:
        i, q = self.inputs, self.quantized(None)
        values = q.codes[:, : self.case.columns].double() * q.scale.double()[:, None]
        return values @ i.weight.double().T * i.alpha.double()


class OursInt4(Ours):
    """Codes of 4 bits."""

    mode = "int4_absmean"


class OursSparse(Ours):
    """A second copy of the weights, along K."""

    keep = 0.5

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        if self.case.tokens > 4 or self.case.columns % 2:
            raise AbsentError("each token reads its own rows: for up to 4 tokens, and an even number of columns")

    def operand(self) -> Callable[[Quantized], Tensor]:
        packed, alpha = pack_ternary(self.inputs.weight.T), self.inputs.alpha.clone()
        return lambda q: sparse_columns_linear(q.codes, q.scale, q.rowsum, packed, alpha, q.places, q.counts)


class OursInt8(Ours):
    """The same kernel on a byte a weight: what unpacking costs, and a ceiling."""

    needs_gpu = True
    bits = 8

    def operand(self) -> Callable[[Quantized], Tensor]:
        from paperlm_kernels.ternary_linear.launch import run_linear

        N, K = self.inputs.weight.shape
        dense = torch.ones(padded(N), padded(K), dtype=torch.int8, device=self.inputs.device)
        dense[:N, :K] = self.inputs.weight + 1
        alpha = self.inputs.alpha.clone()
        return lambda q: run_linear(q.codes, q.scale, q.rowsum, dense, alpha, N, torch.bfloat16)


class Torch(Product):
    """cuBLAS."""

    bits = 16

    def weight(self) -> Tensor:
        return (self.inputs.weight * self.inputs.alpha[:, None]).bfloat16()

    def call(self, part: str) -> Call:
        weight, i = self.weight(), self.inputs
        if part == "layer":
            return lambda: F.linear(F.rms_norm(i.x, i.x.shape[-1:], i.gain, EPS), weight)
        return lambda: F.linear(i.x, weight)


class TorchUnpacked(Product):
    """Unpacked anew each time, as a model does that knows no kernel."""

    def call(self, part: str) -> Call:
        i, packed, alpha = self.inputs, pack_ternary(self.inputs.weight), self.inputs.alpha.bfloat16()

        def product(x: Tensor) -> Tensor:
            return F.linear(x, unpack_ternary(packed).bfloat16()) * alpha

        if part == "layer":
            return lambda: product(F.rms_norm(i.x, i.x.shape[-1:], i.gain, EPS))
        return lambda: product(i.x)


class TorchIntMM(Ours):
    """int8 x int8 by cuBLASLt, scaled by PyTorch."""

    needs_gpu = True
    bits = 8

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        M, N, K = self.case.tokens, self.case.rows, self.case.columns
        if M <= 16 or N % 8 or K % 8:
            raise AbsentError(f"torch._int_mm takes more than 16 rows and multiples of 8, not {M} and {N} x {K}")

    def operand(self) -> Callable[[Quantized], Tensor]:
        weight, alpha, K = self.inputs.weight.clone(), self.inputs.alpha.clone(), self.case.columns

        def multiply(q: Quantized) -> Tensor:
            y = torch._int_mm(q.codes[:, :K].contiguous(), weight.T)
            return (y * q.scale[:, None] * alpha).bfloat16()

        return multiply


class GemLite(Product):
    """Quantizes its input itself, so that it has no product alone."""

    package = "gemlite"
    needs_gpu = True
    parts = ("layer",)

    def call(self, part: str) -> Call:
        from gemlite.helper import A8W158_INT_dynamic

        i = self.inputs
        # it has one scale for a matrix; ours has one for each row, which costs the same
        layer = A8W158_INT_dynamic(device=str(i.device), dtype=torch.bfloat16).from_weights(
            i.weight.to(torch.bfloat16), i.alpha.mean()
        )
        return lambda: layer(F.rms_norm(i.x, i.x.shape[-1:], i.gain, EPS))


class TorchAO(Ours):
    """int8 x int8 with scaling in one Triton kernel."""

    package = "torchao"
    needs_gpu = True
    bits = 8

    def operand(self) -> Callable[[Quantized], Tensor]:
        from torchao.prototype.quantized_training.int8_mm import scaled_int8_mm

        weight, alpha, K = self.inputs.weight.clone(), self.inputs.alpha.clone(), self.case.columns
        return lambda q: scaled_int8_mm(q.codes[:, :K].contiguous(), weight.T, q.scale, alpha)


class Untried(Product):
    """A peer for which nothing has been written that has run: said so where it is asked for."""

    needs_gpu = True
    why: ClassVar[str]

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        raise AbsentError(self.why)

    def call(self, part: str) -> Call:
        raise AbsentError(self.why)


class Quack(Untried):
    """4-bit weights with a scale for every 128, e4m3 activations."""

    package = "quack-kernels"
    bits = 4
    why = "the preparation of its 4-bit weights has not been tried on a card"


class BitBLAS(Untried):
    """Tested by its authors up to compute capability 8.9."""

    package = "bitblas"
    why = "its authors tested it up to compute capability 8.9; not tried on Hopper"


METHODS: dict[str, type[Contender]] = {
    "ours": Ours,
    "ours_int4": OursInt4,
    "ours_sparse": OursSparse,
    "ours_int8": OursInt8,
    "torch": Torch,
    "torch int_mm": TorchIntMM,
    "torch unpacked": TorchUnpacked,
    "gemlite": GemLite,
    "torchao": TorchAO,
    "quack-kernels": Quack,
    "bitblas": BitBLAS,
}
