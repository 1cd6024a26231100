"""What claims say of a quantity that each block has: statistics over depth, and how their noise is found."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from paperlm.tables.claims import CellSamples, rank_correlation
from paperlm.tables.contents import Key

DEEP, LOW, HIGH, MEAN = "Mean Over Deep Half", "Mean Over First Third", "Mean Over Last Third", "Mean"
LARGEST, VARIATION, CORRELATION = "Largest", "Coefficient of Variation", "Rank Correlation With Depth"
LAST, EXPONENTIAL, POWER = "Last Block", "R2 of an Exponential in Depth", "R2 of a Power of Depth"
FIRST, SHALLOW, BEHIND_FIRST = "First Block", "Mean Over Shallow Half", "Mean Behind the First Block"
DEEP_BUT_LAST, HIGH_BUT_LAST = "Mean Over Deep Half but the Last Block", "Mean Over Last Third but the Last Block"
LARGEST_BEHIND_FIRST = "Largest Behind the First Block"
LARGEST_OF_THREE, LARGEST_BEHIND_THREE = "Largest of the First Three Blocks", "Largest Behind the First Three Blocks"
UNEVENNESS, AT_MOST_ONE = "Largest Over the Sum of the Positive", "Blocks of at Most 1"
OTHER_UNITS = frozenset({VARIATION, CORRELATION, EXPONENTIAL, POWER, UNEVENNESS, AT_MOST_ONE})
"Statistics that are no means or extremes of the blocks' numbers, so that these numbers' error says nothing of them."


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


def removal_statistics(values: Sequence[float]) -> dict[str, float]:
    """What is said of blocks that are left out: first block, halves and thirds without the last one (which turns the
    stream towards the head), where the largest number is, how uneven they are, and how many blocks matter little."""
    array, n = np.asarray(values, dtype=np.float64), len(values)
    third = max(1, n // 3)
    parts = {
        SHALLOW: array[: n // 2],
        BEHIND_FIRST: array[1:],
        DEEP_BUT_LAST: array[n // 2 : -1],
        HIGH_BUT_LAST: array[-third:-1],
    }
    found = {FIRST: float(array[0])} | {name: float(part.mean()) for name, part in parts.items() if len(part)}
    tops = {LARGEST_BEHIND_FIRST: array[1:], LARGEST_OF_THREE: array[:3], LARGEST_BEHIND_THREE: array[3:]}
    found |= {name: float(part.max()) for name, part in tops.items() if len(part)}
    positive = float(array[array > 0].sum())
    return found | {
        UNEVENNESS: float(array.max()) / positive if positive else 0.0,
        AT_MOST_ONE: int((array <= 1).sum()),
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


FURTHER = {"removal": removal_statistics, "growth": growth_statistics}
"What a figure may read beside `depth_statistics`, by its option `also`."


Also = Literal["", "removal", "growth"]
"Names of these."


def statistics_of(values: Sequence[float], also: Also = "") -> dict[str, float]:
    """The statistics that a figure's claims read."""
    return depth_statistics(values) | (FURTHER[also](values) if also else {})


def depth_samples(
    rows: Mapping[str, Mapping[int, Mapping[str, float]]], errors: Mapping[str, float] | None = None
) -> dict[Key, CellSamples]:
    """(row, statistic) -> its value for each seed that has it, of row -> seed -> statistic -> value.

    A run varies by the deviation between seeds, and by at least the standard error that the measurement has of itself
    (`errors`, of a row; in the number's own unit, for it may be near 0). One seed without such an error decides
    nothing.
    """
    samples = {}
    for row, seeds in rows.items():
        for statistic in dict.fromkeys(name for found in seeds.values() for name in found):
            values = {seed: found[statistic] for seed, found in seeds.items() if statistic in found}
            error = None if errors is None or statistic in OTHER_UNITS else errors[row]
            known = len(values) > 1 or error is not None
            samples[row, statistic] = CellSamples(
                tuple(values.values()), seeds=tuple(values), deviation=error or 0.0, measured=known
            )
    return samples


def mean_over_seeds(curves: Sequence[Sequence[float]]) -> list[float]:
    """Mean of each block's value over seeds."""
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]
