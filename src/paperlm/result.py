"""What a job hands over: numbers, curves, answers, what it took."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, model_validator

from paperlm.errors import SpecError, unknown
from paperlm.frozen import Frozen

Outcome = Literal["trained", "measured", "not_finite", "out_of_memory", "blocked"]
"""How a job ended. trained, measured: it has its numbers; not_finite: a loss was no number and training stopped there;
blocked: it was tried, and there is no honest number, for a reason that stands beside it. Whether a number counts as
diverged is no outcome: that is the rule of the table that shows it."""

NO_MODEL = ("not_finite", "out_of_memory", "blocked")
"Outcomes that leave nothing a child could work on."


UNIGRAM = "unigram_perplexity"
"Metric of a training: the perplexity of one that knows how frequent each token is and nothing more."


class Series(Frozen):
    """Numbers in rows, e.g. a training curve."""

    columns: list[str]
    rows: list[list[float | int | str | None]]

    def column(self, name: str) -> list[Any]:
        """One column; SpecError for an unknown one."""
        if name not in self.columns:
            raise SpecError(unknown("column", name, self.columns))
        index = self.columns.index(name)
        return [row[index] for row in self.rows]


class Answers(Frozen):
    """Which items of a set were answered rightly, in few characters: 2,512 for HellaSwag's 10,042 items."""

    items: int = Field(gt=0)
    digest: str = Field(pattern=r"^[0-9a-f]{16}$")
    "of the items in their order: two sets of answers are compared in pairs where it is the same"
    right: str
    "hexadecimal, a bit for each item from the first on, filled up with zeros to whole bytes"

    @model_validator(mode="after")
    def has_a_bit_for_each_item(self) -> Answers:
        size = -(-self.items // 8)
        if not re.fullmatch(f"[0-9a-f]{{{2 * size}}}", self.right) or int(self.right, 16) % (
            1 << 8 * size - self.items
        ):
            raise ValueError(
                f"right: {self.items} items take {2 * size} hexadecimal digits, with zeros behind the last"
            )
        return self

    @classmethod
    def of(cls, flags: Iterable[bool], items: str) -> Answers:
        """A flag for each item; `items`: their digest."""
        bits = "".join("1" if flag else "0" for flag in flags)
        size = -(-len(bits) // 8)
        return cls(items=len(bits), digest=items, right=f"{int(bits.ljust(8 * size, '0') or '0', 2):0{2 * size}x}")

    def flags(self) -> list[bool]:
        """A flag for each item."""
        bits = f"{int(self.right, 16):0{4 * len(self.right)}b}"
        return [bit == "1" for bit in bits[: self.items]]


class Cost(Frozen):
    """What a job took. With its environment the only part of a record that differs between equal jobs on a CPU."""

    wall_seconds: float | None
    "None: not recorded"
    train_seconds: float | None = None
    tokens_per_second: float | None = None
    "slots a second over the updates of the last start, its first ten left out"
    flops: float | None = None
    peak_memory_mib: float | None = None
    micro_batch: int | None = None
    compiled: bool | None = None
    world_size: int = 1
    resumed_from: list[int] = []


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a job hands over; the caller adds name, environment and the checksums of the data, and stores the record."""

    outcome: Outcome
    metrics: dict[str, float | int | None] = field(default_factory=dict)
    "name -> value; a task's metric is written `task/metric`; None where there is no finite number"
    standard_errors: dict[str, float | None] = field(default_factory=dict)
    "metric -> its standard error, where the measurement has one; the record leaves out what is no finite number"
    series: dict[str, Series] = field(default_factory=dict)
    answers: dict[str, Answers] = field(default_factory=dict)
    "metric that is a share of right answers -> which items were right, for comparisons in pairs"
    cost: Cost | None = None
    "None: the caller's wall time"
    labels: list[str] = field(default_factory=list)
    "what has to stand wherever the numbers do: a proxy, a leak, a share of items that was cut"
    model_labels: list[str] = field(default_factory=list)
    "those that have to stand beside every number that is computed from the model as well"
    versions: dict[str, str] = field(default_factory=dict)
    "versions beyond those of packages, e.g. of an lm-eval task"
    reason: str = ""
    "why an outcome is `blocked`"
