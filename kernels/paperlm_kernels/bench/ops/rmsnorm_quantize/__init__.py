"""RMSNorm with a quantizer: time and error of ours and others', on the widths of BitNet a4.8."""

from __future__ import annotations

from paperlm_kernels.behaviour import BITNET
from paperlm_kernels.bench.declared import Declared


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
    by_default = ("quantize", "quantize,error,determinism")
    shape = ("tokens", "width", "site")
    behaviour = BITNET["rmsnorm_quantize"]


OPERATION = RMSNormQuantize()
