"""RMSNorm with a quantizer: time and error of ours and others', on the widths of BitNet a4.8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paperlm_kernels.bench.declared import Declared
from paperlm_kernels.bench.operation import Defaults, Row, Task


class RMSNormQuantize(Declared):
    """What stands in front of a product: the norm, and the integers of what it gives."""

    summary = "time and error of RMSNorm with a quantizer, ours and others'"
    measures = {
        "quantize": "time of norm and quantizer, by themselves",
        "error": "share of the integers that float64 rounds to others",
        "determinism": "whether three runs give the same bits",
    }
    packages = ("liger-kernel",)
    numbers = ("value", "low", "high", "floor_us", "over_floor")

    @property
    def cases(self) -> Mapping[str, str]:
        from paperlm_kernels.bench.ops.rmsnorm_quantize.declared import CASES

        return {
            name: f"{case.about}: {case.tokens} tokens of {case.width}; at least {case.floor():.3g} us (H200)"
            for name, case in CASES.items()
        }

    def defaults(self, device: str, *, for_tables: bool = False) -> Defaults:
        measures = "quantize,error,determinism" if for_tables else "quantize"
        if device == "cuda":
            return Defaults("all", ",".join(self.methods), measures, 200, 3, 4.0)
        return Defaults("cpu", ",".join(self.methods), measures, 3, 1, 1.0)

    def identity(self, task: Task) -> dict[str, Any]:
        from paperlm_kernels.behaviour import BITNET
        from paperlm_kernels.bench.ops.rmsnorm_quantize.declared import sized

        case = sized(task)
        shape = {"tokens": case.tokens, "width": case.width, "site": case.site}
        return {"shape": shape, "source": "synthetic", "behaviour": BITNET["rmsnorm_quantize"]}

    def tables(self, found: Iterable[Row]) -> str:
        from paperlm_kernels.bench.ops.rmsnorm_quantize.report import tables

        return tables(found)


OPERATION = RMSNormQuantize()
