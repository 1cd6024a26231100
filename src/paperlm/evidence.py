"""`paperlm evidence`: which missing jobs would decide most claims per hour, from recorded costs."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paperlm.errors import SpecError
from paperlm.figures.base import exhibit_contents
from paperlm.jobs import Job, Machine
from paperlm.jobs.base import kept_for
from paperlm.plan.costs import Costs
from paperlm.plan.project import Project
from paperlm.plan.state import State
from paperlm.run import Maker
from paperlm.tables.contents import Contents
from paperlm.tables.needs import Evidence
from paperlm.tables.verdicts import Reading, judged


@dataclass(frozen=True)
class Open:
    """A claim, or a part of one, that some jobs would decide."""

    claim: str
    jobs: tuple[Job, ...]
    "that it asks for, and the parents whose models they need"
    asked: tuple[Job, ...]
    seeds: int = 0

    @functools.cached_property
    def ids(self) -> frozenset[str]:
        """Names of its jobs."""
        return frozenset(job.job_id for job in self.jobs)


@dataclass(frozen=True)
class Step:
    """Jobs to make next, and the claims that are decided when they are there."""

    jobs: tuple[Job, ...]
    asked: tuple[Job, ...]
    decides: tuple[str, ...]
    hours: float
    seeds: int


def open_claims(project: Project) -> Iterator[Open]:
    """Every open part of every claim at this scale that jobs would decide. Raises RecordError and SpecError."""
    evidence = Evidence(project)

    def contents_of(name: str) -> Contents:
        return exhibit_contents(project, name, [project.root / path for path in at_hand(name)])

    def at_hand(name: str) -> list[str]:
        jobs = [job for other in project.reads(name) for job in project.jobs_of(other)]
        return list(dict.fromkeys(s.path for job in jobs if (s := evidence.state.stored(job))))

    for name in project.exhibits:
        paper, exhibit = project.exhibit(name)
        if not exhibit.claims or not project.jobs_of(name):
            continue
        reading = Reading(project, name, contents_of(name), contents_of)
        for claim in exhibit.claims:
            whole = judged(reading, paper, claim)
            for verdict in whole.parts or (whole,):
                needs = evidence.needs(reading.exhibits, verdict)
                if verdict.verdict not in ("holds", "fails") and needs.jobs:
                    label = f"{claim.id} [{verdict.part}]" if verdict.part else claim.id
                    yield Open(label, tuple(evidence.chain(needs.jobs)), needs.jobs, needs.seeds)


def ranked(project: Project, hours: float) -> tuple[list[Step], list[str]]:
    """Steps that fit into so many hours, most claims per hour first, each counted after those before it; and claims
    whose jobs no record says the cost of."""
    costs, waiting, unknown = Costs(project, "measured"), [], []
    for item in open_claims(project):
        known = all(costs.of_job(job) is not None for job in item.jobs)
        waiting.append(item) if known else unknown.append(item.claim)
    steps: list[Step] = []
    done: set[str] = set()
    left = hours
    while waiting:
        best: Step | None = None
        for item in waiting:
            new = tuple(job for job in item.jobs if job.job_id not in done)
            there = done | {job.job_id for job in new}
            decided = [other for other in waiting if other.ids <= there]
            cost = sum(costs.of_job(job) or 0.0 for job in new) / 3600
            asked = tuple(job for job in item.asked if job.job_id not in done)
            step = Step(new, asked, tuple(other.claim for other in decided), cost, max(o.seeds for o in decided))
            if cost <= left and (best is None or _rate(step) > _rate(best)):
                best = step
        if best is None:
            break
        steps.append(best)
        left -= best.hours
        done |= {job.job_id for job in best.jobs}
        waiting = [item for item in waiting if item.claim not in best.decides]
    return steps, unknown


def _rate(step: Step) -> float:
    return len(step.decides) / max(step.hours, 1e-6)


def print_evidence(project: Project, hours: float) -> None:
    """The list, and the command that makes its jobs. Raises SpecError for hours that are no positive number."""
    if not hours > 0:
        raise SpecError(f"--hours {hours:g}: give a positive number")
    console = Console(width=None if Console().is_terminal else 150)
    steps, unknown = ranked(project, hours)
    if not steps:
        console.print(f"no job that fits into {hours:g} hours would decide a claim at scale {project.scale.scale}")
    else:
        grid = Table(
            title=f"what to make next at scale {project.scale.scale}, in {hours:g} hours", title_justify="left"
        )
        seeds = any(step.seeds for step in steps)
        for column in ("jobs", "minutes", *(["seeds"] if seeds else []), "decides, if the numbers go on as they are"):
            grid.add_column(column, justify="left" if column.startswith("decides") else "right")
        for step in steps:
            needed = [str(step.seeds or "")] if seeds else []
            grid.add_row(str(len(step.jobs)), f"{step.hours * 60:.0f}", *needed, escape(_by_claim(step.decides)))
        console.print(grid)
        console.print(escape(f"to make them in this order: {command(project, hours)}"), soft_wrap=True)
    if unknown:
        console.print(
            f"no record says how long the jobs of {len(unknown)} open claims and parts of claims take: "
            f"{escape(_by_claim(unknown, most=1))}"
        )


def _by_claim(labels: Iterable[str], most: int = 4) -> str:
    """Labels of claims and their parts in few words: `X-1 [71M], X-1 [130M], X-2` as `X-1 [71M; 130M], X-2`, and of
    more than so many parts how many they are."""
    parts: dict[str, list[str]] = {}
    for label in labels:
        claim, _, part = label.partition(" ")
        parts.setdefault(claim, []).extend([part[1:-1]] if part else [])
    shown = (
        f" [{len(names)} parts]" if len(names) > most else f" [{'; '.join(names)}]" if names else ""
        for names in parts.values()
    )
    return ", ".join(claim + part for claim, part in zip(parts, shown, strict=True))


def command(project: Project, hours: float) -> str:
    """The same verb with --run: the ranking is made anew from the same records, and its jobs are made in order."""
    said = [f"scale={project.scale.scale}", f"seeds={project.config.seeds}".replace(" ", ""), "run_missing=yes"]
    config = " ".join(f"--config {shlex.quote(one)}" for one in said)
    local = f" --local-data {shlex.quote(project.config.local_data)}" if project.config.local_data else ""
    return f"python -m paperlm evidence --hours {hours:g} {config}{local} --run"


def run_evidence(project: Project, hours: float, machine: Machine) -> None:
    """Make the jobs of the ranking, in its order, after the parents whose models are missing."""
    steps, _ = ranked(project, hours)
    kept = kept_for(job for step in steps for job in step.jobs)
    maker = Maker(project.places, machine, project.config.local_data, kept)
    for job in dict.fromkeys(job for step in steps for job in step.asked):
        if State(project).stored(job) is None:
            maker.with_parents(job)
