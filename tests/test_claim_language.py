"""The language of claims: what it computes, what it refuses, and that it executes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from support_claims import at

from paperlm.errors import SpecError
from paperlm.tables.claims import read
from paperlm.tables.claims.functions import rank_correlation
from paperlm.tables.claims.language import STEPS

NUMBERS = {("a", "x"): 1.0, ("a", "y"): 2.0, ("b", "x"): 3.0}


class Cell(float):
    """A number that knows whether its run diverged: the truth that Python's own eval computes with."""

    diverged = False


HELPERS = {
    "div": lambda c: c.diverged,
    "mean": lambda v: sum(v) / len(v),
    "increasing": lambda v: list(v) == sorted(set(v)),
    "decreasing": lambda v: list(v) == sorted(set(v), reverse=True),
    "argmin": lambda d: min(d, key=d.get),
    "argmax": lambda d: max(d, key=d.get),
}


@pytest.mark.parametrize(
    "text",
    [
        "M['a','x'] < M['b','x'] < 4",
        "M['b','x'] < M['a','x'] < 4",
        "all(M['a',c] <= 2 for c in ['x','y'])",
        "any(M['a',c] > 2 for c in ['x','y'])",
        "[div(M['a',c]) for c in ['x','y']] == [False, True]",
        "[div(M['a',c]) for c in ['x','y']] == [True, True]",
        "increasing([M['a','x'], M['a','y'], M['b','x']]) and not decreasing([M['a','x'], M['a','y']])",
        "1 - M['a','x']/M['a','y'] >= 0.5",
        "1 - M['a','x']/M['a','y'] > 0.5",
        "mean([M['a','x'], M['b','x']]) == 2",
        "sum([a * M['a','x'] for a,b in [(1,2),(3,4)] if a > 1]) == 3",
        "min([M[r,'x'] for r in ['a','b']]) == M['a','x']",
        "min([M[r,'x'] for r in ['a','b']]) == M['b','x']",
        "M['b','x'] == max(M[r,'x'] for r in ['a','b'])",
        "M['a','y'] == max(M[r,'x'] for r in ['a','b'])",
        "M['a','y'] + 1 == max(M[r,'x'] for r in ['a','b'])",
        "M['a','y'] != max(M[r,'x'] for r in ['a','b'])",
        "M['a','x'] != M['b','x']",
        "M['b','x'] != M['a','x']",
        "M['b','x'] != max(M[r,'x'] for r in ['a','b'])",
        "argmin({r: M[r,'x'] for r in ['a','b']}) != 'a'",
        "3 * M['a','x'] != M['b','x'] or 2 * M['a','x'] != M['b','x']",
        "3 * M['a','x'] != M['b','x']",
        "abs(M['a','x'] - M['b','x']) <= 2",
        "abs(M['a','x'] - M['b','x']) < 2",
        "abs(M['a','x'] - M['b','x']) >= 2 and abs(M['a','x'] - M['b','x']) > 1",
        "2 * abs(M['a','x'] - 3) - 1 <= 3",
        "-2 * abs(M['a','x'] - 3) < -3",
        "10 - max(M['a','x'], M['a','y']) >= 8",
        "M['a','x'] >= min(1, 0.5 * M['b','x'])",
        "-M['a','x'] < abs(-2) and 'z' not in ['x']",
        "argmin({r: M[r,'x'] for r in ['a','b']}) == 'a'",
        "argmin({r: M[r,'x'] for r in ['a','b']}) == 'b'",
        "argmax({'p': M['a','x'], 'q': M['a','y']}) in ['q', 'p']",
        "(M['a','x'] < M['a','y']) == (M['a','y'] < M['b','x'])",
        "(M['a','x'] < M['a','y']) == ('x' == 'y')",
        "round(M['b','x'] / 7, 2) == 0.43",
        "len([M['a','x'], 1]) == 2 and M['a','x'] in [1, 2]",
    ],
)
def test_the_claim_language_computes_what_python_would(text):
    table = {key: Cell(value) for key, value in NUMBERS.items()}
    table["a", "y"].diverged = True
    expected = eval(text, {**HELPERS, "M": table})  # noqa: S307 - the independent truth, on literals of this file
    assert at(text, NUMBERS, diverged=(("a", "y"),)) is expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("__import__('os')", "unknown function '__import__'"),
        ("M.__class__ == 1", "not part of the claim language"),
        ("(lambda: 1)() == M['a','x']", "not part of the claim language"),
        ("open('x') == M['a','x']", "unknown function 'open'"),
        ("M['a','x'", "was never closed"),
        ("f'{M}' == M['a','x']", "not part of the claim language"),
        ("min(M['a','x'], key=len) == 1", "not part of the claim language"),
        ("M['a','x'] ** 9 > 1", "not part of the claim language"),
        ("M['a','x'] / 0 > 1", "division by zero"),
        ("M['a','x'] > 'b'", "is no number"),
        ("M['a','x'] < 'b' + 1", "('b') is no number"),
        ("M['a','x'] < 1 + 'b'", "('b') is no number"),
        ("M['a','x'] < 'b' - 'c'", "('b') is no number"),
        ("M['a','x']", "a claim takes something true or false"),
        ("1 < 2", "reads no cell"),
        ("M[1] < 2", "labels of a row and a column"),
        ("N['a','x'] < 2", "unknown exhibit 'N'"),
        ("M['a',c] < 2", "unknown name 'c'"),
        ("mean([]) < M['a','x']", "a list that is not empty"),
        ("incresing([M['a','x'], 2])", "did you mean 'increasing'"),
        ("div(2)", "takes a cell"),
        ("as_printed(M['a','x'])", "a cell that the paper prints"),
        ("argmin({'a': M['a','x'], 'b': 2}) == 'c'", "unknown label 'c'"),
        ("[t for t in ['x'] if M['a',t] > 1] == ['x']", "a loop cannot choose by a cell"),
        ("max(M['a','x'], 1) / M['a','y'] < 2", "compare its members one by one"),
        ("rank_correlation([M['a','x'], 1], [1]) > 0", "2 and 1 numbers"),
        ("all(M['a','x'] < 1 for a in 'xy')", "no list"),
        ("M['a','x'] is 1", "`is` is not part"),
        ("increasing([a for a in [1] for b in [1] if M['a','x']])", "if takes something true or false"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_the_reason_and_not_executed(text, says):
    with pytest.raises(SpecError, match="claim") as error:
        at(text, NUMBERS)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "all(M['a','x'] < 1 " + "".join(f"for {c} in {list(range(9))} " for c in "abcdef") + ")",
        "M['a','x'] < " + "(" * 300 + "1" + ")" * 300,
        "M['a','x'] < " + "-" * 5000 + "1",
    ],
    ids=["loops", "brackets", "signs"],
)
def test_a_claim_that_would_exhaust_the_machine_is_refused_at_once(text):
    assert STEPS < 9**6
    with pytest.raises(SpecError, match="claim"):
        at(text, NUMBERS)


