"""Linear layers with ternary weights in two bits (BitNet a4.8, arXiv 2411.04965).

One direction of imports: `packing` -> `reference` and the kernels -> `function` -> `module` -> users.
"""

from paperlm_kernels.ternary_linear.function import (
    places_above_zero,
    sparse_columns_linear,
    sparse_rows_linear,
    ternary_gated,
    ternary_linear,
)
from paperlm_kernels.ternary_linear.module import TernaryLinear
from paperlm_kernels.ternary_linear.packing import (
    PackedTernary,
    fused_alpha,
    pack_ternary,
    pack_weights,
    quantize_weight,
    unpack_ternary,
)

__all__ = [
    "PackedTernary",
    "TernaryLinear",
    "fused_alpha",
    "pack_ternary",
    "pack_weights",
    "places_above_zero",
    "quantize_weight",
    "sparse_columns_linear",
    "sparse_rows_linear",
    "ternary_gated",
    "ternary_linear",
    "unpack_ternary",
]
