"""Attention over keys and values in few bits: time and error of ours and others', on the heads of BitNet a4.8."""

from __future__ import annotations

from paperlm_kernels.behaviour import BITNET
from paperlm_kernels.bench.declared import Declared


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
    by_default = ("decode,append", "decode,append,error,determinism")
    shape = ("batch", "context", "heads", "head_dim")
    behaviour = BITNET["kv_attention"]


OPERATION = KVAttention()
