"""Attention over keys and values in 3 or 4 bits (BitNet a4.8, arXiv 2411.04965, section 3.3).

One direction of imports: `layout` -> `reference` and the kernels -> `cache` -> users.
"""

from paperlm_kernels.kv_attention.cache import QuantizedKV
from paperlm_kernels.kv_attention.layout import (
    KVLayout,
    dequantize_heads,
    pack_heads,
    quantize_heads,
    unpack_heads,
)

__all__ = ["KVLayout", "QuantizedKV", "dequantize_heads", "pack_heads", "quantize_heads", "unpack_heads"]
