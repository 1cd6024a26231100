"""What a claim comes down to: comparisons of quantities, and outcomes, joined by and, or, not.

A formula holds no data. `at` says whether it is true of given numbers (the print, one seed); `decide` asks somebody
about each comparison, who may not know (None), and joins the answers by three-valued logic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, tuple[str, ...] | str]
"Name of an exhibit in claims, and row and column of a cell."
Numbers = Mapping[Key, Any]
"A number for each cell, or an array of redraws."


@dataclass(frozen=True)
class Point:
    """One version of the cells: the printed one, that of a seed, or means."""

    numbers: Numbers
    diverged: Mapping[Key, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Quantity:
    """A number that depends on cells. Two are equal if they were written alike."""

    text: str
    cells: frozenset[Key] = field(compare=False)
    value: Callable[[Numbers], Any] = field(compare=False)
    drawn: bool = field(default=False, compare=False)
    "a rank, a rounding: it jumps, so that a comparison of it is decided by redraws"
    key: Key | None = field(default=None, compare=False)
    "the cell that it is, if it is one"
    printed: tuple[float, float] | None = field(default=None, compare=False)
    "of a cell: the printed number, and half of its last digit"


@dataclass(frozen=True)
class Extreme:
    """The least or the largest of several: compared with each of them, never averaged over."""

    of: str
    "`min` or `max`"
    members: tuple[Quantity | Extreme | float, ...]


class Formula:
    """Something that is true, false, or open."""

    def at(self, point: Point) -> bool:
        """Whether it is true of these numbers. Raises KeyError for a cell that is not among them."""
        raise NotImplementedError

    def decide(self, judge: Callable[[Leaf], bool | None]) -> bool | None:
        """True, False, or None where the judge's answers leave it open."""
        raise NotImplementedError

    def leaves(self) -> Iterator[Leaf]:
        """Its comparisons and outcomes."""
        for part in self.within:
            yield from part.leaves()

    @property
    def within(self) -> tuple[Formula, ...]:
        """The formulas that it joins or denies, directly."""
        return ()

    @property
    def cells(self) -> frozenset[Key]:
        """Every cell that it reads."""
        return frozenset(key for leaf in self.leaves() for key in leaf.reads)


@dataclass(frozen=True)
class Leaf(Formula):
    """What is decided alone."""

    reads: frozenset[Key] = field(compare=False)
    text: str

    def decide(self, judge: Callable[[Leaf], bool | None]) -> bool | None:
        return judge(self)

    def leaves(self) -> Iterator[Leaf]:
        yield self


@dataclass(frozen=True)
class Comparison(Leaf):
    """`left` < , <= , == or != `right`."""

    relation: str
    left: Quantity = field(compare=False)
    right: Quantity = field(compare=False)

    @property
    def drawn(self) -> bool:
        """Whether a side of it jumps."""
        return self.left.drawn or self.right.drawn

    @property
    def same(self) -> bool:
        """Whether its sides were written alike, as where a loop meets the row that it is about: no number matters."""
        return self.left == self.right

    def gap(self, numbers: Numbers) -> Any:
        """Left less right."""
        return self.left.value(numbers) - self.right.value(numbers)

    def holds(self, numbers: Numbers) -> Any:
        """The relation between the two sides as they are."""
        left, right = self.left.value(numbers), self.right.value(numbers)
        match self.relation:
            case "<":
                return left < right
            case "<=":
                return left <= right
            case "==":
                return left == right
        return left != right

    def at(self, point: Point) -> bool:
        return bool(self.holds(point.numbers))


@dataclass(frozen=True)
class Outcome(Leaf):
    """`div(cell)`: its run diverged."""

    key: Key

    def at(self, point: Point) -> bool:
        return point.diverged[self.key]


@dataclass(frozen=True)
class Tested(Leaf):
    """`significant(p, q)`: of a test for a statement and one against it, the first is significant."""

    for_it: Quantity = field(compare=False)
    against_it: Quantity = field(compare=False)

    def at(self, point: Point) -> bool:
        return bool(self.for_it.value(point.numbers) <= self.against_it.value(point.numbers))


@dataclass(frozen=True)
class Const(Formula):
    """A comparison that reads no cell."""

    truth: bool

    def at(self, point: Point) -> bool:
        return self.truth

    def decide(self, judge: Callable[[Leaf], bool | None]) -> bool | None:
        return self.truth


@dataclass(frozen=True)
class Not(Formula):
    """The opposite."""

    of: Formula

    def at(self, point: Point) -> bool:
        return not self.of.at(point)

    def decide(self, judge: Callable[[Leaf], bool | None]) -> bool | None:
        truth = self.of.decide(judge)
        return None if truth is None else not truth

    @property
    def within(self) -> tuple[Formula, ...]:
        return (self.of,)


@dataclass(frozen=True)
class Join(Formula):
    """All of them (`settled` False: one that is false settles it), or any of them (`settled` True)."""

    settled: bool
    parts: tuple[Formula, ...]

    def at(self, point: Point) -> bool:
        # Every part is read, so that a missing cell never hides behind a part that settles it.
        truths = [part.at(point) for part in self.parts]
        return any(truths) if self.settled else all(truths)

    def decide(self, judge: Callable[[Leaf], bool | None]) -> bool | None:
        truths = [part.decide(judge) for part in self.parts]
        if self.settled in truths:
            return self.settled
        return None if None in truths else not self.settled

    @property
    def within(self) -> tuple[Formula, ...]:
        return self.parts


def every(parts: list[Formula]) -> Formula:
    """All of them."""
    return Join(settled=False, parts=tuple(parts))


def some(parts: list[Formula]) -> Formula:
    """Any of them."""
    return Join(settled=True, parts=tuple(parts))
