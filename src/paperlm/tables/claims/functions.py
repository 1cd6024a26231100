"""Functions that claims may call."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from paperlm.tables.claims.formula import Const, Extreme, Formula, Outcome, Quantity, Tested, every, some
from paperlm.tables.claims.values import NOTHING, Choice, Values


def rank_correlation(first: Any, second: Any) -> float:
    """Spearman's: the correlation of the ranks, ties getting their mean rank; 0 where one side is constant."""
    ranks = [
        [sum(w < v for w in values) + sum(w == v for w in values) / 2 for v in values] for values in (first, second)
    ]
    (a, b), n = ranks, len(ranks[0])
    product = sum(x * y for x, y in zip(a, b, strict=True)) / n - sum(a) * sum(b) / n**2
    spread = math.prod(sum(x * x for x in r) / n - (sum(r) / n) ** 2 for r in ranks)
    return product / math.sqrt(spread) if spread > 0 else 0.0


def _list(reader: Values, name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise reader.error(f"{name}() takes a list that is not empty")
    return list(value)


def _extreme(of: str) -> Callable[..., Any]:
    def function(reader: Values, *values: Any) -> Any:
        members = _list(reader, of, values[0]) if len(values) == 1 else list(values)
        if all(isinstance(member, int | float) for member in members):
            return (min if of == "min" else max)(members)
        for member in members:
            if not isinstance(member, Extreme):
                reader.quantity(member)
        flat = [m for member in members for m in _members(member, of)]
        return Extreme(of, tuple(flat))

    return function


def _members(value: Any, of: str) -> tuple[Any, ...]:
    return value.members if isinstance(value, Extreme) and value.of == of else (value,)


def _abs(reader: Values, value: Any) -> Any:
    if isinstance(value, int | float):
        return abs(value)
    return Extreme("max", (reader.quantity(value), reader.arithmetic("-", operator.sub, 0, value)))


def _sum(reader: Values, values: Any) -> Any:
    total: Any = 0
    for value in _list(reader, "sum", values):
        total = reader.arithmetic("+", operator.add, total, value) if not _is_zero(total) else value
    return total


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0


def _mean(reader: Values, values: Any) -> Any:
    return reader.divide(_sum(reader, values), len(values))


def _trend(sign: str) -> Callable[..., Formula]:
    def function(reader: Values, values: Any) -> Formula:
        pairs = itertools.pairwise(_list(reader, "increasing or decreasing", values))
        return every([reader.ordered("<", *((a, b) if sign == "<" else (b, a))) for a, b in pairs])

    return function


def _joined(join: Callable[[list[Formula]], Formula], name: str) -> Callable[..., Formula]:
    def function(reader: Values, values: Any) -> Formula:
        parts = [reader.formula(value, name) for value in _list(reader, name, values)]
        if all(isinstance(part, Const) for part in parts):
            return Const(join(parts).at(NOTHING))
        return join(parts)

    return function


def _div(reader: Values, cell: Any) -> Formula:
    if not isinstance(cell, Quantity) or cell.key is None:
        raise reader.error("div() takes a cell, such as div(M1['Post-LN','LLaMA-1B'])")
    return Outcome(cell.cells, f"div({cell.text})", cell.key)


def _as_printed(reader: Values, cell: Any) -> Formula:
    if not isinstance(cell, Quantity) or cell.key is None or cell.printed is None:
        raise reader.error("as_printed() takes a cell that the paper prints as a number")
    value, half = cell.printed
    return reader.ordered("<=", _abs(reader, reader.arithmetic("-", operator.sub, cell, value)), half)


def _round(reader: Values, value: Any, digits: Any = 0) -> Any:
    if isinstance(value, int | float):
        return round(value, digits)
    inner = reader.quantity(value)
    return Quantity(
        f"round({inner.text}, {digits})", inner.cells, lambda n: np.round(inner.value(n), digits), drawn=True
    )


def _rank_correlation(reader: Values, first: Any, second: Any) -> Any:
    sides = [[reader.quantity(v) for v in _list(reader, "rank_correlation", side)] for side in (first, second)]
    if len(sides[0]) != len(sides[1]) or len(sides[0]) < 2:
        raise reader.error(f"rank_correlation() of {len(sides[0])} and {len(sides[1])} numbers; give as many, from two")
    cells = frozenset(key for side in sides for q in side for key in q.cells)

    def value(numbers: Any) -> Any:
        columns = np.broadcast_arrays(*(np.asarray(q.value(numbers), float) for side in sides for q in side))
        table = np.stack(columns, axis=-1).reshape(-1, 2, len(sides[0]))
        found = np.array([rank_correlation(*row.tolist()) for row in table])
        return found if columns[0].ndim else float(found[0])

    if not cells:
        return value({})
    text = ", ".join(f"[{', '.join(q.text for q in side)}]" for side in sides)
    return Quantity(f"rank_correlation({text})", cells, value, drawn=True)


def _significant(reader: Values, for_it: Any, against_it: Any) -> Formula:
    first, second = reader.quantity(for_it), reader.quantity(against_it)
    return Tested(first.cells | second.cells, f"significant({first.text}, {second.text})", first, second)


def _argument(of: str) -> Callable[..., Choice]:
    def function(reader: Values, members: Any) -> Choice:
        if not isinstance(members, dict) or len(members) < 2:
            raise reader.error(f"arg{of}() takes {{label: cell for ...}} with at least two labels")
        for value in members.values():
            reader.quantity(value)
        return Choice(of, members)

    return function


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all": _joined(every, "all"), "any": _joined(some, "any"), "min": _extreme("min"), "max": _extreme("max"),
    "abs": _abs, "round": _round, "sum": _sum, "mean": _mean,
    "len": lambda reader, values: len(_list(reader, "len", values)),
    "increasing": _trend("<"), "decreasing": _trend(">"), "div": _div, "as_printed": _as_printed,
    "rank_correlation": _rank_correlation, "significant": _significant,
    "argmin": _argument("min"), "argmax": _argument("max"),
}  # fmt: skip
