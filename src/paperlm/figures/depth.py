"""What claims say of a quantity that each block has: statistics over depth, and how their noise is found."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from paperlm.tables.claims import CellSamples, rank_correlation
from paperlm.tables.contents import Key

DEEP, LOW, HIGH, MEAN = "Mean Over Deep Half", "Mean Over First Third", "Mean Over Last Third", "Mean"
LARGEST, VARIATION, CORRELATION = "Largest", "Coefficient of Variation", "Rank Correlation With Depth"
LAST, EXPONENTIAL, POWER = "Last Block", "R2 of an Exponential in Depth", "R2 of a Power of Depth"


def depth_statistics(values: Sequence[float]) -> dict[str, float]:
    """Statistics of one number a block, first to last: deep half (l > L/2), thirds, spread, trend (Spearman's)."""
    array, n = np.asarray(values, dtype=np.float64), len(values)
    third = max(1, n // 3)
    mean = float(array.mean())
    return {
        MEAN: mean,
        DEEP: float(array[n // 2 :].mean()),
        LOW: float(array[:third].mean()),
        HIGH: float(array[-third:].mean()),
        LARGEST: float(array.max()),
        VARIATION: float(array.std() / abs(mean)) if mean else 0.0,
        CORRELATION: rank_correlation(range(n), array.tolist()),
    }


def growth_statistics(values: Sequence[float]) -> dict[str, float]:
    """How a positive number grows with the block l = 1..L: its last value, and what share of its logarithm's variance a
    line in l explains (exponential growth) and a line in log l (a power of l). No shares where one is not positive."""
    array = np.asarray(values, dtype=np.float64)
    found = {LAST: float(array[-1])}
    if (array > 0).all() and len(array) > 2:
        block = np.arange(1, len(array) + 1)
        for name, x in ((EXPONENTIAL, block), (POWER, np.log(block))):
            found[name] = float(np.corrcoef(x, np.log(array))[0, 1] ** 2) if array.std() else 0.0
    return found


def depth_samples(
    rows: Mapping[str, Sequence[Mapping[str, float]]], errors: Mapping[str, float] | None = None
) -> dict[Key, CellSamples]:
    """(row, statistic) -> its value for each seed that has it.

    A run varies by the deviation between seeds, and by at least the standard error that the measurement has of itself
    (`errors`, of a row; in the number's own unit, for it may be near 0). One seed without such an error decides
    nothing.
    """
    samples = {}
    for row, seeds in rows.items():
        own = errors[row] if errors else 0.0
        for statistic in dict.fromkeys(name for found in seeds for name in found):
            values = tuple(found[statistic] for found in seeds if statistic in found)
            known = len(values) > 1 or errors is not None
            samples[row, statistic] = CellSamples(values, deviation=own, measured=known)
    return samples


def mean_over_seeds(curves: Sequence[Sequence[float]]) -> list[float]:
    """Mean of each block's value over seeds."""
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]
