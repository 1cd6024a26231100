"""Attention over keys and values in few bits: time and error of ours and others', on the heads of BitNet a4.8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paperlm_kernels.bench.declared import Declared
from paperlm_kernels.bench.operation import Defaults, Row, Task


class KVAttention(Declared):
    """One query a sequence over a cache that is full."""

    summary = "time and error of attention over a quantized cache, ours, and others' over bfloat16"
    measures = {
        "decode": "time of one query a sequence",
        "append": "time of a new position: turned, quantized, stored",
        "error": "of the attention, against float64 over what the cache holds",
        "determinism": "whether three runs give the same bits",
    }
    packages = ("flash-attn", "flashinfer-python")
    numbers = ("value", "low", "high", "floor_us", "over_floor")

    @property
    def cases(self) -> Mapping[str, str]:
        from paperlm_kernels.bench.ops.kv_attention.declared import CASES

        return {
            name: f"{case.about}: {case.batch} x {case.context} positions, {case.heads} heads of {case.head_dim}; at "
            f"least {case.floor(3):.3g} us in 3 bits, {case.floor(4):.3g} in 4, {case.floor(16):.3g} in 16 (H200)"
            for name, case in CASES.items()
        }

    def defaults(self, device: str, *, for_tables: bool = False) -> Defaults:
        measures = "decode,append,error,determinism" if for_tables else "decode,append"
        if device == "cuda":
            return Defaults("all", ",".join(self.methods), measures, 200, 3, 4.0)
        return Defaults("cpu", ",".join(self.methods), measures, 3, 1, 1.0)

    def identity(self, task: Task) -> dict[str, Any]:
        from paperlm_kernels.behaviour import BITNET
        from paperlm_kernels.bench.ops.kv_attention.declared import sized

        case = sized(task)
        shape = {name: getattr(case, name) for name in ("batch", "context", "heads", "head_dim")}
        return {"shape": shape, "source": "synthetic", "behaviour": BITNET["kv_attention"]}

    def tables(self, found: Iterable[Row]) -> str:
        from paperlm_kernels.bench.ops.kv_attention.report import tables

        return tables(found)


OPERATION = KVAttention()
