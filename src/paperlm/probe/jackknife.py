"""Standard errors of statistics of sums over sequences: each sequence is left out in turn.

Tokens of one document are alike, so that they are no independent draws; whole sequences nearly are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np


def standard_errors(statistics: Callable[[np.ndarray], Mapping[str, float]], parts: np.ndarray) -> dict[str, float]:
    """Name -> standard error of `statistics(parts.sum(0))`, parts (sequences, ...) of whatever is summed.

    sqrt((n - 1) / n * sum of squared deviations of the n statistics without one sequence); a statistic that is the same
    without each of them has none. One sequence says nothing of its error: no names.
    """
    count = len(parts)
    if count < 2:
        return {}
    whole = parts.sum(0)
    without = [statistics(whole - part) for part in parts]
    found = {}
    for name in without[0]:
        values = np.array([one[name] for one in without], dtype=np.float64)
        found[name] = math.sqrt((count - 1) / count * float(np.square(values - values.mean()).sum()))
    return found
