"""Linear layers with ternary weights: time and error of ours and others', on the matrices of BitNet a4.8."""

from __future__ import annotations

from paperlm_kernels.behaviour import BITNET
from paperlm_kernels.bench.declared import Declared


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
    by_default = ("product,layer", "product,layer,error,determinism")
    shape = ("tokens", "rows", "columns")
    behaviour = BITNET["ternary_linear"]


OPERATION = TernaryLinear()
