"""The verdict on a claim, as a whole and in its parts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paperlm.tables.claims.decide import ALPHA, Decision, Judge
from paperlm.tables.claims.formula import Comparison, Formula, Key, Leaf, every
from paperlm.tables.claims.language import read
from paperlm.tables.claims.samples import Cells, at_seed, common_seeds

HOLDS, FAILS, UNDECIDED, NOT_TESTED = "holds", "fails", "undecided", "not tested"


@dataclass(frozen=True)
class Verdict:
    """What a claim, or a part of it, comes to."""

    verdict: str
    part: str = ""
    "values of the loop variables; empty: the whole"
    reason: str = ""
    comparisons: int = 0
    "that share the level"
    margin: float | None = None
    "gap of the comparison that is hardest to decide, left less right"
    detectable: float | None = None
    "smallest gap that its seeds could have decided"
    hardest: str = ""
    "that comparison"
    per_seed: tuple[bool, ...] = ()
    "truth for each seed that all cells have"
    missing: tuple[Key, ...] = ()
    "cells that were not run"
    open_cells: Mapping[Key, int] = field(default_factory=dict)
    "cells of comparisons that are open for their noise -> seeds that would decide them if the numbers stayed"
    parts: tuple[Verdict, ...] = ()


def parts_of(for_each: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Each combination of the loop variables of a claim."""
    for values in itertools.product(*for_each.values()):
        yield dict(zip(for_each, values, strict=True))


def label_of(names: Mapping[str, Any]) -> str:
    """How a part is called."""
    return ", ".join(map(str, names.values()))


def judge(
    expression: str,
    cells: Cells,
    tables: Mapping[str, Mapping[Any, str]],
    for_each: Mapping[str, Sequence[Any]] | None = None,
    seed: str = "",
) -> Verdict:
    """Verdict on a claim. `tables`: name in claims -> cell -> printed text; `for_each`: loop variables -> their values.

    holds, fails: the formula is true or false whatever its open comparisons are; else not tested if a cell that it
    needs was not run, else undecided. A part is judged by its own comparisons, the whole by all of them together.
    Raises SpecError for anything outside the language.
    """
    if not for_each:
        return _judged(read(expression, tables), cells, seed)
    named = [(label_of(names), read(expression, tables, names)) for names in parts_of(for_each)]
    parts = tuple(_judged(formula, cells, f"{seed} {label}", label) for label, formula in named)
    whole = _judged(every([formula for _, formula in named]), cells, seed)
    counted = Counter(part.verdict for part in parts)
    others = [f"{n} {word}" for word, n in counted.items() if word not in (HOLDS, FAILS)]
    failed = [f"fails in {counted[FAILS]}"] if counted[FAILS] else []
    reach = ", ".join([f"holds in {counted[HOLDS]} of {len(parts)}", *failed, *others])
    reason = "; ".join(filter(None, (reach, whole.reason)))
    return Verdict(**{**vars(whole), "reason": reason, "parts": parts})


def _judged(formula: Formula, cells: Cells, seed: str, part: str = "") -> Verdict:
    leaves = list(dict.fromkeys(formula.leaves()))
    share = sum(not (isinstance(leaf, Comparison) and leaf.same) for leaf in leaves)
    judge_ = Judge(cells, ALPHA / max(1, share), seed)
    truth = formula.decide(judge_)
    for leaf in leaves:
        judge_(leaf)
    decisions = judge_.decisions
    needed = _unsettled(formula, decisions) if truth is None else {}
    missing = tuple(sorted({key for d in needed.values() for key in d.missing}))
    verdict = {True: HOLDS, False: FAILS}.get(truth, NOT_TESTED if missing else UNDECIDED)
    hardest, decision = _hardest(formula, decisions, truth)
    if missing:
        reason = f"not run: {'; '.join(map(name_of, missing))}"
    elif truth is None:
        reason = "; ".join(dict.fromkeys(d.reason for d in needed.values() if d.reason))
    else:
        reason = ""
    return Verdict(
        verdict,
        part,
        reason,
        comparisons=share,
        margin=decision.gap if decision else None,
        detectable=decision.detectable if decision else None,
        hardest=hardest.text if hardest else "",
        per_seed=_per_seed(formula, cells),
        missing=missing,
        open_cells=_more_seeds(needed),
    )


def name_of(key: Key) -> str:
    """`M1[Pre-LN, LLaMA-1B]`."""
    return f"{key[0]}[{', '.join(key[1]) if isinstance(key[1], tuple) else key[1]}]"


def _unsettled(formula: Formula, decisions: Mapping[Leaf, Decision]) -> dict[Leaf, Decision]:
    """Open leaves on which an open formula hangs: it would be settled, or another one, if they were answered."""
    return {leaf: decisions[leaf] for leaf in dict.fromkeys(_open_leaves(formula, decisions))}


def _open_leaves(formula: Formula, decisions: Mapping[Leaf, Decision]) -> Iterator[Leaf]:
    """Those in its open parts, and in the open parts of these: what is behind a settled one makes no difference."""
    if formula.decide(lambda leaf: decisions[leaf].truth) is not None:
        return
    if isinstance(formula, Leaf):
        yield formula
    for part in formula.within:
        yield from _open_leaves(part, decisions)


def _hardest(
    formula: Formula, decisions: Mapping[Leaf, Decision], truth: bool | None
) -> tuple[Leaf | None, Decision | None]:
    """The comparison that a reader should look at: of an open claim the one that is furthest from decided; of a decided
    one the narrowest of those without which it would be open, else the clearest."""
    answers = {leaf: decision.truth for leaf, decision in decisions.items()}
    compared = {leaf: d for leaf, d in decisions.items() if isinstance(leaf, Comparison) and d.gap is not None}
    by_sharpness = lambda item: item[1].sharpness  # noqa: E731
    if truth is None:
        hanging = {leaf: d for leaf, d in _unsettled(formula, decisions).items() if leaf in compared}
        return min(hanging.items(), key=by_sharpness, default=(None, None))
    decided = {leaf: d for leaf, d in compared.items() if d.truth is not None}
    carrying = {leaf: d for leaf, d in decided.items() if formula.decide({**answers, leaf: None}.get) is None}
    if carrying:
        return min(carrying.items(), key=by_sharpness)
    # Several comparisons settle it, each alone: those that go its way are the ones that refute or confirm.
    alone = {leaf: d for leaf, d in decided.items() if _settles(formula, answers, leaf, truth)}
    return max((alone or decided).items(), key=by_sharpness, default=(None, None))


def _settles(formula: Formula, answers: Mapping[Leaf, bool | None], leaf: Leaf, truth: bool) -> bool:
    """Whether this leaf settles the formula when nothing is known of the others."""
    return formula.decide({**dict.fromkeys(answers), leaf: answers[leaf]}.get) is truth


def _more_seeds(needed: Mapping[Leaf, Decision]) -> dict[Key, int]:
    """Cells of the open comparisons -> seeds that would decide them."""
    found: dict[Key, int] = {}
    for leaf, decision in needed.items():
        for key in leaf.reads if not decision.missing else ():
            found[key] = max(found.get(key, 0), decision.enough)
    return found


def _per_seed(formula: Formula, cells: Cells) -> tuple[bool, ...]:
    reads = formula.cells
    if any(key not in cells for key in reads):
        return ()
    mine = {key: cells[key] for key in reads}
    return tuple(formula.at(at_seed(mine, seed)) for seed in common_seeds([*mine.values()]))
