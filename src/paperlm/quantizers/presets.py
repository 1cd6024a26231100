"""The models of BitNet's papers as configurations of the decoder (BitNet a4.8, arXiv 2411.04965, Sections 2 to 4).

A preset says how a model differs from plain LLaMA: quantizers, the norms in front of the output and down projections
(SubLN), the activation of the feed-forward. `PRESETS[name]` has the keys of a configuration and of a pretrain job.
"""

from __future__ import annotations

from typing import Any

INT8: dict[str, Any] = {"name": "int8_absmax"}
HALF_INT8: dict[str, Any] = {"name": "int8_absmax", "keep": 0.5}
INT4: dict[str, Any] = {"name": "int4_absmean", "multiple": 1}
INT4_WIDE: dict[str, Any] = {"name": "int4_absmean", "multiple": 2}
INT4_ABSMAX: dict[str, Any] = {"name": "int4_absmax"}
E2M1: dict[str, Any] = {"name": "fp4_e2m1"}
E1M2: dict[str, Any] = {"name": "fp4_e1m2"}


def _preset(qkv: Any, o: Any, gate_up: Any, down: Any, hidden_act: str = "relu2") -> dict[str, Any]:
    places = {"qkv": qkv, "o": o, "gate_up": gate_up, "down": down}
    quantization = {"weight": {"name": "ternary_absmean"}, **{name: dict(one) for name, one in places.items()}}
    return {"quantization": quantization, "sub_norm": True, "hidden_act": hidden_act}


PRESETS: dict[str, dict[str, Any]] = {
    "llama": {"quantization": None, "sub_norm": False, "hidden_act": "silu"},
    "b158": _preset(INT8, INT8, INT8, INT8, "silu"),
    # Before the switch; also the dense INT8 arm of the activation in front of down (Figure 5).
    "a8_trunk": _preset(INT8, INT8, INT8, INT8),
    "a48_int4": _preset(INT4, HALF_INT8, INT4, INT8),
    "a48_fp4": _preset(E2M1, E2M1, E2M1, INT8),
    "a48_no_topk": _preset(INT4, INT8, INT4, INT8),
    "full_int4": _preset(INT4, INT4, INT4, INT4_WIDE),
    "full_fp4": _preset(E2M1, E2M1, E2M1, E2M1),
    "f5_int8_relu2": _preset(INT8, INT8, INT8, INT8),
    "f5_int8_silu": _preset(INT8, INT8, INT8, INT8, "silu"),
    "f5_fp4_relu2": _preset(INT8, INT8, INT8, E2M1),
    "f5_int4_relu2": _preset(INT8, INT8, INT8, INT4_WIDE),
    "f6_e2m1": _preset(E2M1, HALF_INT8, E2M1, INT8),
    "f6_e1m2": _preset(E1M2, HALF_INT8, E1M2, INT8),
    "f6_int4_absmax": _preset(INT4_ABSMAX, HALF_INT8, INT4_ABSMAX, INT8),
    "f6_int4_absmean": _preset(INT4, HALF_INT8, INT4, INT8),
}
"""Names of the project's specification of the paper. Models that the paper has under two names stand here twice."""


def preset_name(quantization: dict[str, Any] | None, sub_norm: bool, hidden_act: str) -> str | None:
    """The first preset with these settings; None if there is none."""
    wanted = {"quantization": quantization, "sub_norm": sub_norm, "hidden_act": hidden_act}
    return next((name for name, preset in PRESETS.items() if preset == wanted), None)
