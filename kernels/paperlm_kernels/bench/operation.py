"""What an operation of the benchmark is, and one task of it: a method on a case."""

from __future__ import annotations

import abc
import argparse
import dataclasses
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

from paperlm_kernels.bench import report, rows

Row = rows.Row
TURN = None
"What `Operation.run` yields in place of a row when its turn is over."


class Small(Protocol):
    """A case that has a smaller one, to try out the benchmark."""

    def small(self) -> Self: ...


Sized = TypeVar("Sized", bound=Small)


@dataclasses.dataclass(frozen=True)
class Task:
    """What one process measures."""

    op: str
    case: str
    method: str
    "a method of the operation, or its `first`"
    measures: tuple[str, ...]
    repeats: int = 50
    warmup: int = 3
    seconds: float = 1.5
    "fewer repetitions if they take longer"
    seed: int = 0
    small: bool = False
    "an eighth of the sizes, to try the benchmark"
    device: str = "cuda"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    "of the operation alone (`Operation.options`); plain JSON"

    def sized(self, cases: Mapping[str, Sized]) -> Sized:
        """Its case, of an operation's, in full or small size."""
        case = cases[self.case]
        return case.small() if self.small else case


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What is measured unless the command says otherwise: names, or groups of cases, separated by commas."""

    cases: str
    methods: str
    measures: str
    repeats: int
    warmup: int
    seconds: float


class Operation(abc.ABC):
    """An operation with its cases and methods. `name` is that of its folder."""

    name: str
    summary: ClassVar[str]
    measures: ClassVar[Mapping[str, str]]
    metrics: Mapping[str, Mapping[str, tuple[str, ...]]] = {}
    "metric of its rows -> field that tells rows of this metric apart -> the values it has; empty: not said"
    numbers: tuple[str, ...] = ("value", "low", "high")
    "fields of its rows with a number that a table can show"
    first: ClassVar[str] = ""
    "a name, no method's: the task that comes first on each case and describes it, such as a lower bound"
    packages: ClassVar[tuple[str, ...]] = ()
    "whose versions stand in the rows, beside those of torch and triton"
    groups: Mapping[str, tuple[str, ...]] = {}
    "name -> cases"
    in_turns: ClassVar[bool] = False
    "the methods of a case take turns, so that clocks drift for all; else each is done before the next"
    goes_on: ClassVar[bool] = False
    """a method's process measures its next case too, if it has not failed; not with `in_turns`. For times that only the
    card determines: what a process does first takes many times as long as they do. Not for methods that compile anew
    with each case up to a limit (torch.compile), or that go on behind an error of the card."""
    limit: ClassVar[float] = 180.0
    "seconds after which a method is given up, of one turn where there are turns"

    @property
    @abc.abstractmethod
    def cases(self) -> Mapping[str, str]:
        """Name -> one line about it."""

    @property
    @abc.abstractmethod
    def methods(self) -> Mapping[str, str]:
        """Name -> one line about it, in the order of the tables."""

    @abc.abstractmethod
    def run(self, task: Task) -> Generator[Row | None, bool | None, None]:
        """Rows of a task (`self.row`, `self.outcome`), in the process that measures.

        `again = yield TURN` ends a turn: the others of the case have theirs, then `again` is True for one more, or
        False when it is time to give the rows. What is raised ends up in a row with the outcome `failed: ...`.
        """

    def defaults(self, device: str, *, for_tables: bool = False) -> Defaults:
        """Of the command line, or of a measurement that a table asks for. Every case and method, few repetitions."""
        names = (",".join(every) for every in (self.cases, self.methods, self.measures))
        return Defaults(*names, repeats=20, warmup=3, seconds=2.0)

    def absent(self, method: str, device: str) -> str | None:
        """Why a method cannot run on `cpu` or `cuda` here, as far as can be told without trying; None if it can."""
        return None

    def label(self, method: str) -> str:
        """The method's name in a row: a peer's has its version, as in `liger-kernel 0.8.5`."""
        return method

    def modules(self, method: str) -> tuple[str, ...]:
        """What takes long to import, and is imported before any method that starts with this one is measured."""
        return ()

    def identity(self, task: Task) -> dict[str, Any]:
        """Fields of every row of a task beyond those of all operations: `shape`, by name, and what tells data apart."""
        return {}

    def shared(self, found: list[Row]) -> dict[str, Any]:
        """Fields that the rows of `first` add to the times of the case's methods."""
        return {}

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:  # noqa: B027 - few have any
        """Options of the command line beyond those of all operations."""

    def options(self, given: argparse.Namespace) -> dict[str, Any]:
        """What of them a task needs. Raises ValueError."""
        return {}

    def tables(self, found: Iterable[Row]) -> str:
        """Rows as Markdown."""
        return report.tables(found)

    def has_chart(self) -> None:
        """Raises ValueError for an operation whose rows cannot be drawn."""
        if type(self).draw is Operation.draw:
            raise ValueError(f"{self.name} has no chart; leave --plot out")

    def draw(self, found: list[Row], path: Path) -> None:
        """A chart in the format of the suffix of `path`. Raises ValueError where there is none to draw."""
        self.has_chart()

    # -- for `run` --

    def lacks(self, task: Task, device: str, part: str) -> Row:
        """The row of a part that is asked for and that a method does not have."""
        return self.outcome(task, device, report.NO_PART, measure=part)

    def row(self, task: Task, device: str, metric: str, unit: str, values: list[float], **extra: Any) -> Row:
        """A measurement (`rows.row`) with what identifies the task; `device` by name. An `order` is among `identity`,
        or natural."""
        identity = {
            "name": task.method, "order": "natural", "scale": "small" if task.small else "full", "seed": task.seed,
            **self.identity(task),
        }  # fmt: skip
        method = self.label(task.method) if task.method in self.methods else task.method
        return rows.row(
            self.name, task.case, method, metric, unit, values, device, packages=self.packages, **identity, **extra
        )

    def outcome(self, task: Task, device: str, reason: str, **extra: Any) -> Row:
        """The row of a method, or with measure=... of a part of it, that gave no number."""
        return self.row(task, device, "outcome", "", [], outcome=reason, **extra)
