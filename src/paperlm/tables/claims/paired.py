"""Two cells on the same items: how far their gap would move with other items of the kind, the models being what they
are. What is easy or hard for both drops out of it, so that it tells more than two standard errors do.

It says nothing of other seeds of training, and no verdict rests on it: it stands beside one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr

RESAMPLES = 10_000
INTERVAL = (0.025, 0.975)
FEW = 64
"Different pairs of scores up to which the number of each is drawn, and not item by item."
AT_ONCE = 1_000_000
"Numbers of a batch of resamples, which bounds the memory."


@dataclass(frozen=True)
class ItemSet:
    """What one model scored on each item of a set: 1 or 0 for an answer, the summed loss of a chunk of text."""

    items: str
    "digest of the items in their order, of their weights too"
    scores: tuple[float, ...]
    weights: tuple[float, ...] = ()
    "of the items, e.g. tokens of a chunk; left out: all are 1"
    called: str = "items"


@dataclass(frozen=True)
class Scores:
    """How a number follows from items: factor * form(mean over the sets of sum of scores / sum of weights)."""

    sets: tuple[ItemSet, ...]
    factor: float = 1.0
    form: Callable[[np.ndarray], np.ndarray] = np.asarray


@dataclass(frozen=True)
class PairedGap:
    """Left less right on the same items."""

    gap: float
    low: float
    high: float
    "ends of the interval of 95 % over resampled items"
    items: int
    sets: int
    called: str
    p: float | None
    "McNemar's exact test, two-sided, that right answers are as frequent; None: more than one set or seed, or losses"

    def __str__(self) -> str:
        of_sets = f" of {self.sets} sets" if self.sets > 1 else ""
        test = "" if self.p is None else f", McNemar's p {self.p:.2g}"
        return (
            f"{self.gap:+.3g} on the same {self.items:,} {self.called}{of_sets}, "
            f"95 % from {self.low:+.3g} to {self.high:+.3g}{test}"
        )


def paired_gap(left: Mapping[int, Scores], right: Mapping[int, Scores], seed: str) -> PairedGap | None:
    """The gap of two cells, each seed -> its scores, and its interval by the paired bootstrap: items of each set are
    drawn again, the same for both models and all seeds that both have. None without common seeds or common items.
    """
    seeds = sorted(set(left) & set(right))
    sides = [side[s] for s in seeds for side in (left, right)]
    if not sides or len({tuple((one.items, len(one.scores)) for one in side.sets) for side in sides}) > 1:
        return None
    rng = np.random.default_rng(random.Random(seed).getrandbits(64))
    first = sides[0].sets
    tables = [_table([side.sets[index] for side in sides]) for index in range(len(first))]
    whole = _gaps(sides, [table.sum(0, keepdims=True) for table in tables])
    drawn = _gaps(sides, [_resampled(rng, table) for table in tables])
    low, high = np.quantile(drawn, INTERVAL)
    return PairedGap(
        gap=float(whole[0]), low=float(low), high=float(high), items=sum(len(one.scores) for one in first),
        sets=len(first), called=first[0].called, p=_mcnemar(tables[0]) if len(first) == len(seeds) == 1 else None,
    )  # fmt: skip


def _table(sets: list[ItemSet]) -> np.ndarray:
    """(items, sides + 1): the scores of each side, and the weights, which are the same for all."""
    weights = sets[0].weights or (1.0,) * len(sets[0].scores)
    return np.array([*(one.scores for one in sets), weights], dtype=np.float64).T


def _gaps(sides: list[Scores], sums: list[np.ndarray]) -> np.ndarray:
    """Left less right, in the mean over seeds, of each row of (resamples, sides + 1) sums a set."""
    ratios = np.mean([table[:, :-1] / table[:, -1:] for table in sums], axis=0)
    values = [side.factor * side.form(ratios[:, index]) for index, side in enumerate(sides)]
    return np.mean([a - b for a, b in zip(values[::2], values[1::2], strict=True)], axis=0)


def _resampled(rng: np.random.Generator, table: np.ndarray) -> np.ndarray:
    """(RESAMPLES, sides + 1): column sums over as many items as there are, drawn with repetition."""
    return np.concatenate(list(_batches(rng, table)))


def _batches(rng: np.random.Generator, table: np.ndarray) -> Iterator[np.ndarray]:
    count = len(table)
    rows, numbers = np.unique(table, axis=0, return_counts=True)
    if len(rows) <= FEW:
        yield rng.multinomial(count, numbers / count, size=RESAMPLES) @ rows
        return
    at_once = max(1, AT_ONCE // count)
    for start in range(0, RESAMPLES, at_once):
        size = min(at_once, RESAMPLES - start)
        picked = rng.integers(0, count, (size, count), dtype=np.int32)
        picked += count * np.arange(size, dtype=np.int32)[:, None]
        yield np.bincount(picked.ravel(), minlength=size * count).reshape(size, count) @ table


def _mcnemar(table: np.ndarray) -> float | None:
    """Of the items that one of two models has right, how unlikely so uneven a share is if each is a coin's throw."""
    if not set(np.unique(table)) <= {0.0, 1.0}:
        return None
    gains, losses = (int(np.sum(table[:, 0] - table[:, 1] == sign)) for sign in (1, -1))
    return 1.0 if gains == losses else min(1.0, 2 * float(bdtr(min(gains, losses), gains + losses, 0.5)))
