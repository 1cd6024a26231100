"""Weights in fewer bits: time and size of ours and others', on Gaussian weights as a fresh model has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paperlm_kernels.bench.declared import Declared
from paperlm_kernels.bench.operation import Defaults, Task


class NeuZip(Declared):
    """A tensor of bfloat16 weights to fewer bits, and back (NeuZip, arXiv 2410.20650, Figure 4)."""

    summary = "time and bits of packing and unpacking weights, ours and others'"
    measures = {
        "decode": "time of unpacking to bfloat16",
        "encode": "time of packing",
        "update": "time of packing in place of what was packed before, as a step of training does",
        "gemv": "time of the product with a token, of rows of 8,192 weights",
        "gemv8": "the same with 8 tokens",
        "bits": "of a weight, all metadata included",
        "error": "of what was unpacked, relative and in norm; 0 without loss",
        "determinism": "whether three runs of unpacking give the same bits",
        "kernels": "time of each kernel of packing and unpacking",
    }
    packages = ("nvidia-nvcomp-cu12", "nvidia-nvcomp-cu13", "dfloat11", "bitsandbytes", "zipnn")
    numbers = ("value", "low", "high", "gb_per_s", "over_floor")

    @property
    def cases(self) -> Mapping[str, str]:
        from paperlm_kernels.bench.ops.neuzip.declared import CASES

        return {
            name: f"{case.about}: {case.weights:,} weights; decoding takes at least {case.floor(10.69):.3g} us from "
            f"10.69 bits, {case.floor(12):.3g} from 12 (H200)"
            for name, case in CASES.items()
        }

    def defaults(self, device: str, *, for_tables: bool = False) -> Defaults:
        measures = "decode,encode,bits,error,determinism" if for_tables else "decode,encode,bits"
        if device == "cuda":
            return Defaults("all", ",".join(self.methods), measures, 50, 3, 3.0)
        return Defaults("cpu", ",".join(self.methods), measures, 3, 1, 2.0)

    def identity(self, task: Task) -> dict[str, Any]:
        from paperlm_kernels.behaviour import NEUZIP
        from paperlm_kernels.bench.ops.neuzip.declared import sized

        return {"shape": {"weights": sized(task).weights}, "source": "synthetic", "behaviour": NEUZIP["codec"]}


OPERATION = NeuZip()