def test_rank_correlation_is_spearmans():
    from scipy.stats import spearmanr

    for a, b in (([1, 2, 3, 4], [9, 7, 8, 1]), ([1.5, 1.5, 2, 0], [3, 1, 2, 2]), ([5, 6, 7], [1, 2, 3])):
        assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert rank_correlation([1, 1], [1, 2]) == 0
    expected = spearmanr([1.0, 2.0, 3.0], [5.0, 4.0, 9.0]).statistic
    claim = "rank_correlation([M['a','x'], M['a','y'], M['b','x']], [5, 4, 9])"
    assert at(f"{claim} > {expected - 1e-9}", NUMBERS) and at(f"{claim} < {expected + 1e-9}", NUMBERS)


def test_as_printed_compares_with_the_printed_digits():
    printed = {"a": "1.16M", "b": "1.16M"}
    found = [at(f"as_printed(M['{k}'])", {"a": 1.164e6, "b": 1.166e6}, printed=printed) for k in "ab"]
    assert found == [True, False]


def test_a_quotient_with_zero_is_no_number_and_no_traceback():
    formula = read("M['a','x'] / M['b','x'] > 1", {"M": {}})
    (leaf,) = formula.leaves()
    assert np.isnan(leaf.gap({("M", ("a", "x")): 0.0, ("M", ("b", "x")): 0.0}))
