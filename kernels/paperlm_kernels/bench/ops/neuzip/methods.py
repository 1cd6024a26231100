"""What is measured: ours, PyTorch's copies, and other people's codecs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paperlm_kernels.bench.ops.neuzip.ans import Rans
from paperlm_kernels.bench.ops.neuzip.coder import FILE_PARTS, TOKENS, Call, Coder
from paperlm_kernels.bench.ops.neuzip.declared import ROUNDED
from paperlm_kernels.bench.ops.neuzip.peers import DFloat11, NvComp, NvComp13, SplitZip, ZipNN
from paperlm_kernels.neuzip import Packed, pack
from paperlm_kernels.neuzip.files import pack_file, unpack_file
from paperlm_kernels.neuzip.product import linear


class Ours(Coder):
    """`pack` with options. Its codebook is made anew at each packing, and by `update_` once in 64."""

    parts: ClassVar[tuple[str, ...]] = (*Coder.parts, "update", *TOKENS, *FILE_PARTS)
    options: ClassVar[dict[str, Any]] = {}

    def call(self, part: str) -> Call:
        if part == "update":
            stored = self.stored()
            return lambda: stored.update_(self.inputs.weights)
        if part not in TOKENS:
            return super().call(part)
        packed, x = pack(self.matrix(), **self.options), self.inputs.tokens[: TOKENS[part]]
        return lambda: linear(x, packed)

    def stored(self) -> Packed:
        return pack(self.inputs.weights, **self.options)

    def decode(self, stored: Packed, out: Tensor) -> Tensor:
        return stored.unpack(out)

    def bits_of(self, stored: Packed) -> float:
        return stored.bits_per_weight

    def pack_file(self, source: Path, target: Path) -> None:
        pack_file(source, target, **self.options)

    def unpack_file(self, source: Path, target: Path) -> None:
        unpack_file(source, target)


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

    lossless = False
    options = {"mant_bits": 3, "block_norm": 512}


class OursK1(Ours):
    """With 1 bit."""

    lossless = False
    options = {"mant_bits": 1, "block_norm": 512}


class OursK0(Ours):
    """With none."""

    lossless = False
    options = {"mant_bits": 0, "block_norm": 512}


def rounded(name: str) -> type[Ours]:
    """Ours of a name in ROUNDED."""
    _, profile, bits = name.split("_")
    options = {"profile": profile, "mant_bits": int(bits[1:]), "block_norm": 512}
    return type(name, (Ours,), {"__doc__": ROUNDED[name], "lossless": False, "options": options})


class Copy(Coder):
    """Reads and writes 2 bytes a weight, or multiplies with them as they are."""

    parts = (*Coder.parts, *TOKENS)

    def call(self, part: str) -> Call:
        if part not in TOKENS:
            return super().call(part)
        matrix, x = self.matrix().clone(), self.inputs.tokens[: TOKENS[part]]
        return lambda: F.linear(x, matrix)

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
    lossless = False
    bits = 4.5

    def stored(self) -> Any:
        from bitsandbytes.functional import quantize_4bit

        return quantize_4bit(self.inputs.weights.view(-1, 1), blocksize=64, quant_type="nf4")

    def decode(self, stored: Any, out: Tensor) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(*stored).view(-1)


METHODS: dict[str, type[Coder]] = {
    "ours": Ours,
    "ours_dense": OursDense,
    "ours_fast": OursFast,
    "ours_fix4": OursFix4,
    "ours_k3": OursK3,
    "ours_k1": OursK1,
    "ours_k0": OursK0,
    **{name: rounded(name) for name in ROUNDED},
    "copy": Copy,
    "offload pinned": Offload,
    "offload pageable": OffloadPageable,
    "bitsandbytes nf4": NF4,
    "nvidia-nvcomp-cu12": NvComp,
    "nvidia-nvcomp-cu13": NvComp13,
    "dfloat11": DFloat11,
    "splitzip": SplitZip,
    "zipnn": ZipNN,
    "rans": Rans,
}
