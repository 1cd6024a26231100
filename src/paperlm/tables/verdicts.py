"""Rows of <table or figure>.claims.csv: the verdict on each claim and each part of it, what would decide an open one,
and whether the printed numbers satisfy it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from paperlm.plan.exhibit import ClaimSpec
from paperlm.plan.paper import PaperSpec
from paperlm.plan.project import Project
from paperlm.tables.claims import (
    CellSamples,
    Key,
    PairedGap,
    Point,
    PrintedCell,
    Verdict,
    judge,
    paired_gap,
    parts_of,
    read,
)
from paperlm.tables.claims.formula import Comparison, Formula
from paperlm.tables.claims.judge import NOT_TESTED, label_of, name_of
from paperlm.tables.contents import Contents
from paperlm.tables.needs import Evidence

CLAIM_COLUMNS = [
    "claim", "part", "says", "scale", "verdict", "margin", "detectable", "hardest", "comparisons", "true_in_seeds",
    "reason", "would_decide", "holds_in_print", "print_within_evaluation_noise", "expression",
]  # fmt: skip

Others = Callable[[str], Contents]
"Contents of another exhibit that a claim reads."


class Reading:
    """What the claims of an exhibit read: its own cells, and those of other exhibits."""

    def __init__(self, project: Project, name: str, contents: Contents, others: Others | None = None) -> None:
        self.project, self.name, self.own = project, name, contents
        read_ = project.reads(name)
        self.exhibits = {short: other for short, other in project.called(name).items() if other in read_}
        self.contents = {name: contents}
        if others is not None:
            self.contents |= {other: others(other) for other in read_[1:]}
        self.cells: dict[Key, CellSamples] = {}
        self.printed: dict[Key, PrintedCell] = {}
        self.tables: dict[str, dict[Any, str]] = {}
        self._paired: dict[tuple[Key, Key], PairedGap | None] = {}
        for short, exhibit in self.exhibits.items():
            found = self.contents.get(exhibit)
            self.cells |= {(short, key): sample for key, sample in (found.samples if found else {}).items()}
            self.printed |= {(short, key): cell for key, cell in (found.printed if found else {}).items()}
            self.tables[short] = {key: cell.text for key, cell in (found.printed if found else {}).items()}

    def is_of_earlier_rules(self, key: Key) -> bool:
        """Whether a cell of a table that a claim reads, its own or another's, has a record of earlier rules. Statistics
        of figures do not say so."""
        contents = self.contents.get(self.exhibits[key[0]])
        return contents is not None and key[1] in contents.drifted_cells

    def untestable(self, claim: ClaimSpec) -> str:
        """Why a claim cannot be judged on the cells that it reads, with their rows; empty: it can."""
        reasons: dict[str, dict[str, None]] = {}
        for exhibit, key in sorted(_formula(self, claim, {}).cells):
            contents = self.contents.get(self.exhibits[exhibit])
            if contents is not None and key in contents.untested_cells:
                reasons.setdefault(contents.untested_cells[key], {})[key[0]] = None
        return "; ".join(f"{reason}: {', '.join(rows)}" for reason, rows in reasons.items())

    def paired(self, left: Key, right: Key) -> PairedGap | None:
        """Two cells on the same items; None where a record of them keeps none. Claims on one pair say the same."""
        if (left, right) not in self._paired:
            both = [self.cells[key].scores if key in self.cells else {} for key in (left, right)]
            self._paired[left, right] = paired_gap(*both, seed=f"{name_of(left)} less {name_of(right)}")
        return self._paired[left, right]

    def formula(self, claim: ClaimSpec, names: Mapping[str, Any] | None = None) -> Formula:
        """Of a claim, or of one of its parts. Raises SpecError."""
        return read(claim.expression, self.tables, names)


def claim_rows(project: Project, name: str, contents: Contents, others: Others | None = None) -> list[dict[str, Any]]:
    """Lines of <name>.claims.csv: one for each claim, and one for each part of it."""
    paper, exhibit = project.exhibit(name)
    reading, evidence = Reading(project, name, contents, others), Evidence(project)
    scale = contents.scale if contents.diff else project.scale.scale
    rows = []
    for claim in exhibit.claims:
        whole = judged(reading, paper, claim)
        named = [({}, whole), *zip(parts_of(claim.for_each), whole.parts, strict=False)]
        for names, verdict in named:
            rows.append(
                {
                    "claim": claim.id,
                    "part": verdict.part,
                    "says": claim.says,
                    "scale": scale,
                    "verdict": verdict.verdict,
                    "margin": "" if verdict.margin is None else f"{verdict.margin:+.4g}",
                    "detectable": "" if verdict.detectable is None else f"{verdict.detectable:.3g}",
                    "hardest": verdict.hardest,
                    "comparisons": verdict.comparisons or "",
                    "true_in_seeds": f"{sum(verdict.per_seed)} of {len(verdict.per_seed)}" if verdict.per_seed else "",
                    "reason": _reason(reading, claim, verdict, names, whole),
                    "would_decide": evidence.sentence(reading.exhibits, verdict),
                    "holds_in_print": _in_print(reading, claim, names),
                    "print_within_evaluation_noise": _word(fragile_in_print(reading, claim, names)),
                    "expression": claim.expression,
                }
            )
    return rows


def judged(reading: Reading, paper: PaperSpec, claim: ClaimSpec) -> Verdict:
    """The verdict on a claim, unless its scale or its exhibit says why it cannot be judged."""
    project, contents = reading.project, reading.own
    rule, exceptions = project.scale.claims, project.changes(paper).except_

    def not_tested(reason: str) -> Verdict:
        parts = tuple(Verdict(NOT_TESTED, label_of(names), reason) for names in parts_of(claim.for_each) if names)
        return Verdict(NOT_TESTED, reason=reason, parts=parts)

    if claim.of_print:
        return not_tested(f"about the print: {claim.of_print}")
    if contents.untested and not _within(reading, claim):
        return not_tested(contents.untested)
    if reason := reading.untestable(claim):
        return not_tested(reason)
    if contents.depends_on_scale:
        if rule.judge == "none":
            return not_tested(f"scale {project.scale.scale}: {rule.why}")
        if claim.only_at and project.scale.scale not in claim.only_at.scales:
            return not_tested(f"scale {project.scale.scale}: {claim.only_at.why}")
        if claim.id in exceptions:
            return not_tested(f"scale {project.scale.scale}: {exceptions[claim.id]}")
    if claim.given is not None:
        condition = judge(claim.given.expression, reading.cells, reading.tables, seed=f"{claim.id} given")
        if condition.verdict != "holds":
            return not_tested(condition.reason or claim.given.why)
    return judge(claim.expression, reading.cells, reading.tables, claim.for_each, seed=claim.id)


def _reason(reading: Reading, claim: ClaimSpec, verdict: Verdict, names: Mapping[str, Any], whole: Verdict) -> str:
    """Why it is open, that it rests on one seed or on runs that diverged, earlier rules, numbers that a figure's claim
    reads, the claim's note. What the whole says its parts do not repeat."""
    formula = _formula(reading, claim, names)
    paired = [] if verdict.parts or claim.of_print else _paired(reading, formula)
    if verdict.verdict == NOT_TESTED:
        return "; ".join(filter(None, [verdict.reason, *paired]))
    keys = sorted(key for key in formula.cells if key in reading.cells)
    said = [verdict.reason, *paired]
    read, of_outcomes = {key: reading.cells[key] for key in keys}, "div(" in claim.expression
    if not verdict.part or whole.verdict == NOT_TESTED:
        said += _rests_on(read, reading.own, of_outcomes)
    elif not of_outcomes:
        said += _diverged(read)
    if earlier := sorted({key[1][0] for key in keys if reading.is_of_earlier_rules(key)}):
        said.append(f"rests on records of earlier rules: {', '.join(earlier)}")
    if reading.name in reading.project.figures and not verdict.parts:
        said.append("; ".join(f"{_cell_of(key)}: {statistics.fmean(reading.cells[key].values):.4g}" for key in keys))
    return "; ".join(filter(None, [*said, "" if verdict.part else claim.note]))


