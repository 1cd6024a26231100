"""Loss of a linear classifier: time, memory and accuracy of ours and others', on the shapes of open models.

`data` has the inputs, `methods` what is measured, `measure` and `accuracy` how, `task` one method on one case.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paperlm_kernels.bench.declared import Declared
from paperlm_kernels.bench.operation import Defaults, Row, Task

BOUND = "lower_bound"


class CrossEntropy(Declared):
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

    def contender(self, method: str) -> Any:
        return super().contender(method).func

    def modules(self, method: str) -> tuple[str, ...]:
        return () if method == BOUND else self.contender(method).modules

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--permute", action="store_true", help="relabel the ids at random: many more tiles stay alive"
        )

    def options(self, given: argparse.Namespace) -> dict[str, Any]:
        return {"permute": given.permute}

    def identity(self, task: Task) -> dict[str, Any]:
        from paperlm_kernels.bench.ops.cross_entropy.declared import CASES

        case = task.sized(CASES)
        shape = {name: getattr(case, name) for name in ("tokens", "counting", "vocab", "width", "softcap")}
        return {
            "order": "permuted" if task.options.get("permute") else "natural",
            "source": "synthetic",
            "shape": {**shape, "dtype": case.dtype},
            "lower_bound_mib": case.lower_bound,
        }

    def shared(self, found: list[Row]) -> dict[str, Any]:
        """The share of 128 x 128 tiles alive, without which a time of a filtered row says nothing."""
        alive = [row["value"] for row in found if row["metric"] == "alive_share" and row["tiles"] == "128x128"]
        return {"alive_share": alive[0] if alive else None}

    def draw(self, found: list[Row], path: Path) -> None:
        from paperlm_kernels.bench.ops.cross_entropy.chart import draw

        draw(found, path)


OPERATION = CrossEntropy()
