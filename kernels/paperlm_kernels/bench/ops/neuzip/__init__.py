"""Weights in fewer bits: time and size of ours and others', on Gaussian weights or those of a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paperlm_kernels.behaviour import NEUZIP
from paperlm_kernels.bench.arguments import to_read
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
        "gemv2": "the same with 2 tokens",
        "gemv4": "with 4",
        "gemv8": "with 8",
        "gemv16": "with 16",
        "pack_file": "megabytes of bfloat16 a second from a safetensors file to a packed one, on one core of a CPU",
        "unpack_file": "and back",
        "bits": "of a weight, all metadata included",
        "error": "of what was unpacked, relative and in norm; 0 without loss",
        "determinism": "whether three runs of unpacking give the same bits",
        "kernels": "time of each kernel of packing and unpacking",
    }
    packages = ("nvidia-nvcomp-cu12", "nvidia-nvcomp-cu13", "dfloat11", "bitsandbytes", "zipnn")
    numbers = ("value", "low", "high", "gb_per_s", "over_floor")
    by_default = ("decode,encode,bits", "decode,encode,bits,error,determinism")
    shape = ("weights",)
    behaviour = NEUZIP["codec"]

    def defaults(self, device: str, *, for_tables: bool = False) -> Defaults:
        measures = self.by_default[for_tables]
        if device == "cuda":
            from paperlm_kernels.bench.ops.neuzip.declared import ROUNDED

            methods = ",".join(name for name in self.methods if name not in ROUNDED)
            return Defaults("all", methods, measures, 50, 3, 3.0)
        return Defaults("cpu", ",".join(self.methods), measures, 3, 1, 2.0)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--weights", type=to_read, help="of the case checkpoint: a safetensors file with matrices in bfloat16"
        )

    def options(self, given: argparse.Namespace) -> dict[str, Any]:
        from paperlm_kernels.bench.ops.neuzip.declared import CHECKPOINT, GROUPS

        chosen = {name.strip() for name in (given.cases or "").split(",")}
        groups = (group for group, names in GROUPS.items() if CHECKPOINT.name in names)
        wanted = not chosen.isdisjoint({CHECKPOINT.name, *groups})
        if wanted != (given.weights is not None):
            raise ValueError(
                f"the case {CHECKPOINT.name} needs --weights FILE: a safetensors file with matrices in bfloat16"
                if wanted
                else f"--weights is of the case {CHECKPOINT.name}: add --cases {CHECKPOINT.name}, or leave it out"
            )
        if not wanted:
            return {}
        from paperlm_kernels.bench.ops.neuzip.checkpoint import digest, weights_of

        case = CHECKPOINT.small() if given.scale == "small" else CHECKPOINT
        return {"weights": str(given.weights), "sha256": digest(weights_of(given.weights, case.weights))}

    def identity(self, task: Task) -> dict[str, Any]:
        from paperlm_kernels.bench.ops.neuzip.declared import CASES, CHECKPOINT

        found, case = super().identity(task), task.sized(CASES)
        if case.degrees is not None:
            found["shape"]["degrees_of_freedom"] = case.degrees
        if task.case == CHECKPOINT.name:
            name, sha256 = Path(task.options["weights"]).name, task.options["sha256"]
            found["source"] = f"{name}, sha256 {sha256} of its first {case.weights:,} weights"
        return found


OPERATION = NeuZip()
