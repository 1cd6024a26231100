"""Declarations of figures in a paper file, and what they share with its tables: claims, and cells that are jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from paperlm.errors import SpecError
from paperlm.frozen import Frozen


class Setting(Frozen):
    """A value and where it comes from: a place in the paper, the authors' code, or `assumed` with a reason."""

    value: Any
    source: str = Field(min_length=3)


Settings = dict[str, Setting]


class Condition(Frozen):
    """What has to be true for a claim to be tested at all, and why."""

    expression: str
    why: str


class OnlyAt(Frozen):
    """Scales at which a claim is judged: those where its rows or its models are."""

    scales: list[str] = Field(min_length=1)
    why: str = Field(min_length=3)


class ByEye(Frozen):
    """What a printed picture says of a claim to somebody who looks at it: it has no numbers to compute with."""

    holds: bool
    source: str = Field(min_length=3)
    "which picture, and what stands beside it"


class ClaimSpec(Frozen):
    """A statement about an exhibit, as an expression over its cells (paperlm.tables.claims)."""

    id: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*$")
    says: str
    expression: str
    for_each: dict[str, list[str | int | float | bool]] = {}
    "loop variables of the expression -> their values: the claim is judged for each, and as a whole for all"
    expression_in_print: str = ""
    "where the print says it with other rows than those that say the same here"
    of_print: str = ""
    "why it is about the print alone, so that nothing that is made here can test it"
    only_at: OnlyAt | None = None
    "scales that can judge it, and why no other can; a paper's `except` names scales that cannot"
    published: bool | None
    "whether the printed numbers satisfy it; False documents a contradiction inside the paper; null: they do not say"
    by_eye: ByEye | None = None
    "whether a printed picture satisfies it; only beside `published: null`, since numbers say more than a look"
    given: Condition | None = None
    note: str = ""
    "added to the verdict's reason"

    @field_validator("for_each")
    @classmethod
    def loops_are_not_empty(cls, value: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """A loop over nothing would hold without a comparison."""
        for name, values in value.items():
            if not name.isidentifier():
                raise ValueError(f"for_each: {name!r} is no name of a variable")
            if not values or len(set(map(str, values))) != len(values) or "" in values:
                raise ValueError(f"for_each.{name}: give different values, at least one; parts are called by them")
        return value

    @model_validator(mode="after")
    def numbers_or_a_look(self) -> ClaimSpec:
        if self.by_eye and self.published is not None:
            raise ValueError(
                f"{self.id}: by_eye is for a picture without numbers, and published says what the printed numbers "
                "do: leave by_eye out, or write published: null"
            )
        return self

    @property
    def reads(self) -> tuple[str, ...]:
        """Names, as exhibits call themselves in claims, that its expressions read."""
        text = self.expression + (f" {self.given.expression}" if self.given else "")
        return tuple(dict.fromkeys(re.findall(r"\b([A-Za-z]\w*)\[", text)))


class DivergedRule(Frozen):
    """When a job whose losses stayed finite counts as diverged all the same.

    `above`: perplexity above a number (the papers' 1,360-1,440 lie above 1,000). `unigram_within`: perplexity above
    (1 - x) times that of the data's unigram distribution, which is where those published numbers come from.
    """

    above: float | None = Field(None, gt=0)
    unigram_within: float | None = Field(None, gt=0, lt=1)
    source: str = Field(min_length=3)

    @model_validator(mode="after")
    def one_rule(self) -> DivergedRule:
        if (self.above is None) == (self.unigram_within is None):
            raise ValueError("give exactly one of above and unigram_within")
        return self

    def threshold(self, unigram_perplexity: float) -> float:
        """Perplexity from which a job counts as diverged."""
        return self.above if self.above is not None else (1 - self.unigram_within) * unigram_perplexity


class Exhibit(Frozen):
    """What tables and figures share."""

    title: str
    number: str
    claims_name: str = ""
    "how claims call it, e.g. M1"
    claims: list[ClaimSpec] = []
    notes: list[str] = []


class Part(Frozen):
    """What a row or column contributes to the job of its cells, and to how the cell is read."""

    size: str = ""
    norm: dict[str, Any] | None = None
    "options may be {of: size}: what the paper's size says"
    settings: dict[str, Settings] = {}
    "name of a job of the paper -> settings for it"
    job: str = ""
    "another job of the paper than the exhibit's"
    instead: dict[str, str] = {}
    "name of a job of the paper -> the one in its place, wherever the cell's job or what it works on is that one"
    metric: str = ""
    "another metric than the exhibit's"
    factor: float | None = Field(None, gt=0)
    "printed number / metric, in place of the table's"
    values: dict[str, Settings] = {}
    "size -> what tables need to know of these runs, in place of what the paper's size says"
    mean_of: list[str] = []
    "of these columns of the same row, in place of a metric"
    sum_of_column: str = ""
    "metric of the column's jobs, whose mean is printed as a count; such a row has no job of its own"
    source: str = ""
    incomparable: str = ""
    "why its printed numbers are another quantity than ours, whatever the scale"
    in_print: bool = True
    "False: a column or row of ours beside those that the paper prints"
    compared_with: str = ""
    "of a column of ours: the printed one that means the same, whose cells it is compared with at a comparable scale"
    scales: list[str] = []
    "an extra row or column that the paper does not print, at these scales only; no claim reads it"

    @property
    def printed(self) -> bool:
        """Whether the paper prints it."""
        return self.in_print and not self.scales


class Along(Frozen):
    """Columns at equal steps along a run: states of the parent that a job measures, from its start."""

    job: str
    "name of the job whose `at` they set"
    share: str = Field("1", pattern=r"^\d+(/\d+)?$")
    "part of the run that they cover"
    points: dict[str, int] = Field(min_length=1)
    "scale -> how many there are behind the start; `default` for the others"

    @model_validator(mode="after")
    def part_of_a_run(self) -> Along:
        if self.share.endswith("/0") or not 0 < Fraction(self.share) <= 1:
            raise ValueError(f"share {self.share} is no part of a run: write one above 0 and up to 1, e.g. 1/2")
        if any(count < 1 for count in self.points.values()):
            raise ValueError("points: give at least one for each scale")
        return self

    def columns(self, scale: str) -> dict[str, Part]:
        """Label -> what the column contributes: `at` as a share of the run, which the plan turns into an update."""
        if not (points := self.points.get(scale) or self.points.get("default")):
            raise SpecError(f"along.points: neither {scale} nor default is there: add one of them")
        shares = [Fraction(self.share) * index / points for index in range(points + 1)]
        source = f"{points} equal steps over {self.share} of the run"
        return {
            str(share): Part(settings={self.job: {"at": Setting(value=f"share {share}", source=source)}})
            for share in shares
        }


class JobCells(Exhibit):
    """An exhibit whose cells are jobs: a job for each row, column and seed."""

    job: str
    "name of a job in the paper file"
    metric: str = ""
    "of the record, that claims are judged on, e.g. ppl_true or mmlu/acc"
    rows: dict[str, Part]
    columns: dict[str, Part] = {"": Part()}
    along: Along | None = None
    "in place of columns"
    seeds: dict[str, Annotated[int, Field(gt=0)]] = {}
    "scale -> how many seeds there are at least, whatever config.yaml says"


def parts(exhibit: Exhibit) -> Iterator[tuple[Literal["rows", "columns"], str, Part]]:
    """Rows and columns of an exhibit whose cells are jobs, with their labels; of another one nothing."""
    if isinstance(exhibit, JobCells):
        yield from (("rows", label, part) for label, part in exhibit.rows.items())
        yield from (("columns", label, part) for label, part in exhibit.columns.items())


class FigureSpec(JobCells):
    """A figure: drawn by paperlm/figures/<draw>.py from its jobs, or from the constants or measurements of a table."""

    draw: str
    job: str = ""
    rows: dict[str, Part] = {}
    table: str = ""
    "table whose constants, measurements or jobs it is drawn from"
    options: dict[str, Any] = {}
    in_words: dict[str, str] = {}
    "statistic -> what the paper's text says of it; its figures print no numbers"

    @model_validator(mode="after")
    def jobs_with_rows(self) -> FigureSpec:
        if bool(self.job) != bool(self.rows):
            raise ValueError("a figure of jobs has `job` and `rows`, another one neither")
        return self
