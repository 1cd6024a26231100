"""The language of claims: read without executing anything, into a formula over cells.

Comparisons, arithmetic, and/or/not, literals, comprehensions and functions (paperlm.tables.claims.functions);
`M1['Mix-LN','LLaMA-130M']` is a cell of the exhibit that calls itself M1 in claims.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from paperlm.errors import SpecError, unknown
from paperlm.tables.claims.formula import Const, Formula, Not, every, some
from paperlm.tables.claims.functions import FUNCTIONS
from paperlm.tables.claims.values import Values

STEPS = 100_000
"Evaluations of a node after which a claim is refused: no claim needs a hundredth of them."
BINARY = {ast.Add: ("+", operator.add), ast.Sub: ("-", operator.sub), ast.Mult: ("*", operator.mul)}


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
    try:
        formula = reader.formula(reader.value(parse_claim(text), dict(names or {})), "a claim")
    except RecursionError:  # some versions of Python parse what is nested deeper than they evaluate
        raise SpecError(f"claim {text[:80]!r}...: it is nested too deeply; write it flatter") from None
    if not any(True for _ in formula.leaves()):
        raise SpecError(f"claim {text!r}: it reads no cell; say which, as in M1['Mix-LN','LLaMA-130M']")
    return formula


class _Reader(Values):
    def __init__(self, text: str, tables: Mapping[str, Mapping[Any, str]]) -> None:
        super().__init__(text, tables)
        self.steps = 0

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
