"""Linear layers with ternary weights: time and error of ours and others', on the matrices of BitNet a4.8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paperlm_kernels.bench.declared import Declared
from paperlm_kernels.bench.operation import Defaults, Row, Task


class TernaryLinear(Declared):
    """A product with ternary weights, from quantized input or from what a norm reads."""

    summary = "time and error of products with ternary weights, ours and others'"
    measures = {
        "product": "time of the product alone, its input being quantized",
        "layer": "time of RMSNorm, quantizer and product",
        "error": "of the product, against float64",
        "determinism": "whether three runs give the same bits",
        "kernels": "time of each kernel of the layer",
    }
    goes_on = True
    packages = ("gemlite", "torchao", "quack-kernels", "bitblas")
    numbers = ("value", "low", "high", "floor_us", "over_floor")

    @property
    def cases(self) -> Mapping[str, str]:
        from paperlm_kernels.bench.ops.ternary_linear.declared import CASES

        return {
            name: f"{case.about}: {case.tokens} tokens x {case.rows} x {case.columns}; at least {case.floor(2):.3g} us "
            f"in 2 bits, {case.floor(8):.3g} in 8, {case.floor(16):.3g} in 16 (H200)"
            for name, case in CASES.items()
        }

    def defaults(self, device: str, *, for_tables: bool = False) -> Defaults:
        measures = "product,layer,error,determinism" if for_tables else "product,layer"
        if device == "cuda":
            return Defaults("all", ",".join(self.methods), measures, 200, 3, 4.0)
        return Defaults("cpu", ",".join(self.methods), measures, 3, 1, 1.0)

    def identity(self, task: Task) -> dict[str, Any]:
        from paperlm_kernels.behaviour import BITNET
        from paperlm_kernels.bench.ops.ternary_linear.declared import sized

        case = sized(task)
        shape = {name: getattr(case, name) for name in ("tokens", "rows", "columns")}
        return {"shape": shape, "source": "synthetic", "behaviour": BITNET["ternary_linear"]}

    def tables(self, found: Iterable[Row]) -> str:
        from paperlm_kernels.bench.ops.ternary_linear.report import tables

        return tables(found)


OPERATION = TernaryLinear()
