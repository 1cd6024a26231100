"""Helpers of the tests of claims: cells of one exhibit `M` by label, judged or read at a point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paperlm.tables.claims import CellSamples, Point, Verdict, judge, read

Values = Mapping[Any, float]


def at(expression: str, values: Values, diverged: tuple = (), printed: Mapping[Any, str] | None = None) -> bool:
    """Whether an expression is true of these numbers of `M`."""
    formula = read(expression, {"M": dict(printed or {})})
    return formula.at(
        Point({("M", key): value for key, value in values.items()}, {("M", k): k in diverged for k in values})
    )


def verdict(expression: str, cells: Mapping[Any, CellSamples], **options: Any) -> Verdict:
    """The verdict on a claim about `M`."""
    return judge(expression, {("M", key): cell for key, cell in cells.items()}, {"M": {}}, **options)


def cell(*values: float, deviation: float = 0.0, diverged: tuple[bool, ...] = (), **more: Any) -> CellSamples:
    return CellSamples(values, diverged, deviation=deviation, **more)
