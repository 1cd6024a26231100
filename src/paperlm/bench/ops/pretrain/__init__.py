"""Tokens a second of whole updates of pre-training, ours against transformers' LlamaForCausalLM.

Both train the same shape on the same ids, with a fused Adam; each gets the micro-batch it is fastest at, and ours takes
part with each of its unfiltered losses (a filter skips nearly everything in a model that has learnt nothing). On a GPU
both are compiled. The sides take turns of a few updates, so that clocks drift for all.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Generator, Iterable, Mapping
from typing import Any

from paperlm_kernels.bench.operation import Defaults, Operation, Row, Task
from paperlm_kernels.bench.peers import label, why_absent

from paperlm.models.sizes import SIZES, Size

OURS = "ours"
PEER = "transformers"
MICRO_BATCHES = "64,128,256"
DOCUMENTED = ("71M", "130M", "250M", "350M", "1B")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its updates: `batch` sequences of `seq_len` ids below `vocab`, parameters in `dtype`."""

    size: Size
    batch: int = 512
    seq_len: int = 256
    vocab: int = 32_000
    dtype: str = "bfloat16"
    compiled: bool = True

    def small(self) -> Case:
        """An eighth of the batch and of the blocks: to try the benchmark, not to report."""
        size = dataclasses.replace(self.size, n_layers=max(1, self.size.n_layers // 8))
        return dataclasses.replace(self, size=size, batch=max(1, self.batch // 8))


_TINY = Size(64, 176, 2, 12, 740_928, "130M at the scale tiny")
CASES = {name: Case(size) for name, size in SIZES.items()}
CASES["tiny"] = Case(_TINY, batch=16, seq_len=128, vocab=1024, dtype="float32", compiled=False)


class Pretrain(Operation):
    """Whole updates of pre-training."""

    summary = "tokens a second of pre-training, ours against transformers"
    measures = {"throughput": "tokens a second of whole updates"}
    packages = ("transformers", "tokenizers", "safetensors", "numpy", "pydantic")
    groups = {"documented": DOCUMENTED}
    in_turns = True
    limit = 1800.0

    @property
    def cases(self) -> Mapping[str, str]:
        return {
            name: f"LLaMA of width {case.size.hidden_size}, {case.size.n_layers} blocks; {case.batch} x {case.seq_len} "
            f"tokens an update, {case.vocab} ids, {case.dtype}{', compiled' if case.compiled else ''}"
            for name, case in CASES.items()
        }

    @functools.cached_property
    def methods(self) -> Mapping[str, str]:
        from paperlm.models.losses import MATERIALISED, UNFILTERED

        kernels = {f"{OURS}_{loss}": f"with the loss {loss}" for loss in UNFILTERED if loss != MATERIALISED}
        return {OURS: "our decoder, Pre-LN, PyTorch's loss", **kernels, PEER: "its LlamaForCausalLM, SDPA attention"}

    def defaults(self, device: str, *, for_tables: bool = False) -> Defaults:
        cases, methods = "71M,130M,1B" if device == "cuda" else "tiny", ",".join(self.methods)
        return Defaults(cases, methods, "throughput", repeats=50, warmup=3, seconds=8.0 if device == "cuda" else 4.0)

    def absent(self, method: str, device: str) -> str | None:
        return why_absent(device, package=PEER)

    def label(self, method: str) -> str:
        return label(method, PEER if method == PEER else None)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--micro-batches",
            help="sequences of a forward pass, separated by commas: of those that divide the batch, the fastest is "
            f"taken (default: {MICRO_BATCHES}, or the whole batch)",
        )

    def options(self, given: argparse.Namespace) -> dict[str, Any]:
        if given.micro_batches is None:
            return {"micro_batches": [int(part) for part in MICRO_BATCHES.split(",")]}
        parts = [part.strip() for part in given.micro_batches.split(",") if part.strip()]
        if not parts or not all(part.isdecimal() and int(part) for part in parts):
            raise ValueError(f"--micro-batches {given.micro_batches!r}: give numbers of 1 or more, such as 64,128,256")
        sizes = [int(part) for part in parts]
        for name in self._cases_of(given):
            case = CASES[name].small() if given.scale == "small" else CASES[name]
            if all(case.batch % size for size in sizes):
                raise ValueError(
                    f"--micro-batches {given.micro_batches}: none divides the {case.batch} sequences of {name}; name "
                    "one that does, or leave it out"
                )
        return {"micro_batches": sizes}

    def _cases_of(self, given: argparse.Namespace) -> list[str]:
        """The cases that a command line asks for, whose names are known."""
        import torch

        device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
        names = filter(None, map(str.strip, (given.cases or self.defaults(device).cases).split(",")))
        return [case for name in names for case in self.groups.get(name, (name,))]

    def identity(self, task: Task) -> dict[str, Any]:
        case = task.sized(CASES)
        return {"shape": {name: getattr(case, name) for name in ("batch", "seq_len", "vocab", "dtype")}}

    def run(self, task: Task) -> Generator[Row | None, bool | None, None]:
        from paperlm_kernels.bench.ops.pretrain.sides import rows_of

        yield from rows_of(self, task)

    def tables(self, found: Iterable[Row]) -> str:
        from paperlm_kernels.bench.ops.pretrain.report import throughput_table

        return throughput_table(found)


OPERATION = Pretrain()