def _rests_on(cells: Mapping[Key, CellSamples], contents: Contents, of_outcomes: bool) -> list[str]:
    """What a verdict on these cells rests on: one run a cell, times of several measurements, and, unless it is about
    outcomes, runs that diverged."""
    said = []
    if len(runs := sorted({cell.run for cell in cells.values() if cell.run})) > 1:
        said.append(f"times that were not measured in one run: {'; '.join(runs)}")
    if any(len(c.values) == 1 and not (c.constant or c.hashes) and c.measured for c in cells.values()):
        said.append(contents.one_sample)
    return said if of_outcomes else said + _diverged(cells)


def _diverged(cells: Mapping[Key, CellSamples]) -> list[str]:
    """Which of them diverged, in how many of their runs: one that did can decide a claim about numbers."""
    found = {_cell_of(key): cell.diverged for key, cell in cells.items() if any(cell.diverged)}
    counts = [f"{cell} ({sum(runs)} of {len(runs)})" for cell, runs in found.items()]
    return [f"diverged: {', '.join(counts)}"] if counts else []


MOST_PAIRED = 3
"Pairs of cells of a claim, or of a part of it, up to which each is said."


def _paired(reading: Reading, formula: Formula) -> list[str]:
    """The two cells of each comparison that reads no others, on the same items, where the records keep them."""
    pairs = []
    for leaf in formula.leaves():
        if isinstance(leaf, Comparison) and len(leaf.reads) == 2:
            pair = sorted(leaf.reads, key=lambda key: leaf.text.index(name_of(key)))
            pairs += [pair] if pair not in pairs and pair[::-1] not in pairs else []
    found = [(pair, gap) for pair in pairs if (gap := reading.paired(*pair))] if len(pairs) <= MOST_PAIRED else []
    return [f"{' less '.join(_apart(*pair))}: {gap}" for pair, gap in found]


