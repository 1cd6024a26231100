"""Loss of a linear classifier: time, memory and accuracy of ours and others', on the shapes of open models.

`data` has the inputs, `methods` what is measured, `measure` and `accuracy` how, `task` one method on one case.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

from paperlm_kernels.bench.operation import Defaults, Operation, Row, Task
from paperlm_kernels.bench.peers import label

BOUND = "lower_bound"


class CrossEntropy(Operation):
    """The loss of a linear classifier over a large vocabulary, and its gradients."""

    summary = "time, memory and accuracy of linear cross-entropy, ours and others'"
    measures = {
        "loss": "the forward pass, time and memory",
        "gradient": "the backward pass alone, time and memory",
        "both": "both, time and memory",
        "both_cold": "time of both with the L2 cache flushed, on a GPU",
        "error": "against float64",
        "determinism": "whether three runs give the same bits",
        "kernels": "time of each kernel",
    }
    first = BOUND
    packages = ("liger-kernel", "cut-cross-entropy")

    @property
    def cases(self) -> Mapping[str, str]:
        from paperlm_kernels.bench.ops.cross_entropy.declared import CASES

        return {
            name: f"{case.model}: {case.tokens} tokens x {case.vocab} ids x {case.width}; lower bound of memory "
            f"{case.lower_bound:.0f} MiB"
            for name, case in CASES.items()
        }

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        from paperlm_kernels.bench.ops.cross_entropy.declared import GROUPS

        return GROUPS

    @property
    def methods(self) -> Mapping[str, str]:
        from paperlm_kernels.bench.ops.cross_entropy.declared import METHODS

        return METHODS

    @property
    def metrics(self) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        from paperlm_kernels.bench.ops.cross_entropy.declared import METRICS

        return METRICS

    @property
    def numbers(self) -> tuple[str, ...]:
        from paperlm_kernels.bench.ops.cross_entropy.declared import NUMBERS

        return NUMBERS

    def defaults(self, device: str, *, for_tables: bool = False) -> Defaults:
        on_gpu = device == "cuda"
        cases, methods = "all" if on_gpu else "tiny_cpu", ",".join(self.methods)
        if not for_tables:
            return Defaults(cases, methods, "loss,gradient,both", 50, 3, 12.0 if on_gpu else 1.5)
        if on_gpu:
            return Defaults(cases, methods, "loss,gradient,both,both_cold,error,determinism", 50, 3, 12.0)
        # Only so many that the table shows something: a CPU's times are compared with nothing.
        return Defaults(cases, methods, "loss,gradient,both,error,determinism", 3, 1, 1.5)

    def absent(self, method: str, device: str) -> str | None:
        return _contender(method).absent(device)

    def label(self, method: str) -> str:
        return label(method, _contender(method).package)

    def modules(self, method: str) -> tuple[str, ...]:
        return () if method == BOUND else _contender(method).modules

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--permute", action="store_true", help="relabel the ids at random: many more tiles stay alive"
        )

    def options(self, given: argparse.Namespace) -> dict[str, Any]:
        return {"permute": given.permute}

    def identity(self, task: Task) -> dict[str, Any]:
        from paperlm_kernels.bench.ops.cross_entropy.declared import sized

        case = sized(task)
        shape = {name: getattr(case, name) for name in ("tokens", "counting", "vocab", "width", "softcap")}
        return {
            "order": "permuted" if task.options.get("permute") else "natural",
            "source": "synthetic",
            "shape": {**shape, "dtype": case.dtype},
            "lower_bound_mib": case.lower_bound,
        }

    def run(self, task: Task) -> Generator[Row | None, bool | None, None]:
        from paperlm_kernels.bench.ops.cross_entropy.task import rows_of

        yield from rows_of(self, task)

    def shared(self, found: list[Row]) -> dict[str, Any]:
        """The share of 128 x 128 tiles alive, without which a time of a filtered row says nothing."""
        alive = [row["value"] for row in found if row["metric"] == "alive_share" and row["tiles"] == "128x128"]
        return {"alive_share": alive[0] if alive else None}

    def tables(self, found: Iterable[Row]) -> str:
        from paperlm_kernels.bench.ops.cross_entropy.report import tables

        return tables(found)

    def draw(self, found: list[Row], path: Path) -> None:
        from paperlm_kernels.bench.ops.cross_entropy.chart import draw

        draw(found, path)


def _contender(method: str) -> Any:
    """The class of a method."""
    from paperlm_kernels.bench.ops.cross_entropy.methods import METHODS

    return METHODS[method].func


OPERATION = CrossEntropy()
