"""Claims: expressions over a table's cells, evaluated without executing anything, judged with a margin.

The language is what the claims need: comparisons, arithmetic, and/or/not, literals, subscripts, comprehensions, and
the functions below. `M1['Mix-LN','LLaMA-130M']` is a cell of Table 1.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paperlm.errors import SpecError, unknown
from paperlm.tables.published import half_a_digit, number

SAMPLES = 500
OUTCOME_SEEDS = 3
"Seeds without which nothing is decided about divergence: a standard deviation says nothing about it."
ALPHA = 0.05
"Level of significant()."
CONFIDENCE = 0.975
"A gap of twice its standard deviation keeps its sign in this share of the draws."


class CellValue(float):
    """A cell's number that also knows whether its run diverged, and what the paper prints for it."""

    diverged: bool
    printed: str

    def __new__(cls, value: float, diverged: bool = False, printed: str = "") -> CellValue:
        self = super().__new__(cls, value)
        self.diverged, self.printed = diverged, printed
        return self


class MissingCell(Exception):
    """A claim needs a cell that was not run."""


class Undecided(Exception):
    """Tests of a statement and of its opposite both come out as not significant."""


def _increasing(values: list[float]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))


def _decreasing(values: list[float]) -> bool:
    return all(a > b for a, b in itertools.pairwise(values))