def _apart(left: Key, right: Key) -> list[str]:
    """What tells two cells from each other: their rows in one column, their columns in one row."""
    apart = [n for n in (0, 1) if left[1][n] != right[1][n] or left[0] != right[0]]
    return [", ".join(key[1][n] for n in apart if key[1][n]) for key in (left, right)]


def _formula(reading: Reading, claim: ClaimSpec, names: Mapping[str, Any]) -> Formula:
    """Of a part, or of all parts together."""
    from paperlm.tables.claims.formula import every

    if names or not claim.for_each:
        return reading.formula(claim, names)
    return every([reading.formula(claim, each) for each in parts_of(claim.for_each)])


def _printed_formula(reading: Reading, claim: ClaimSpec, names: Mapping[str, Any]) -> Formula:
    if claim.expression_in_print:
        return read(claim.expression_in_print, reading.tables)
    return _formula(reading, claim, names)


def _cell_of(key: Key) -> str:
    return ", ".join(key[1]) if isinstance(key[1], tuple) else str(key[1])


def _word(truth: bool | None) -> str:
    return "" if truth is None else str(truth).lower()


def _within(reading: Reading, claim: ClaimSpec) -> bool:
    """Whether a claim reads nothing but columns that can be judged in a table which is otherwise untested."""
    keys = _formula(reading, claim, {}).cells
    found = all(key in reading.cells for key in keys)
    return found and all(key[1][1] in reading.own.judged_columns for key in keys)


def holds_in_print(reading: Reading, claim: ClaimSpec, names: Mapping[str, Any] | None = None) -> bool | None:
    """Whether the printed numbers satisfy a claim or a part of it; None if it reads a cell that is not printed."""
    formula = _printed_formula(reading, claim, names or {})
    if any(key not in reading.printed for key in formula.cells):
        return None
    return formula.at(_printed_point(reading.printed))


def _in_print(reading: Reading, claim: ClaimSpec, names: Mapping[str, Any]) -> str:
    """What the printed numbers say, else what a look at the printed picture does: `by eye: true`."""
    truth, seen = holds_in_print(reading, claim, names), claim.by_eye
    # a picture that satisfies the whole satisfies each part; which part another one misses, it was not asked
    if truth is None and seen and (seen.holds or not names):
        return f"by eye: {_word(seen.holds)}"
    return _word(truth)


def fragile_in_print(reading: Reading, claim: ClaimSpec, names: Mapping[str, Any] | None = None) -> bool | None:
    """True if moving printed cells by what the evaluation alone can change (`print_noise`, relative) changes the
    claim's truth in the print; None if it has none.

    Each cell the claim reads is moved alone, up and down, so that a gap changes by the whole noise.
    """
    truth, noise = holds_in_print(reading, claim, names), reading.own.print_noise
    if truth is None or not noise:
        return None
    formula = _printed_formula(reading, claim, names or {})
    for key in formula.cells:
        cell = reading.printed[key]
        for factor in (1 - noise, 1 + noise):
            moved = dataclasses.replace(cell, value=cell.value * factor)
            if formula.at(_printed_point({**reading.printed, key: moved})) != truth:
                return True
    return False


def _printed_point(printed: Mapping[Key, PrintedCell]) -> Point:
    return Point({k: c.value for k, c in printed.items()}, {k: c.diverged for k, c in printed.items()})
