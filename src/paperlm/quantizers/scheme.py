"""Which quantizer stands where in a decoder: a model's `quantization` and its `kv_cache`, checked without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from paperlm.errors import SpecError, unknown
from paperlm.quantizers import Quantizer, build_quantizer
from paperlm.quantizers.presets import PRESETS

INPUTS = ("qkv", "o", "gate_up", "down")
"What enters the projections of a block: q, k and v share their quantized input, so do gate and up."


@dataclass(frozen=True, kw_only=True)
class InputQuantizer:
    """The quantizer of a projection's input; `keep`: share of a token's entries that stay, by magnitude. None: all."""

    quantizer: Quantizer
    keep: float | None = None

    def kept(self, width: int, where: str) -> int | None:
        """How many of `width` entries stay. Raises SpecError unless the share is a whole number of them."""
        if self.keep is None:
            return None
        exact = self.keep * width
        if not math.isclose(exact, round(exact), rel_tol=0, abs_tol=1e-6) or round(exact) < 1:
            near = max(1, round(exact)) / width
            raise SpecError(
                f"{where}: keep {self.keep} of {width} entries is {exact:.2f}, no whole number of them; use {near:.6g}"
            )
        return round(exact)

    def describe(self) -> dict[str, Any]:
        """As JSON; `keep` is there where it says something."""
        return self.quantizer.describe() | ({} if self.keep is None else {"keep": self.keep})


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Quantizers of all weight matrices of the blocks, and of what enters them; None: there is none."""

    weight: Quantizer | None = None
    qkv: InputQuantizer | None = None
    o: InputQuantizer | None = None
    gate_up: InputQuantizer | None = None
    down: InputQuantizer | None = None

    def describe(self) -> dict[str, Any]:
        """As JSON, every option written out."""
        return {name: None if (one := getattr(self, name)) is None else one.describe() for name in ("weight", *INPUTS)}

    def check(self, hidden_size: int, intermediate_size: int) -> None:
        """Raise SpecError if a share does not fit the widths."""
        for name in INPUTS:
            if (one := getattr(self, name)) is not None:
                one.kept(intermediate_size if name == "down" else hidden_size, f"quantization.{name}")


def quantization_of(value: object) -> Quantization:
    """The quantizers that `{weight: ..., qkv: ..., o: ..., gate_up: ..., down: ...}` describes.

    Each is a name, `{name: ..., option: value}`, or null; an input's may have `keep`, a share above 0 and below 1. In
    place of all a preset's name. Raises SpecError with the place and the nearest name.
    """
    if isinstance(value, str):
        known = {name: preset["quantization"] for name, preset in PRESETS.items() if preset["quantization"]}
        if value not in known:
            raise SpecError("quantization: " + unknown("preset", value, known))
        value = known[value]
    if not isinstance(value, dict):
        raise SpecError(f"quantization: {value!r} is no mapping of {', '.join(('weight', *INPUTS))}")
    for key in value:
        if key not in ("weight", *INPUTS):
            raise SpecError("quantization: " + unknown("place of a quantizer", key, ("weight", *INPUTS)))
    found: dict[str, Any] = {}
    if value.get("weight") is not None:
        found["weight"] = build_quantizer(value["weight"], "weights", "quantization.weight")
    for name in INPUTS:
        if value.get(name) is not None:
            found[name] = input_quantizer(value[name], f"quantization.{name}")
    if not found:
        raise SpecError("quantization: every place is null; write `quantization: null` for a model without quantizers")
    return Quantization(**found)


def input_quantizer(value: object, where: str) -> InputQuantizer:
    """The quantizer of an input that a name, or `{name: ..., option: value, keep: share}`, describes. `where` begins
    the errors. Raises SpecError as `build_quantizer` does, and for a share that is none."""
    options = dict(value) if isinstance(value, dict) else {"name": value}
    keep = options.pop("keep", None)
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep < 1):
        raise SpecError(f"{where}.keep: {keep!r} is no share above 0 and below 1; leave it out to keep all entries")
    return InputQuantizer(quantizer=build_quantizer(options, "activations", where), keep=keep)


MAPPINGS = {"symmetric": "kv_symmetric", "minmax": "kv_minmax"}
"`kv_cache.mapping` -> quantizer of heads."


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Quantizers of queries, keys and values behind the rotary embedding; None: high precision.

    `first` is that of keys and values at position 0, which BitNet keeps at more bits.
    """

    q: Quantizer | None
    kv: Quantizer
    first: Quantizer
    described: dict[str, Any]


def kv_cache_of(value: object) -> KVCache:
    """What `{q_bits: 16|4, kv_bits: 4|3, first_bits: 8|4|3, mapping: symmetric|minmax}` describes; only kv_bits is
    needed, first_bits is 4 unless it is given.

    Raises SpecError with the place and the nearest name.
    """
    allowed = {"q_bits": (16, 4), "kv_bits": (4, 3), "first_bits": (8, 4, 3), "mapping": tuple(MAPPINGS)}
    if not isinstance(value, dict) or "kv_bits" not in value:
        raise SpecError(f"kv_cache: {value!r} does not say kv_bits; write {{kv_bits: 4}} or {{kv_bits: 3}}")
    described = {"q_bits": 16, "first_bits": 4, "mapping": "symmetric"} | value
    for key, chosen in described.items():
        if key not in allowed:
            raise SpecError("kv_cache: " + unknown("key", key, allowed))
        if isinstance(chosen, bool) or chosen not in allowed[key]:
            if isinstance(chosen, str) and chosen in map(str, allowed[key]):
                raise SpecError(f"kv_cache: {key} {chosen!r} is text; write the number {chosen}")
            raise SpecError(f"kv_cache: {unknown(key, chosen, map(str, allowed[key]))}")
    if described["first_bits"] < described["kv_bits"]:
        raise SpecError(
            f"kv_cache: first_bits {described['first_bits']} with kv_bits {described['kv_bits']}: position 0 has at "
            "least as many bits as the others; leave first_bits out"
        )

    def quantizer(bits: int) -> Quantizer | None:
        name = MAPPINGS[described["mapping"]]
        return None if bits == 16 else build_quantizer({"name": name, "bits": bits}, "heads", "kv_cache")

    made = {name: quantizer(described[f"{name}_bits"]) for name in ("q", "kv", "first")}
    return KVCache(**made, described=described)
