"""How far a training curve falls where something of the training changes, e.g. rate and weight decay at half of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from paperlm.figures.divergence import Share
from paperlm.frozen import Frozen

ELSEWHERE = 5
"Other places of a curve, at least, that tell how far falls differ where nothing changes."


class Fall(NamedTuple):
    """In the unit of the curve; positive: it falls. `deviation`: of this number, in one run."""

    size: float
    deviation: float


class Change(Frozen):
    """Where something in a training changes, and how far on both sides of it points count."""

    at: Share
    within: Share
    "shares of the run"

    def fall(self, x: Sequence[float], y: Sequence[float | None]) -> Fall | None:
        """The mean of y up to the change less the one behind it, of a whole run's points in order, not smoothed. A
        point is the mean of what lies between the one before it and itself: one that lies on both sides counts on none.

        The deviation is the larger of two: what the noise of points gives, which on a straight line is exact (the mean
        square of second differences is 6 times their variance); and how far falls differ elsewhere behind the first
        quarter, as half of them do from their median. None where a point is no number or less than two count on a side.
        """
        values = [value for value in y if value is not None and math.isfinite(value)]
        if len(values) < len(y):
            return None
        end = max(x, default=0)
        at, within = (Fraction(share) * end for share in (self.at, self.within))
        parts = _sides(x, values, at, within)
        if not parts:
            return None
        before, behind = parts
        bends = [a - 2 * b + c for a, b, c in zip(values, values[1:], values[2:], strict=False)]
        noise = math.sqrt(statistics.fmean(bend * bend for bend in bends[len(bends) // 4 :]) / 6)
        deviation = noise * math.hypot(len(before) ** -0.5, len(behind) ** -0.5)
        places = (Fraction(end) / 4 + (2 * n + 1) * within for n in range(int(Fraction(3, 8) * end / within)))
        there = [_sides(x, values, place, within) for place in places if abs(place - at) >= 2 * within]
        others = [_gap(*sides) for sides in there if sides]
        if len(others) >= ELSEWHERE:
            middle = statistics.median(others)
            # of a normal distribution, half lie within 0.6745 deviations
            deviation = max(deviation, statistics.median(abs(other - middle) for other in others) / 0.6745)
        return Fall(_gap(before, behind), deviation)


def _sides(
    x: Sequence[float], y: Sequence[float], at: Fraction, within: Fraction
) -> tuple[list[float], list[float]] | None:
    """Points on both sides, or None of less than two."""
    sides: tuple[list[float], list[float]] = ([], [])
    for begin, end, value in zip([0, *x], x, y, strict=False):
        for side, low, high in zip(sides, (at - within, at), (at, at + within), strict=True):
            if low <= begin and end <= high:
                side.append(value)
    return sides if min(map(len, sides)) >= 2 else None


def _gap(before: list[float], behind: list[float]) -> float:
    return statistics.fmean(before) - statistics.fmean(behind)
