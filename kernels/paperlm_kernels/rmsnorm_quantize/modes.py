"""The quantizers of activations by name, and what is refused. Free of Triton.

Every one is a statistic of a token's row, and integers: code = round(value * levels / statistic), clipped, worth
statistic / levels each. Twice the values of FP4 E2M1 are the integers 0, 1, 2, 3, 4, 6, 8, 12: it has codes, too.
"""

from __future__ import annotations

import dataclasses
import difflib
import math

EPS = 1e-5
"What a statistic is not let below."


@dataclasses.dataclass(frozen=True)
class Mode:
    """Codes from `low` to `high`, `levels` to the statistic: the row's largest magnitude, or (`mean`) its mean."""

    levels: float
    low: int
    high: int
    mean: bool = False
    e2m1: bool = False


MODES = {
    "int8_absmax": Mode(127.0, -128, 127),
    "int4_absmean": Mode(math.sqrt(7.0), -8, 7, mean=True),
    "int4_absmax": Mode(7.0, -8, 7),
    "fp4_e2m1": Mode(12.0, -12, 12, e2m1=True),
    "fp4_e1m2": Mode(7.0, -7, 7),
}
"""BitNet a4.8 (arXiv 2411.04965, section 3.1); FP4 as in LLM-FP4. E1M2 has one exponent only, and is INT4 absmax.
Saved layers have a quantizer's place here (`TernaryLinear.layout`): a new one comes last."""


def mode_of(name: str, multiple: float) -> Mode:
    """The mode of a name. Raises ValueError for another, and for a multiple that it does not have."""
    if name not in MODES:
        near = difflib.get_close_matches(str(name), MODES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ValueError(f"unknown quantizer {name!r}{hint} known: {', '.join(MODES)}")
    if isinstance(multiple, bool) or multiple not in (1, 2):
        raise ValueError(f"multiple={multiple}; the statistic of int4_absmean is 1 or 2 times the mean")
    if multiple != 1 and not MODES[name].mean:
        raise ValueError(f"multiple={multiple} with {name!r}, which has no mean to multiply; leave it out")
    return MODES[name]


def kept(keep: float | None, width: int) -> int:
    """How many entries of a row of `width` a share of `keep` leaves; all without one. Raises ValueError for a share
    not between 0 and 1, and for one that leaves none or a fraction of an entry."""
    if keep is None:
        return width
    if not isinstance(keep, int | float) or isinstance(keep, bool) or not 0 < keep < 1:
        raise ValueError(f"keep={keep!r}; the share of entries that TopK keeps is above 0 and below 1; None keeps all")
    number = round(keep * width)
    if number < 1 or abs(keep * width - number) > 1e-6:
        near = f"{max(1, number) / width:.6g}"
        raise ValueError(f"keep={keep} of {width} entries is {keep * width:.2f}, no whole number of them; use {near}")
    return number
