"""Rows of <table or figure>.claims.csv: the verdict on each claim, and whether the printed numbers satisfy it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from paperlm.plan.exhibit import ClaimSpec
from paperlm.plan.paper import PaperSpec
from paperlm.plan.project import Project
from paperlm.tables.claims import Cells, CellValue, Expression, MissingCell, Verdict, judge
from paperlm.tables.contents import Contents

CLAIM_COLUMNS = [
    "claim", "says", "scale", "verdict", "support", "seeds", "per_seed", "reason", "holds_in_print",
    "print_within_evaluation_noise", "expression",
]  # fmt: skip


def claim_rows(project: Project, name: str, contents: Contents) -> list[dict[str, Any]]:
    """A line of <name>.claims.csv for each claim of a table or figure; those of a figure say what numbers they read."""
    paper, table = project.exhibit(name)
    rows = []
    for claim in table.claims:
        verdict = _judged(project, paper, claim, table.claims_name, contents)
        tested = verdict.verdict != "not tested"
        numbers = numbers_read(claim, table.claims_name, contents) if tested and name in project.figures else ""
        reason = "; ".join(filter(None, (verdict.reason, numbers, claim.note if tested else "")))
        rows.append(
            {
                "claim": claim.id,
                "says": claim.says,
                "scale": contents.scale if contents.diff else project.scale.scale,
                "verdict": verdict.verdict,
                "support": "" if verdict.support is None else f"{verdict.support:.3f}",
                "seeds": len(verdict.per_seed),
                "per_seed": " ".join(str(v).lower() for v in verdict.per_seed),
                "reason": reason,
                "holds_in_print": _word(holds_in_print(claim, table.claims_name, contents.printed)),
                "print_within_evaluation_noise": _word(
                    fragile_in_print(claim, table.claims_name, contents.printed, contents.print_noise)
                ),
                "expression": claim.expression,
            }
        )
    return rows


def numbers_read(claim: ClaimSpec, table_name: str, contents: Contents) -> str:
    """`row, column: value` of each cell that a claim reads, with the mean over the seeds."""
    means = {key: CellValue(statistics.fmean(cell.values)) for key, cell in contents.samples.items()}
    read = sorted(key for _, key in Expression(claim.expression).cells({table_name: Cells(means)}))
    return "; ".join(f"{row}, {column}: {means[row, column]:.4g}" for row, column in read)


def _word(truth: bool | None) -> str:
    return "" if truth is None else str(truth).lower()


def _judged(project: Project, paper: PaperSpec, claim: ClaimSpec, table_name: str, contents: Contents) -> Verdict:
    rule, exceptions = project.scale.claims, project.changes(paper).except_
    if contents.untested and not _within(claim, table_name, contents):
        return Verdict("not tested", reason=contents.untested)
    if contents.depends_on_scale:
        if rule.judge == "none":
            return Verdict("not tested", reason=f"scale {project.scale.scale}: {rule.why}")
        if claim.id in exceptions:
            return Verdict("not tested", reason=f"scale {project.scale.scale}: {exceptions[claim.id]}")
    if claim.given is not None:
        condition = judge(claim.given.expression, table_name, contents.samples)
        if condition.verdict != "holds":
            return Verdict("not tested", reason=condition.reason or claim.given.why)
    verdict = judge(claim.expression, table_name, contents.samples)
    decided = verdict.verdict in ("holds", "fails", "undecided")
    if contents.one_sample and decided and len(verdict.per_seed) == 1 and "div" not in verdict.reason:
        reason = f"{verdict.reason}; {contents.one_sample}".removeprefix("; ")
        return Verdict(verdict.verdict, verdict.support, verdict.per_seed, reason)
    return verdict


def _within(claim: ClaimSpec, table_name: str, contents: Contents) -> bool:
    """Whether a claim reads nothing but columns that can be judged in a table which is otherwise untested."""
    cells = {key: CellValue(statistics.fmean(sample.values)) for key, sample in contents.samples.items()}
    try:
        read = Expression(claim.expression).cells({table_name: Cells(cells)})
    except MissingCell:
        return False
    return bool(read) and all(column in contents.judged_columns for _, (_, column) in read)


def holds_in_print(claim: ClaimSpec, table_name: str, printed: Mapping[Any, CellValue]) -> bool | None:
    """Whether the printed numbers satisfy the claim; None if it reads a cell that is not printed."""
    try:
        return bool(Expression(claim.expression).evaluate({table_name: Cells(printed)}))
    except MissingCell:
        return None


def fragile_in_print(claim: ClaimSpec, table_name: str, printed: Mapping[Any, CellValue], noise: float) -> bool | None:
    """True if moving printed cells by `noise` (relative) changes the claim's truth in the print; None if it has none.

    Each cell the claim reads is moved alone, up and down, so that a gap changes by the whole noise.
    """
    truth = holds_in_print(claim, table_name, printed)
    if truth is None or not noise:
        return None
    expression = Expression(claim.expression)
    for _, key in expression.cells({table_name: printed}):
        cell = printed[key]
        for factor in (1 - noise, 1 + noise):
            moved = {**printed, key: CellValue(cell * factor, cell.diverged, cell.printed)}
            if bool(expression.evaluate({table_name: Cells(moved)})) != truth:
                return True
    return False
