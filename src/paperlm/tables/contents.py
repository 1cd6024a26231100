"""What every kind of table comes down to: a diff row per cell, and the cells that claims are judged on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paperlm.errors import RecordError, SpecError, did_you_mean
from paperlm.plan.scale import SeedNoise
from paperlm.plan.table import Printed
from paperlm.tables.claims import CellSamples, PrintedCell
from paperlm.tables.published import PublishedTable, read_cells
from paperlm.tables.vocabulary import NOT_FOUND, NOT_PRINTED

Key = tuple[str, str]
"Row and column label."

ITEMS_ONLY = "one seed; standard errors are of the items, seeds of training are not in them"


def one_seed(noise: SeedNoise) -> str:
    """What a verdict says that rests on one seed and on a seed noise from elsewhere."""
    return f"one seed; seed noise {noise.value:.1%} ({noise.source})"


@dataclass(frozen=True)
class DiffRow:
    """One line of <exhibit>.diff.csv."""

    table: str
    row: str
    column: str
    scale: str
    published: str
    regenerated: str
    metric: str = ""
    "what the regenerated number is"
    judged_on: str = ""
    "the number that claims use, in full"
    spread: str = ""
    seeds: int = 0
    difference: str = ""
    relative_difference: str = ""
    verdict: str = ""
    reason: str = ""
    jobs: str = ""
    "ids of the jobs, or operation/case/method of a measurement"
    labels: str = ""
    made_by: str = ""
    "whose code the row is, where rows of several stand in one table"

    def as_dict(self) -> dict[str, object]:
        """Column name -> value, in file order."""
        return asdict(self)


@dataclass(frozen=True)
class Contents:
    """A table as its kind computed it, before anything is written."""

    diff: list[DiffRow]
    "a row per cell, in the order of the table"
    samples: Mapping[Key, CellSamples] = field(default_factory=dict)
    "cells that have a number, printed columns or not"
    printed: Mapping[Key, PrintedCell] = field(default_factory=dict)
    print_noise: float = 0.0
    "relative difference between two printed cells that says nothing"
    one_sample: str = ""
    "added to the reason of a verdict that rests on one value a cell"
    untested: str = ""
    "why no claim of the table can be judged; empty: they are judged"
    judged_columns: frozenset[str] = frozenset()
    "columns that claims are judged on although the table is `untested`"
    untested_cells: Mapping[Key, str] = field(default_factory=dict)
    "cells that no claim can be judged on -> why"
    depends_on_scale: bool = True
    "False: the same at every scale, so that no scale's rule about claims applies"
    drifted_cells: frozenset[Key] = frozenset()
    "cells whose records are of earlier rules: claims on them say so"
    proxies: Mapping[str, str] = field(default_factory=dict)
    "row -> what stands in place of the paper's inputs or models; beside the scale in the table"
    notes: tuple[str, ...] = ()
    "what holds for the whole table or a whole column of it: said once, not in each cell"

    @property
    def scale(self) -> str:
        """The scale that the table was built at."""
        return self.diff[0].scale

    def scale_of(self, row: str) -> str:
        """First column of a row: the scale, and what its numbers are a proxy with."""
        return f"{self.scale}: {self.proxies[row]}" if row in self.proxies else self.scale

    @property
    def made_by(self) -> dict[str, str]:
        """Row -> whose code it is, of those that say."""
        return {d.row: d.made_by for d in self.diff if d.made_by}

    @property
    def rows(self) -> list[str]:
        """Row labels in order."""
        return list(dict.fromkeys(d.row for d in self.diff))

    @property
    def columns(self) -> list[str]:
        """Column labels in order."""
        return list(dict.fromkeys(d.column for d in self.diff))

    @property
    def cells(self) -> dict[Key, DiffRow]:
        """Diff rows by row and column label."""
        return {(d.row, d.column): d for d in self.diff}


def read_built(path: Path) -> list[dict[str, str]]:
    """Lines of a built diff or claims file, by column. RecordError for a file that is none."""
    kind = path.name.split(".")[-2]
    try:
        heads, *lines = read_cells(path) or [[]]
    except SpecError as error:
        raise RecordError(str(error)) from None
    if missing := [name for name in SHOWN.get(kind, ()) if name not in heads]:
        raise RecordError(f"{path}: no {kind} of a table, it has no column {missing[0]}; delete it and build it again")
    return [dict(zip(heads, line, strict=True)) for line in lines]


SHOWN = {
    "diff": ("row", "column", "scale", "published", "regenerated", "verdict", "labels"),
    "claims": (
        "claim", "part", "says", "scale", "verdict", "reason", "margin", "detectable", "would_decide",
    ),
}  # fmt: skip
"Columns of built files that are shown in the terminal and in documents."


def without_print(*printed: Printed) -> tuple[str, str]:
    """Verdict and reason of a cell with no printed number, from what its row and its column say about the print."""
    if "not found" in printed:
        return NOT_FOUND, "the paper prints it, but no source with the number was found"
    return NOT_PRINTED, "" if False in printed else "blank in the paper"


def check_labels(
    name: str, rows: Mapping[str, Printed], columns: Mapping[str, Printed], published: PublishedTable
) -> None:
    """Every printed row and column is declared, in the printed order, and the other way round; SpecError otherwise."""
    for kind, declared, printed in (("row", rows, [*published.rows]), ("column", columns, published.columns)):
        elsewhere = published.other_editions if kind == "row" else ()
        strangers = [label for label, flag in declared.items() if flag is True and label not in {*printed, *elsewhere}]
        for label in printed:
            if not declared.get(label, False):
                hint = did_you_mean(label, set(declared) - {*printed}) or "; declare it"
                raise SpecError(f"tables.{name}: {kind} {label!r} is printed but not declared{hint}")
        for label in strangers:
            raise SpecError(
                f"tables.{name}: {kind} {label!r} is declared but not printed; say so (in_print: false, or printed: "
                "false), or leave it out"
            )
        if (order := [label for label in declared if label in printed]) != printed:
            raise SpecError(f"tables.{name}: {kind}s are declared as {order}, but printed as {printed}; reorder them")


def relative(difference: float, reference: float) -> str:
    """A difference as a share of the printed number; empty where that is 0."""
    return f"{difference / reference:+.2%}" if reference else ""


ROUNDING = 1e-9
"""Magnitude below which a number of a table is taken for zero. What sums of doubles near 1 leave of a zero is 1e-17 to
1e-12; the smallest numbers that mean something are shares of one activation in some hundred million, 2e-9."""


def format_value(value: float, printed: str) -> str:
    """A number with as many decimals as the printed cell, two if that is no decimal number; more where these leave less
    than two digits of it, none for a whole number beyond 1e9 (a hash). What rounding left of a zero is shown as 0."""
    if not math.isfinite(value):
        return "inf"
    if abs(value) < ROUNDING:
        value = 0.0  # without a sign: -0.00 says nothing
    if abs(value) >= 1e9 and value == int(value):
        return f"{value:.0f}"
    _, _, printed_decimals = printed.partition(".")
    decimals = len(printed_decimals) if printed_decimals.isdigit() else 2
    if abs(value) < 10 ** (1 - decimals) and abs(round(value, decimals) - value) > 0.01 * abs(value):
        decimals = max(decimals, 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def format_count(value: float) -> str:
    """1.1B, 0.46M, 20K."""
    for suffix, unit in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= unit / 2:
            text = f"{value / unit:.2f}" if value < 10 * unit else f"{value / unit:.0f}"
            return text + suffix
    return f"{value:.0f}"
