"""The language of claims: read without executing anything, into a formula over cells.

Comparisons, arithmetic, and/or/not, literals, comprehensions and the functions below; `M1['Mix-LN','LLaMA-130M']` is a
cell of the exhibit that calls itself M1 in claims.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from paperlm.errors import SpecError, unknown
from paperlm.tables.claims.formula import (
    Comparison,
    Const,
    Extreme,
    Formula,
    Key,
    Not,
    Outcome,
    Quantity,
    Tested,
    every,
    some,
)
from paperlm.tables.published import half_a_digit, number

STEPS = 100_000
"Evaluations of a node after which a claim is refused: no claim needs a hundredth of them."
BINARY = {ast.Add: ("+", operator.add), ast.Sub: ("-", operator.sub), ast.Mult: ("*", operator.mul)}
RELATIONS = {
    ast.Lt: ("<", operator.lt), ast.LtE: ("<=", operator.le), ast.Gt: (">", operator.gt), ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq), ast.NotEq: ("!=", operator.ne),
}  # fmt: skip
MIRRORED = {">": "<", ">=": "<="}


class Choice:
    """`argmin({label: quantity})` or argmax: comparable with a label only."""

    def __init__(self, of: str, members: Mapping[Any, Any]) -> None:
        self.of, self.members = of, members


def rank_correlation(first: Any, second: Any) -> float:
    """Spearman's: the correlation of the ranks, ties getting their mean rank; 0 where one side is constant."""
    ranks = [
        [sum(w < v for w in values) + sum(w == v for w in values) / 2 for v in values] for values in (first, second)
    ]
    (a, b), n = ranks, len(ranks[0])
    product = sum(x * y for x, y in zip(a, b, strict=True)) / n - sum(a) * sum(b) / n**2
    spread = math.prod(sum(x * x for x in r) / n - (sum(r) / n) ** 2 for r in ranks)
    return product / math.sqrt(spread) if spread > 0 else 0.0


def parse_claim(text: str) -> ast.expr:
    """The tree of an expression; SpecError if it is none."""
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"claim {text!r}: {getattr(error, 'msg', error)}; mend the expression") from None


def read(text: str, tables: Mapping[str, Mapping[Any, str]], names: Mapping[str, Any] | None = None) -> Formula:
    """The formula of a claim. `tables`: name in claims -> cell -> what is printed there; `names`: loop variables.

    A cell that is not in `tables` is read all the same: whoever decides says that it is missing. Raises SpecError for
    anything outside the language.
    """
    reader = _Reader(text, tables)
    found = reader.value(parse_claim(text), dict(names or {}))
    formula = reader.formula(found, "a claim")
    if not any(True for _ in formula.leaves()):
        raise SpecError(f"claim {text!r}: it reads no cell; say which, as in M1['Mix-LN','LLaMA-130M']")
    return formula


