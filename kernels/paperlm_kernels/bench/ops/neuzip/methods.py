"""What is measured: ours, PyTorch's copies, and other people's codecs."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from paperlm_kernels.bench.declared import Contender
from paperlm_kernels.bench.ops.neuzip.declared import Case
from paperlm_kernels.bench.peers import AbsentError
from paperlm_kernels.neuzip import Packed, pack

Call = Callable[[], Any]
SCALE = 0.02


class Inputs:
    """Weights N(0, 0.02^2) in bfloat16, as in the paper's Figure 5."""

    def __init__(self, case: Case, device: torch.device, seed: int) -> None:
        g = torch.Generator(device).manual_seed(seed)
        self.case, self.device = case, device
        self.weights = torch.empty(case.weights, dtype=torch.bfloat16, device=device)
        for part in self.weights.split(2**24):  # never the whole in float32
            part.copy_(torch.randn(len(part), generator=g, device=device) * SCALE)


class Coder(Contender):
    """A codec. `stored` is what it keeps; `bits` of a weight in it are known once it is there."""

    parts: ClassVar[tuple[str, ...]] = ("decode", "encode")
    bits: float = 16.0

    @abc.abstractmethod
    def stored(self) -> Any:
        """The weights, coded; a new copy."""

    @abc.abstractmethod
    def decode(self, stored: Any, out: Tensor) -> Tensor:
        """The weights, in `out` where it can write there."""

    def bits_of(self, stored: Any) -> float:
        """Bits of a weight in what is stored."""
        return self.bits

    def call(self, part: str) -> Call:
        if part == "encode":
            return self.stored
        stored, out = self.stored(), torch.empty_like(self.inputs.weights)
        return lambda: self.decode(stored, out)

    def truth(self) -> Tensor:
        return self.inputs.weights


class Ours(Coder):
    """`pack` with options. Its codebook is made anew at each packing."""

    options: ClassVar[dict[str, Any]] = {}

    def stored(self) -> Packed:
        return pack(self.inputs.weights, **self.options)

    def decode(self, stored: Packed, out: Tensor) -> Tensor:
        return stored.unpack(out)

    def bits_of(self, stored: Packed) -> float:
        return stored.bits_per_weight


class OursDense(Ours):
    """Streams of 1,024 weights."""

    options = {"profile": "dense"}


class OursFast(Ours):
    """Streams of 64 weights."""

    options = {"profile": "fast"}


class OursFix4(Ours):
    """No streams."""

    options = {"profile": "fix4"}


class OursK3(Ours):
    """The paper's lossy setting with 3 bits."""

    options = {"mant_bits": 3, "block_norm": 512}


class OursK1(Ours):
    """With 1 bit."""

    options = {"mant_bits": 1, "block_norm": 512}


class OursK0(Ours):
    """With none."""

    options = {"mant_bits": 0, "block_norm": 512}


class Copy(Coder):
    """Reads and writes 2 bytes a weight."""

    def stored(self) -> Tensor:
        return self.inputs.weights.clone()

    def decode(self, stored: Tensor, out: Tensor) -> Tensor:
        return out.copy_(stored)


class Offload(Coder):
    """To the host and back, without waiting."""

    needs_gpu = True
    pinned: ClassVar[bool] = True

    def stored(self) -> Tensor:
        host = torch.empty(self.case.weights, dtype=torch.bfloat16, pin_memory=self.pinned)
        return host.copy_(self.inputs.weights, non_blocking=self.pinned)

    def call(self, part: str) -> Call:
        if part == "encode":  # page-locking takes far longer than the copy, and is done once
            host, pinned = self.stored(), self.pinned
            return lambda: host.copy_(self.inputs.weights, non_blocking=pinned)
        return super().call(part)

    def decode(self, stored: Tensor, out: Tensor) -> Tensor:
        return out.copy_(stored, non_blocking=self.pinned)


class OffloadPageable(Offload):
    """Memory that the driver copies once more."""

    pinned = False


class NF4(Coder):
    """bitsandbytes' 4-bit normal floats."""

    package = "bitsandbytes"
    needs_gpu = True
    bits = 4.5

    def stored(self) -> Any:
        from bitsandbytes.functional import quantize_4bit

        return quantize_4bit(self.inputs.weights.view(-1, 1), blocksize=64, quant_type="nf4")

    def decode(self, stored: Any, out: Tensor) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(*stored).view(-1)


class Untried(Coder):
    """A peer for which nothing has been written that has run: said so where it is asked for."""

    needs_gpu = True
    why: ClassVar[str]

    def __init__(self, inputs: Any) -> None:
        super().__init__(inputs)
        raise AbsentError(self.why)

    def stored(self) -> Any:
        raise AbsentError(self.why)

    def decode(self, stored: Any, out: Tensor) -> Tensor:
        raise AbsentError(self.why)


class NvComp(Untried):
    """A closed library, in two wheels: the second, nvidia-libnvcomp-cu12, decodes."""

    package = "nvidia-nvcomp-cu12"
    why = "no merge of its exponents has been tried on a card"


class DFloat11(Untried):
    """Needs CuPy."""

    package = "dfloat11"
    why = "its decoder has not been tried on a card from here"


class SplitZip(Untried):
    """A repository without a package."""

    package = "splitzip"
    why = "it is no package that could be installed; not tried on a card"


class ZipNN(Untried):
    """Needs a C compiler."""

    package = "zipnn"
    needs_gpu = False
    why = "not tried"


METHODS: dict[str, type[Coder]] = {
    "ours": Ours,
    "ours_dense": OursDense,
    "ours_fast": OursFast,
    "ours_fix4": OursFix4,
    "ours_k3": OursK3,
    "ours_k1": OursK1,
    "ours_k0": OursK0,
    "copy": Copy,
    "offload pinned": Offload,
    "offload pageable": OffloadPageable,
    "bitsandbytes nf4": NF4,
    "nvidia-nvcomp-cu12": NvComp,
    "dfloat11": DFloat11,
    "splitzip": SplitZip,
    "zipnn": ZipNN,
}
