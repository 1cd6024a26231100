"""Cells as the judge sees them, and how much one run of each varies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paperlm.tables.claims.formula import Key, Point
from paperlm.tables.claims.paired import Scores


@dataclass(frozen=True)
class PrintedCell:
    """A cell of the paper: its number, whether that is one of a run that diverged, and its text."""

    value: float
    diverged: bool = False
    text: str = ""


@dataclass(frozen=True)
class CellSamples:
    """A cell: its number and outcome for each seed."""

    values: tuple[float, ...]
    diverged: tuple[bool, ...] = ()
    "per seed; left out: none did"
    seeds: tuple[int, ...] = ()
    "left out: 0, 1, 2, ..."
    deviation: float = 0.0
    """standard deviation of one run that is known from elsewhere, in the number's unit: the scale's measured seed
    noise, the spread of repetitions, the measurement's own standard error. Seeds that agree do not get below it"""
    pool: Hashable = None
    "cells of one pool are in one unit and vary alike: their deviations between seeds are pooled; None: alone"
    measured: bool = True
    "False: nothing says how one run varies, so that one value decides nothing"
    hashes: bool = False
    "numbers that name bits: they are compared seed by seed, and have no mean"
    printed: str = ""
    run: str = ""
    "of a time: commit and day that it was measured at"
    scores: Mapping[int, Scores] = field(default_factory=dict)
    "seed -> what its record says of each item, of seeds that trained and whose record keeps it"

    def __post_init__(self) -> None:
        object.__setattr__(self, "diverged", self.diverged or (False,) * len(self.values))
        object.__setattr__(self, "seeds", self.seeds or tuple(range(len(self.values))))
        if not len(self.values) == len(self.diverged) == len(self.seeds):
            raise ValueError(f"{len(self.values)} values, {len(self.diverged)} outcomes, {len(self.seeds)} seeds")

    @property
    def constant(self) -> bool:
        """Whether it is the same for every seed: computed, counted, or one statistic of all seeds. Bits never are."""
        return (
            not self.hashes
            and self.measured
            and not self.deviation
            and len(set(self.values)) == 1
            and len(set(self.diverged)) == 1
        )

    @property
    def mixed(self) -> bool:
        """Whether seeds end differently."""
        return len(set(self.diverged)) > 1

    def ended(self, diverged: bool) -> dict[int, float]:
        """Seed -> number of the runs that ended so."""
        return {s: v for s, v, d in zip(self.seeds, self.values, self.diverged, strict=True) if d == diverged}

    @property
    def usual(self) -> bool:
        """The outcome of most seeds."""
        return 2 * sum(self.diverged) > len(self.diverged)


Cells = Mapping[Key, CellSamples]


@dataclass(frozen=True)
class Estimate:
    """Mean of the runs of a cell that ended alike."""

    mean: float
    n: int
    deviation: float
    "of one run"
    freedom: int | None
    "degrees of freedom behind the deviation; None: it is known"
    by_seed: Mapping[int, float] = field(default_factory=dict)
    constant: bool = False
    measured: bool = True
    hashes: bool = False

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.deviation / math.sqrt(self.n)


class Noise:
    """How much one run of each cell varies: the pooled deviation between seeds, and never less than is known of it."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._pools: dict[Hashable, list[tuple[float, int]]] = {}
        for key, cell in cells.items():
            for outcome in (False, True):
                self._pools.setdefault((self._pool(key, cell), outcome), []).extend(_variance(cell.ended(outcome)))

    def _pool(self, key: Key, cell: CellSamples) -> Hashable:
        # In an exhibit of its own: two exhibits may call different quantities alike.
        return (key[0], cell.pool) if cell.pool is not None else key

    def estimate(self, key: Key, diverged: bool) -> Estimate:
        """A cell's mean over the runs that ended so, with the deviation of one of them."""
        cell = self._cells[key]
        by_seed = cell.ended(diverged)
        squares = self._pools[self._pool(key, cell), diverged]
        freedom = sum(df for _, df in squares)
        between = math.sqrt(sum(v * df for v, df in squares) / freedom) if freedom else 0.0
        pooled = not cell.constant and between > cell.deviation
        return Estimate(
            mean=statistics.fmean(by_seed.values()),
            n=len(by_seed),
            deviation=0.0 if cell.constant else max(between, cell.deviation),
            freedom=freedom if pooled else None,
            by_seed=by_seed,
            constant=cell.constant,
            measured=cell.measured or bool(freedom),
            hashes=cell.hashes,
        )


def _variance(by_seed: Mapping[int, float]) -> Iterable[tuple[float, int]]:
    values = [v for v in by_seed.values() if math.isfinite(v)]
    return [(statistics.variance(values), len(values) - 1)] if len(values) > 1 else []


def common_seeds(cells: Sequence[CellSamples]) -> list[int]:
    """Seeds that all of them have; cells that are the same for every seed do not ask for one."""
    varying = [set(cell.seeds) for cell in cells if not cell.constant]
    if not varying:
        return [0] if cells else []
    return sorted(set.intersection(*varying))


def at_seed(cells: Cells, seed: int) -> Point:
    """The cells as one seed has them."""
    numbers, diverged = {}, {}
    for key, cell in cells.items():
        index = 0 if cell.constant else cell.seeds.index(seed)
        numbers[key], diverged[key] = cell.values[index], cell.diverged[index]
    return Point(numbers, diverged)