def _mean(values: list[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _div(cell: Any) -> bool:
    if not isinstance(cell, CellValue):
        raise SpecError("div() takes a cell, such as div(M1['Post-LN','LLaMA-1B'])")
    return cell.diverged


def _as_printed(cell: Any) -> bool:
    if not isinstance(cell, CellValue) or number(cell.printed) is None:
        raise SpecError("as_printed() takes a cell that the paper prints as a number")
    return abs(cell - number(cell.printed)) <= half_a_digit(cell.printed)


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's: the correlation of the ranks, ties getting their mean rank; 0 where one side is constant."""
    ranks = [
        [sum(w < v for w in values) + sum(w == v for w in values) / 2 for v in values] for values in (first, second)
    ]
    (a, b), n = ranks, len(ranks[0])
    product = sum(x * y for x, y in zip(a, b, strict=True)) / n - sum(a) * sum(b) / n**2
    spread = math.prod(sum(x * x for x in r) / n - (sum(r) / n) ** 2 for r in ranks)
    return product / math.sqrt(spread) if spread > 0 else 0.0


def _significant(p_true: float, p_false: float) -> bool:
    """Whether a statement holds, from the p values of a test for it and of one against it."""
    if min(p_true, p_false) > ALPHA:
        raise Undecided(f"neither the statement nor its opposite is significant at {ALPHA}")
    return p_true <= p_false


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all": all, "any": any, "min": min, "max": max, "abs": abs, "round": round, "len": len, "sum": sum,
    "mean": _mean, "increasing": _increasing, "decreasing": _decreasing, "div": _div,
    "as_printed": _as_printed, "rank_correlation": rank_correlation,
    "significant": _significant,
}  # fmt: skip
BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
COMPARE = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip


class Expression:
    """A parsed claim. Construction raises SpecError for anything outside the language."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text, mode="eval").body
        except SyntaxError as error:
            raise SpecError(f"claim {text!r}: {error.msg}") from None

    def evaluate(self, names: Mapping[str, Any]) -> Any:
        """Value of the expression; `names` maps table names to cell lookups, plus constants."""
        return self._value(self._tree, dict(names))

    def cells(self, names: Mapping[str, Mapping[Any, Any]]) -> set[tuple[str, Any]]:
        """(table, key) of every cell the expression reads, on the given values."""
        read: set[tuple[str, Any]] = set()
        recorders = {name: _Recorder(name, cells, read) for name, cells in names.items()}
        with contextlib.suppress(Undecided):
            self.evaluate(recorders)
        return read

    def _value(self, node: ast.AST, names: dict[str, Any]) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                if name not in names:
                    raise SpecError(f"claim {self.text!r}: " + unknown("name", name, names))
                return names[name]
            case ast.List(elts=items):
                return [self._value(i, names) for i in items]
            case ast.Tuple(elts=items):
                return tuple(self._value(i, names) for i in items)
            case ast.Subscript(value=value, slice=index):
                return self._value(value, names)[self._value(index, names)]
            case ast.BoolOp(op=op, values=values):
                # All operands, so that every cell the claim is about is read.
                truths = [self._value(v, names) for v in values]
                return all(truths) if isinstance(op, ast.And) else any(truths)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._value(operand, names)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand, names)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
                return BINARY[type(op)](self._value(left, names), self._value(right, names))
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                values = [self._value(v, names) for v in (left, *comparators)]
                return all(COMPARE[type(op)](a, b) for op, a, b in zip(ops, values, values[1:], strict=False))
            case ast.ListComp(elt=elt, generators=generators) | ast.GeneratorExp(elt=elt, generators=generators):
                return [self._value(elt, scope) for scope in self._scopes(generators, names)]
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
                return FUNCTIONS[name](*(self._value(a, names) for a in args))
        raise SpecError(f"claim {self.text!r}: {ast.unparse(node)!r} is not part of the claim language")

    def _scopes(self, generators: list[ast.comprehension], names: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not generators:
            yield names
            return
        first, *rest = generators
        for item in self._value(first.iter, names):
            scope = {**names, **self._bind(first.target, item)}
            if all(self._value(test, scope) for test in first.ifs):
                yield from self._scopes(rest, scope)

    def _bind(self, target: ast.AST, item: Any) -> dict[str, Any]:
        match target:
            case ast.Name(id=name):
                return {name: item}
            case ast.Tuple(elts=targets):
                bound = zip(targets, item, strict=True)
                return {k: v for t, i in bound for k, v in self._bind(t, i).items()}
        raise SpecError(f"claim {self.text!r}: {ast.unparse(target)!r} cannot be a loop variable")


class Cells(Mapping[Any, CellValue]):
    """A table as an expression sees it; reading a cell that was not run raises MissingCell."""

    def __init__(self, cells: Mapping[Any, CellValue]) -> None:
        self._cells = cells

    def __getitem__(self, key: Any) -> CellValue:
        if key not in self._cells:
            raise MissingCell(", ".join(key) if isinstance(key, tuple) else str(key))
        return self._cells[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


class _Recorder(Cells):
    """Cells that note which of them are read."""

    def __init__(self, name: str, cells: Mapping[Any, Any], read: set[tuple[str, Any]]) -> None:
        super().__init__(cells)
        self._name, self._read = name, read

    def __getitem__(self, key: Any) -> Any:
        self._read.add((self._name, key))
        return super().__getitem__(key)


@dataclass(frozen=True)
class CellSamples:
    """A cell as the judge sees it: value and divergence per seed, the relative noise of one run, the printed cell."""

    values: tuple[float, ...]
    diverged: tuple[bool, ...]
    noise: float
    printed: str = ""
    measured: bool = True
    "whether its noise was measured; nothing is decided on one value without it"
    error: float = 0.0
    "standard error of one run's number where it is known in the number's own unit; in place of `noise`"


@dataclass(frozen=True)
class Verdict:
    """holds, fails, undecided or not tested; the share of noisy redraws that agree; truth per seed; the reason."""

    verdict: str
    support: float | None = None
    per_seed: tuple[bool, ...] = ()
    reason: str = ""


def judge(expression: str, name: str, cells: Mapping[Any, CellSamples]) -> Verdict:
    """Verdict on a claim about one table.

    holds: true for every seed, and in 97.5 % of redraws of the table in which each cell's mean is moved by its noise,
    i.e. every compared gap exceeds twice its standard deviation; fails: false likewise; else undecided. The noise of a
    cell is the standard deviation over its seeds, and below five seeds at least the scale's seed noise. A claim about
    outcomes, one that reads div() or a diverged cell, is undecided with fewer than OUTCOME_SEEDS seeds.
    """
    claim = Expression(expression)
    try:
        reads = {key for _, key in claim.cells({name: Cells({k: _seed(c, 0) for k, c in cells.items()})})}
    except MissingCell as missing:
        return Verdict("not tested", reason=f"cell {missing} was not run")
    # A claim has as many seeds as the cell with the fewest.
    n_seeds = min((len(cells[key].values) for key in reads), default=0)
    if not n_seeds:
        return Verdict("not tested", reason="the claim reads no cell")
    try:
        per_seed = tuple(
            bool(claim.evaluate({name: Cells({k: _seed(c, s) for k, c in cells.items()})})) for s in range(n_seeds)
        )
    except Undecided as neither:
        return Verdict("undecided", reason=f"{neither} with {n_seeds} seeds")
    rng = random.Random(0)
    hits = sum(
        bool(claim.evaluate({name: Cells({k: _redraw(c, rng) for k, c in cells.items()})})) for _ in range(SAMPLES)
    )
    support = hits / SAMPLES
    if n_seeds == 1 and not all(cells[key].measured for key in reads):
        reason = "one seed; how this number varies between seeds was not measured"
        return Verdict("undecided", support, per_seed, reason)
    about_outcomes = "div(" in expression or any(any(cells[key].diverged) for key in reads)
    if about_outcomes and n_seeds < OUTCOME_SEEDS:
        reason = f"whether a run diverges depends on the seed: {OUTCOME_SEEDS} seeds decide, {n_seeds} ran"
        return Verdict("undecided", support, per_seed, reason)
    if all(per_seed) and support >= CONFIDENCE:
        return Verdict("holds", support, per_seed)
    if not any(per_seed) and support <= 1 - CONFIDENCE:
        return Verdict("fails", support, per_seed)
    reason = "seeds disagree" if any(per_seed) and not all(per_seed) else "a gap is within twice the seed noise"
    return Verdict("undecided", support, per_seed, reason)


def _seed(cell: CellSamples, seed: int) -> CellValue:
    index = min(seed, len(cell.values) - 1)
    return CellValue(cell.values[index], cell.diverged[index], cell.printed)


def _redraw(cell: CellSamples, rng: random.Random) -> CellValue:
    """The outcome of one seed drawn at random, and around it the mean of the seeds with that outcome."""
    diverged = cell.diverged[rng.randrange(len(cell.diverged))]
    alike = [v for v, d in zip(cell.values, cell.diverged, strict=True) if d == diverged]
    moved = sum(alike) / len(alike) * math.exp(rng.gauss(0.0, cell.noise)) + rng.gauss(0.0, cell.error)
    return CellValue(moved, diverged, cell.printed)
