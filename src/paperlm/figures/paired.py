"""Statistics of runs that are paired by seed: the same weights at the start, the same batches, another loss.

Differences are taken within a seed; what is said about them rests on the seeds alone, since the updates of one run
depend on each other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95


def smoothed(values: Sequence[float], window: int) -> np.ndarray:
    """Mean of each value and those before it, `window` in all; the first window - 1 values have none."""
    window = min(window, len(values))
    return np.convolve(np.asarray(values, dtype=np.float64), np.full(window, 1 / window), mode="valid")


def band(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of curves (seeds, points) and half the width of its 95 % interval (Student's t); NaN with one seed."""
    n = len(curves)
    mean = curves.mean(0)
    if n < 2:
        return mean, np.full_like(mean, np.nan)
    from scipy.stats import t

    return mean, t.ppf((1 + CONFIDENCE) / 2, n - 1) * curves.std(0, ddof=1) / math.sqrt(n)


def p_greater(differences: Sequence[float], bound: float = 0.0) -> float:
    """p of the paired one-sided t test that the mean difference is above `bound`. Needs two seeds."""
    from scipy.stats import t

    mean, n = statistics.fmean(differences) - bound, len(differences)
    error = statistics.stdev(differences) / math.sqrt(n)
    if error == 0:
        return 0.0 if mean > 0 else 1.0
    return float(t.sf(mean / error, n - 1))


def p_equivalent(differences: Sequence[float], margin: float) -> float:
    """p of two one-sided t tests that the mean difference lies between -margin and margin. Needs two seeds."""
    return max(p_greater(differences, -margin), p_greater([-d for d in differences], -margin))
