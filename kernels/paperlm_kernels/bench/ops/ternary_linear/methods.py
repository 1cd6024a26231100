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
from paperlm_kernels.ternary_linear.packing import CHUNK, padded

Call = Callable[[], Tensor]
EPS = 1e-5
GROUP = 32
"Columns of whose multiples GemLite takes a matrix."


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

    def operand(self, part: str) -> Callable[[Quantized], Tensor]:
        packed, alpha, layer = pack_ternary(self.inputs.weight), self.inputs.alpha.clone(), part == "layer"
        return lambda q: ternary_linear(q.codes, q.scale, q.rowsum, packed, alpha, behind_norm=layer)

    def call(self, part: str) -> Call:
        multiply = self.operand(part)
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

    def operand(self, part: str) -> Callable[[Quantized], Tensor]:
        packed, alpha = pack_ternary(self.inputs.weight.T), self.inputs.alpha.clone()
        return lambda q: sparse_columns_linear(q.codes, q.scale, q.rowsum, packed, alpha, q.places, q.counts)


class OursInt8(Ours):
    """The same kernel on a byte a weight: what unpacking costs, and a ceiling."""

    needs_gpu = True
    bits = 8

    def operand(self, part: str) -> Callable[[Quantized], Tensor]:
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

    def operand(self, part: str) -> Callable[[Quantized], Tensor]:
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

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        if self.case.columns % GROUP:
            raise AbsentError(f"it takes columns in groups of {GROUP}, and {self.case.columns} are no multiple")

    def call(self, part: str) -> Call:
        from gemlite.helper import A8W158_INT_dynamic

        i = self.inputs
        # it has one scale for a matrix; ours has one for each row, which costs the same
        layer = A8W158_INT_dynamic(device=str(i.device), dtype=torch.bfloat16).from_weights(
            i.weight.to(torch.bfloat16), i.alpha.mean()
        )
        return lambda: layer(F.rms_norm(i.x, i.x.shape[-1:], i.gain, EPS))


class GemLiteMax(GemLite):
    """With the longest of its lists of tiles tried, which takes minutes a shape; its default is the shortest."""

    def call(self, part: str) -> Call:
        import gemlite

        gemlite.set_autotune("max")
        return super().call(part)


class TorchAO(Ours):
    """int8 x int8 with scaling in one Triton kernel."""

    package = "torchao"
    needs_gpu = True
    bits = 8

    def operand(self, part: str) -> Callable[[Quantized], Tensor]:
        import torchao.prototype.quantized_training.int8_mm  # noqa: F401 - defines the operator

        weight, alpha, K = self.inputs.weight.clone(), self.inputs.alpha.clone(), self.case.columns
        # the operator and not scaled_int8_mm, whose check of shapes takes a single token for none
        multiply = torch.ops.torchao.scaled_int8_mm
        return lambda q: multiply(q.codes[:, :K].contiguous(), weight.T, q.scale, alpha)


class Quack(Product):
    """e4m3 activations, 4-bit weights with a scale for every 128, which the matrix units read from registers."""

    package = "quack-kernels"
    needs_gpu = True
    bits = 4

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        if self.case.columns % CHUNK:
            raise AbsentError(f"its weights have a scale for every {CHUNK} columns, and {self.case.columns} are no "
                              "multiple")  # fmt: skip

    def quantized(self, gain: Tensor | None) -> tuple[Tensor, Tensor]:
        from quack.gemm_w4 import quantize_act_per_token_fp8

        x = self.inputs.x
        return quantize_act_per_token_fp8(x if gain is None else F.rms_norm(x, x.shape[-1:], gain, EPS))

    def call(self, part: str) -> Call:
        from quack.gemm_w4 import gemm_w4a8, prepare_w4_weight

        N, K = self.inputs.weight.shape
        codes = sign_magnitude(self.inputs.weight)
        scales = self.inputs.alpha.bfloat16()[:, None].expand(N, K // CHUNK).contiguous()
        blob, strip = prepare_w4_weight(codes, scales, "int4sm")

        def multiply(given: tuple[Tensor, Tensor]) -> Tensor:
            return gemm_w4a8(given[0], blob, strip, act_scale=given[1], n_out=N)

        if part == "layer":
            return lambda: multiply(self.quantized(self.inputs.gain))
        given = self.quantized(None)
        return lambda: multiply(given)

    def truth(self) -> Tensor:
        i, (codes, scale) = self.inputs, self.quantized(None)
        alpha = i.alpha.bfloat16().double()
        return (codes.double() * scale.double()[:, None]) @ i.weight.double().T * alpha


def sign_magnitude(weight: Tensor) -> Tensor:
    """Two codes a byte, uint8 (N, K / 2), the even column in the low bits: 3 bits of magnitude under one of sign."""
    code = weight.abs().to(torch.uint8) | ((weight < 0).to(torch.uint8) << 3)
    return code[:, 0::2] | (code[:, 1::2] << 4)


class BitBLAS(Ours):
    """int8 x int2 into int32, scaled by PyTorch. Its authors tested it up to compute capability 8.9."""

    package = "bitblas"
    needs_gpu = True

    def operand(self, part: str) -> Callable[[Quantized], Tensor]:
        import bitblas

        (N, K), M = self.inputs.weight.shape, self.case.tokens
        config = bitblas.MatmulConfig(
            M=M, N=N, K=K, A_dtype="int8", W_dtype="int2", accum_dtype="int32", out_dtype="int32", layout="nt"
        )
        product, alpha = bitblas.Matmul(config, enable_tuning=True), self.inputs.alpha.clone()
        weight = product.transform_weight(self.inputs.weight)

        def multiply(q: Quantized) -> Tensor:
            y = product(q.codes[:, :K].contiguous(), weight)
            return (y * q.scale[:, None] * alpha).bfloat16()

        return multiply


METHODS: dict[str, type[Contender]] = {
    "ours": Ours,
    "ours_int4": OursInt4,
    "ours_sparse": OursSparse,
    "ours_int8": OursInt8,
    "torch": Torch,
    "torch int_mm": TorchIntMM,
    "torch unpacked": TorchUnpacked,
    "gemlite": GemLite,
    "gemlite max": GemLiteMax,
    "torchao": TorchAO,
    "quack-kernels": Quack,
    "bitblas": BitBLAS,
}
