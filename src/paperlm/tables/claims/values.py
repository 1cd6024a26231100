"""What expressions of claims come to: arithmetic over cells and numbers, and comparisons of them as formulas."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paperlm.errors import SpecError, unknown
from paperlm.tables.claims.formula import Comparison, Const, Extreme, Formula, Key, Not, Quantity, every, some
from paperlm.tables.published import half_a_digit, number

RELATIONS = {
    ast.Lt: ("<", operator.lt), ast.LtE: ("<=", operator.le), ast.Gt: (">", operator.gt), ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq), ast.NotEq: ("!=", operator.ne),
}  # fmt: skip
MIRRORED = {">": "<", ">=": "<="}


class Choice:
    """`argmin({label: quantity})` or argmax: comparable with a label only."""

    def __init__(self, of: str, members: Mapping[Any, Any]) -> None:
        self.of, self.members = of, members


class Values:
    """Operations on the values of one claim; `tables`: name in claims -> cell -> what is printed there."""

    def __init__(self, text: str, tables: Mapping[str, Mapping[Any, str]]) -> None:
        self.text, self.tables = text, tables

    def error(self, message: str) -> SpecError:
        """The error of this claim."""
        return SpecError(f"claim {self.text!r}: {message}")

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
            raise self.error(f"{said(value)} is no number")
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
        raise self.error(f"{where} takes something true or false, not {said(value)}")

    def compare(self, op: ast.cmpop, a: Any, b: Any) -> Formula:
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(b, list | tuple):
                raise self.error(f"`in` takes a list, not {said(b)}")
            inside = some([Const(False), *(self.equal(a, item) for item in b)])
            inside = Const(inside.at(NOTHING)) if not any(True for _ in inside.leaves()) else inside
            return self.negated(inside) if isinstance(op, ast.NotIn) else inside
        if type(op) not in RELATIONS:
            raise self.error("`is` is not part of the claim language")
        sign, operation = RELATIONS[type(op)]
        if sign == "==":
            return self.equal(a, b)
        if sign == "!=":
            return self.negated(self.equal(a, b))
        if plain(a) and plain(b):
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
            settled = all(isinstance(part, Const) for part in parts)
            return Const(all(part.truth for part in parts)) if settled else every(parts)
        if plain(a) and plain(b):
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


NOTHING: Any = type("Empty", (), {"numbers": _Nothing(), "diverged": _Nothing()})()


def plain(value: Any) -> bool:
    """Whether it reads no cell: a number, a word, a truth, or a list of these."""
    if isinstance(value, list | tuple):
        return all(map(plain, value))
    return isinstance(value, bool | int | float | str)


def said(value: Any) -> str:
    """How a message calls it."""
    return value.text if isinstance(value, Quantity) else f"a {type(value).__name__} ({value!r})"[:80]
