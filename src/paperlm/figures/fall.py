"""How far a training curve falls where something of the training changes, e.g. rate and weight decay at half of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from paperlm.figures.divergence import Share
from paperlm.frozen import Frozen


class Fall(NamedTuple):
    """In the unit of the curve; positive: it falls. `deviation`: of this number, from the noise of the points."""

    size: float
    deviation: float


class Change(Frozen):
    """Where something in a training changes, and how far on both sides of it points count."""

    at: Share
    within: Share
    "shares of the run"

    def fall(self, x: Sequence[float], y: Sequence[float]) -> Fall | None:
        """The mean of y up to the change less the one behind it, not smoothed, of a whole run's points in order. Of a
        straight line with noise the noise is exact: the mean square of second differences is 6 times its variance. None
        where a point is no number or less than two count on a side."""
        at, within = (Fraction(share) * max(x, default=0) for share in (self.at, self.within))
        before = [value for place, value in zip(x, y, strict=True) if at - within < place <= at]
        behind = [value for place, value in zip(x, y, strict=True) if at < place <= at + within]
        if min(len(before), len(behind)) < 2 or not all(value is not None and math.isfinite(value) for value in y):
            return None
        bends = [a - 2 * b + c for a, b, c in zip(y, y[1:], y[2:], strict=False)]
        later = bends[len(bends) // 4 :]  # not of the first steep part
        noise = math.sqrt(statistics.fmean(bend * bend for bend in later) / 6)
        size = statistics.fmean(before) - statistics.fmean(behind)
        return Fall(size, noise * math.hypot(len(before) ** -0.5, len(behind) ** -0.5))
