"""What is measured: ours, PyTorch's and other people's attention of one query over a cache."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paperlm_kernels.bench.declared import Contender
from paperlm_kernels.bench.ops.kv_attention.declared import Case
from paperlm_kernels.bench.peers import AbsentError
from paperlm_kernels.kv_attention import QuantizedKV

Call = Callable[[], Tensor | None]


class Inputs:
    """Gaussian keys and values (batch, context, heads, D), queries (batch, heads, D), in bfloat16."""

    def __init__(self, case: Case, device: torch.device, seed: int) -> None:
        g = torch.Generator(device).manual_seed(seed)
        self.case, self.device = case, device
        shape = (case.batch, case.context, case.heads, case.head_dim)
        self.k, self.v = (torch.randn(shape, generator=g, device=device).bfloat16() for _ in range(2))
        self.q = torch.randn(case.batch, case.heads, case.head_dim, generator=g, device=device).bfloat16()
        angle = torch.rand(case.batch, 1, case.head_dim // 2, generator=g, device=device)
        self.cos, self.sin = angle.cos(), angle.sin()


class Attending(Contender):
    """Attention over a cache of `bits`."""

    bits: ClassVar[int] = 16
    parts: ClassVar[tuple[str, ...]] = ("decode",)

    @abc.abstractmethod
    def call(self, part: str) -> Call:
        """A call with its own copy of the cache. decode: attention of the queries; append: a new position, turned,
        quantized and stored (over the last one, so that the cache stays as long)."""

    def truth(self) -> Tensor:
        """Attention over what this method's cache holds, float64."""
        return _attention(self.inputs.q, self.inputs.k.transpose(1, 2), self.inputs.v.transpose(1, 2))


def _attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    scores = torch.einsum("bhd,bhtd->bht", q.double(), keys.double()) * q.shape[-1] ** -0.5
    return torch.einsum("bht,bhtd->bhd", scores.softmax(-1), values.double())


class Ours(Attending):
    """`QuantizedKV`."""

    bits = 4
    q_bits: ClassVar[int] = 16
    parts = ("decode", "append")

    def cache(self) -> QuantizedKV:
        case, i = self.case, self.inputs
        made = QuantizedKV.empty(
            case.batch, case.heads, case.head_dim, case.context, bits=self.bits, device=i.device
        )  # fmt: skip
        made.append(i.k, i.v)
        return made

    def call(self, part: str) -> Call:
        cache, i = self.cache(), self.inputs
        if part == "decode":
            return lambda: cache.decode(i.q, q_bits=self.q_bits)
        k, v = i.k[:, -1:].contiguous(), i.v[:, -1:].contiguous()

        def append() -> None:
            cache.lengths -= 1
            cache.append(k, v, i.cos, i.sin)

        return append

    def truth(self) -> Tensor:
        from paperlm_kernels.kv_attention import dequantize_heads, quantize_heads

        q = self.inputs.q
        if self.q_bits == 4:
            q = dequantize_heads(*quantize_heads(q, 4, "symmetric"), 4, "symmetric")
        return _attention(q, *self.cache().dequantized())


class Ours3(Ours):
    """3 bits."""

    bits = 3


class Ours3Q4(Ours3):
    """3 bits, the query in 4."""

    q_bits = 4
    parts = ("decode",)


class Torch(Attending):
    """Whichever kernel scaled_dot_product_attention takes."""

    def call(self, part: str) -> Call:
        q = self.inputs.q[:, :, None]
        k, v = (x.transpose(1, 2).contiguous() for x in (self.inputs.k, self.inputs.v))
        return lambda: F.scaled_dot_product_attention(q, k, v)[:, :, 0]


class TorchPadded(Attending):
    """The same with heads of the next multiple of 8, for which it has fast kernels: what a model for it would have."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.more = -inputs.case.head_dim % 8
        if not self.more:
            raise AbsentError("its heads are a multiple of 8 as they are")

    def call(self, part: str) -> Call:
        D = self.case.head_dim
        q, k, v = (F.pad(x, (0, self.more)) for x in (self.inputs.q, self.inputs.k, self.inputs.v))
        q, k, v = q[:, :, None], k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        return lambda: F.scaled_dot_product_attention(q, k, v, scale=D**-0.5)[:, :, 0, :D]


class FlashAttention(Attending):
    """Split over the positions."""

    package = "flash-attn"
    needs_gpu = True

    def call(self, part: str) -> Call:
        from flash_attn import flash_attn_with_kvcache

        q, k, v = self.inputs.q[:, None], self.inputs.k.clone(), self.inputs.v.clone()
        lengths = torch.full((len(q),), self.case.context, dtype=torch.int32, device=q.device)
        return lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)[:, 0]


class FlashInfer(Attending):
    """Its decode of a single sequence."""

    package = "flashinfer-python"
    needs_gpu = True

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        if self.case.batch > 1 or self.case.head_dim not in (64, 128, 256):
            raise AbsentError("single_decode_with_kv_cache takes one sequence, and heads of 64, 128 or 256")

    def call(self, part: str) -> Call:
        from flashinfer import single_decode_with_kv_cache

        q, k, v = self.inputs.q[0], self.inputs.k[0].clone(), self.inputs.v[0].clone()
        return lambda: single_decode_with_kv_cache(q, k, v)[None]


METHODS: dict[str, type[Contender]] = {
    "ours_4bit": Ours,
    "ours_3bit": Ours3,
    "ours_3bit_q4": Ours3Q4,
    "torch": Torch,
    "torch padded": TorchPadded,
    "flash-attn": FlashAttention,
    "flashinfer-python": FlashInfer,
}