class _Reader:
    def __init__(self, text: str, tables: Mapping[str, Mapping[Any, str]]) -> None:
        self.text, self.tables, self.steps = text, tables, 0

    def error(self, message: str) -> SpecError:
        return SpecError(f"claim {self.text!r}: {message}")

    # -- syntax ----

    def value(self, node: ast.AST, names: dict[str, Any]) -> Any:
        self.steps += 1
        if self.steps > STEPS:
            raise self.error(f"it takes more than {STEPS:,} steps; make its loops smaller")
        match node:
            case ast.Constant(value=bool() | int() | float() | str() as value):
                return value
            case ast.Name(id=name):
                if name not in names:
                    raise self.error(unknown("name", name, [*names, *self.tables, *FUNCTIONS]))
                return names[name]
            case ast.List(elts=items) | ast.Tuple(elts=items):
                found = [self.value(item, names) for item in items]
                return found if isinstance(node, ast.List) else tuple(found)
            case ast.Dict(keys=keys, values=values) if all(keys):
                return {self.value(k, names): self.value(v, names) for k, v in zip(keys, values, strict=True)}
            case ast.Subscript(value=ast.Name(id=name), slice=index) if name not in names:
                return self.cell(name, self.value(index, names))
            case ast.BoolOp(op=op, values=values):
                parts = [self.formula(self.value(v, names), "and/or") for v in values]
                return every(parts) if isinstance(op, ast.And) else some(parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Not(self.formula(self.value(operand, names), "not"))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.arithmetic("-", operator.sub, 0, self.value(operand, names))
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return self.divide(self.value(left, names), self.value(right, names))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
                return self.arithmetic(*BINARY[type(op)], self.value(left, names), self.value(right, names))
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                values = [self.value(v, names) for v in (left, *comparators)]
                found = [self.compare(op, a, b) for op, a, b in zip(ops, values, values[1:], strict=False)]
                return found[0] if len(found) == 1 else every(found)
            case ast.ListComp(elt=elt, generators=loops) | ast.GeneratorExp(elt=elt, generators=loops):
                return [self.value(elt, scope) for scope in self.scopes(loops, names)]
            case ast.DictComp(key=key, value=value, generators=loops):
                return {self.value(key, s): self.value(value, s) for s in self.scopes(loops, names)}
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
                return self.call(name, [self.value(a, names) for a in args])
            case ast.Call(func=ast.Name(id=name)) if name not in FUNCTIONS:
                raise self.error(unknown("function", name, FUNCTIONS))
        raise self.error(f"{ast.unparse(node)!r} is not part of the claim language")

    def scopes(self, loops: list[ast.comprehension], names: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not loops:
            yield names
            return
        first, *rest = loops
        items = self.value(first.iter, names)
        if not isinstance(items, list | tuple):
            raise self.error(f"{ast.unparse(first.iter)!r} is no list to go through")
        for item in items:
            scope = {**names, **self.bind(first.target, item)}
            tests = [self.formula(self.value(test, scope), "if") for test in first.ifs]
            if any(not isinstance(test, Const) for test in tests):
                raise self.error("a loop cannot choose by a cell; write the comparison into the claim itself")
            if all(test.truth for test in tests):
                yield from self.scopes(rest, scope)

    def bind(self, target: ast.AST, item: Any) -> dict[str, Any]:
        match target:
            case ast.Name(id=name):
                return {name: item}
            case ast.Tuple(elts=targets) if isinstance(item, list | tuple) and len(item) == len(targets):
                return {k: v for t, i in zip(targets, item, strict=True) for k, v in self.bind(t, i).items()}
        raise self.error(f"{ast.unparse(target)!r} cannot take {item!r}")

    def call(self, name: str, values: list[Any]) -> Any:
        try:
            return FUNCTIONS[name](self, *values)
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise self.error(f"{name}(): {error}") from None

    # -- cells and arithmetic ----

    def cell(self, name: str, index: Any) -> Quantity:
        if name not in self.tables:
            raise self.error(unknown("exhibit", name, self.tables))
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, str) for part in parts):
            raise self.error(f"{name}[...] takes the labels of a row and a column, not {index!r}")
        key: Key = (name, index)
        text = self.tables[name].get(index, "")
        value = number(text)
        printed = None if value is None else (value, half_a_digit(text))
        label = f"{name}[{', '.join(parts)}]"
        return Quantity(label, frozenset([key]), lambda numbers: numbers[key], key=key, printed=printed)

    def quantity(self, value: Any) -> Quantity:
        if isinstance(value, Quantity):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{_said(value)} is no number")
        return Quantity(f"{value:g}", frozenset(), lambda numbers: value)

    def arithmetic(self, sign: str, operation: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
        if isinstance(a, str) and isinstance(b, str) and sign == "+":
            return a + b
        if isinstance(a, Extreme) or isinstance(b, Extreme):
            return self.shifted(sign, operation, a, b)
        left, right = self.quantity(a), self.quantity(b)
        if not left.cells and not right.cells:
            try:
                return operation(a, b)
            except OverflowError as error:
                raise self.error(str(error)) from None
        return Quantity(
            f"({left.text} {sign} {right.text})",
            left.cells | right.cells,
            lambda numbers: operation(left.value(numbers), right.value(numbers)),
            left.drawn or right.drawn,
        )

    def shifted(self, sign: str, operation: Callable[[Any, Any], Any], a: Any, b: Any) -> Extreme:
        """min and max under + and -, and under a factor that is a number."""
        extreme, other, first = (a, b, True) if isinstance(a, Extreme) else (b, a, False)
        if isinstance(other, Extreme):
            raise self.error("arithmetic between two of min, max and abs; compare their members one by one")
        flips = sign == "-" and not first
        if sign == "*":
            if isinstance(other, Quantity):
                raise self.error("min, max or abs times a cell; compare its members one by one")
            flips = self.quantity(other).value({}) < 0
        of = {"min": "max", "max": "min"}[extreme.of] if flips else extreme.of
        arguments = [(member, other) if first else (other, member) for member in extreme.members]
        return Extreme(of, tuple(self.arithmetic(sign, operation, *pair) for pair in arguments))

    def divide(self, a: Any, b: Any) -> Any:
        if isinstance(a, Extreme) and isinstance(b, int | float) and b:
            return self.shifted("*", operator.mul, a, 1 / b)
        if isinstance(a, Extreme) or isinstance(b, Extreme):
            raise self.error("min, max or abs in a quotient; compare its members one by one")
        left, right = self.quantity(a), self.quantity(b)
        if not right.cells and right.value({}) == 0:
            raise self.error("division by zero")
        if not left.cells and not right.cells:
            return a / b

        def value(numbers: Any) -> Any:
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.divide(left.value(numbers), right.value(numbers))

        return Quantity(f"{left.text} / {right.text}", left.cells | right.cells, value, left.drawn or right.drawn)

    # -- truth ----

    def formula(self, value: Any, where: str) -> Formula:
        if isinstance(value, bool):
            return Const(value)
        if isinstance(value, Formula):
            return value
        raise self.error(f"{where} takes something true or false, not {_said(value)}")

    def compare(self, op: ast.cmpop, a: Any, b: Any) -> Formula:
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(b, list | tuple):
                raise self.error(f"`in` takes a list, not {_said(b)}")
            inside = some([Const(False), *(self.equal(a, item) for item in b)])
            inside = Const(inside.at(_NOTHING)) if not any(True for _ in inside.leaves()) else inside
            return self.negated(inside) if isinstance(op, ast.NotIn) else inside
        if type(op) not in RELATIONS:
            raise self.error("`is` is not part of the claim language")
        sign, operation = RELATIONS[type(op)]
        if sign == "==":
            return self.equal(a, b)
        if sign == "!=":
            return self.negated(self.equal(a, b))
        if _plain(a) and _plain(b):
            try:
                return Const(bool(operation(a, b)))
            except TypeError as error:
                raise self.error(str(error)) from None
        if sign in MIRRORED:
            sign, a, b = MIRRORED[sign], b, a
        return self.ordered(sign, a, b)

    def negated(self, formula: Formula) -> Formula:
        return Const(not formula.truth) if isinstance(formula, Const) else Not(formula)

    def ordered(self, sign: str, a: Any, b: Any) -> Formula:
        """a < b or a <= b, each pair alone: below the least is below all, below the largest is below any."""
        if isinstance(a, Extreme):
            return (every if a.of == "max" else some)([self.ordered(sign, member, b) for member in a.members])
        if isinstance(b, Extreme):
            return (every if b.of == "min" else some)([self.ordered(sign, a, member) for member in b.members])
        left, right = self.quantity(a), self.quantity(b)
        if not left.cells and not right.cells:
            low, high = left.value({}), right.value({})
            return Const(low < high if sign == "<" else low <= high)
        return self.leaf(sign, left, right)

    def leaf(self, sign: str, left: Quantity, right: Quantity) -> Formula:
        return Comparison(left.cells | right.cells, f"{left.text} {sign} {right.text}", sign, left, right)

    def equal(self, a: Any, b: Any) -> Formula:
        if isinstance(b, Choice):
            a, b = b, a
        if isinstance(a, Choice):
            return self.chosen(a, b)
        if isinstance(a, list | tuple) and isinstance(b, list | tuple):
            if len(a) != len(b):
                return Const(False)
            parts = [self.equal(x, y) for x, y in zip(a, b, strict=True)]
            plain = all(isinstance(part, Const) for part in parts)
            return Const(all(part.truth for part in parts)) if plain else every(parts)
        if _plain(a) and _plain(b):
            return Const(a == b)
        if isinstance(a, Formula | bool) and isinstance(b, Formula | bool):
            first, second = self.formula(a, "=="), self.formula(b, "==")
            if isinstance(second, Const):
                return first if second.truth else self.negated(first)
            return some([every([first, second]), every([Not(first), Not(second)])])
        if isinstance(a, Extreme):
            a, b = b, a
        if isinstance(b, Extreme):
            others = [member for member in b.members if member != a]
            bounds = [self.ordered("<=", *((a, m) if b.of == "min" else (m, a))) for m in others]
            # The least of some that it is one of: it is below the others. Else it also equals one of them.
            return every(
                bounds if len(others) < len(b.members) else [*bounds, some([self.equal(a, m) for m in others])]
            )
        return self.leaf("==", self.quantity(a), self.quantity(b))

    def chosen(self, choice: Choice, label: Any) -> Formula:
        if label not in choice.members:
            known = [str(member) for member in choice.members]
            raise self.error(f"arg{choice.of}: {unknown('label', str(label), known)}")
        mine = choice.members[label]
        others = [value for name, value in choice.members.items() if name != label]
        return every([self.ordered("<", *((mine, o) if choice.of == "min" else (o, mine))) for o in others])


class _Nothing(dict):
    """No numbers: for formulas that read none."""


_NOTHING: Any = type("Empty", (), {"numbers": _Nothing(), "diverged": _Nothing()})()


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return isinstance(value, bool | int | float | str)


def _said(value: Any) -> str:
    return value.text if isinstance(value, Quantity) else f"a {type(value).__name__} ({value!r})"[:80]


# -- functions ----


def _list(reader: _Reader, name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise reader.error(f"{name}() takes a list that is not empty")
    return list(value)


def _extreme(of: str) -> Callable[..., Any]:
    def function(reader: _Reader, *values: Any) -> Any:
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


def _abs(reader: _Reader, value: Any) -> Any:
    if isinstance(value, int | float):
        return abs(value)
    return Extreme("max", (reader.quantity(value), reader.arithmetic("-", operator.sub, 0, value)))


def _sum(reader: _Reader, values: Any) -> Any:
    total: Any = 0
    for value in _list(reader, "sum", values):
        total = reader.arithmetic("+", operator.add, total, value) if not _is_zero(total) else value
    return total


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0


def _mean(reader: _Reader, values: Any) -> Any:
    return reader.divide(_sum(reader, values), len(values))


def _trend(sign: str) -> Callable[..., Formula]:
    def function(reader: _Reader, values: Any) -> Formula:
        pairs = itertools.pairwise(_list(reader, "increasing or decreasing", values))
        return every([reader.ordered("<", *((a, b) if sign == "<" else (b, a))) for a, b in pairs])

    return function


def _joined(join: Callable[[list[Formula]], Formula], name: str) -> Callable[..., Formula]:
    def function(reader: _Reader, values: Any) -> Formula:
        parts = [reader.formula(value, name) for value in _list(reader, name, values)]
        if all(isinstance(part, Const) for part in parts):
            return Const(join(parts).at(_NOTHING))
        return join(parts)

    return function


def _div(reader: _Reader, cell: Any) -> Formula:
    if not isinstance(cell, Quantity) or cell.key is None:
        raise reader.error("div() takes a cell, such as div(M1['Post-LN','LLaMA-1B'])")
    return Outcome(cell.cells, f"div({cell.text})", cell.key)


def _as_printed(reader: _Reader, cell: Any) -> Formula:
    if not isinstance(cell, Quantity) or cell.key is None or cell.printed is None:
        raise reader.error("as_printed() takes a cell that the paper prints as a number")
    value, half = cell.printed
    return reader.ordered("<=", _abs(reader, reader.arithmetic("-", operator.sub, cell, value)), half)


def _round(reader: _Reader, value: Any, digits: Any = 0) -> Any:
    if isinstance(value, int | float):
        return round(value, digits)
    inner = reader.quantity(value)
    return Quantity(
        f"round({inner.text}, {digits})", inner.cells, lambda n: np.round(inner.value(n), digits), drawn=True
    )


def _rank_correlation(reader: _Reader, first: Any, second: Any) -> Any:
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


def _significant(reader: _Reader, for_it: Any, against_it: Any) -> Formula:
    first, second = reader.quantity(for_it), reader.quantity(against_it)
    return Tested(first.cells | second.cells, f"significant({first.text}, {second.text})", first, second)


def _argument(of: str) -> Callable[..., Choice]:
    def function(reader: _Reader, members: Any) -> Choice:
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
