"""What would decide an open claim: which jobs, how many seeds, how long they take by recorded costs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paperlm.jobs import Job
from paperlm.kept import kept
from paperlm.plan.costs import Costs
from paperlm.plan.project import Cell, Project
from paperlm.plan.state import State
from paperlm.tables.claims import Key, Verdict

MOST_SEEDS = 20
"A gap that asks for more is called too small to be told, not a plan."


@dataclass(frozen=True)
class Needs:
    """Jobs that would decide a verdict if the numbers stayed as they are."""

    jobs: tuple[Job, ...] = ()
    seeds: int = 0
    "of each cell, where more seeds are what is missing; 0: cells that were not run are"
    too_many: bool = False
    "more than MOST_SEEDS seeds"
    never: str = ""
    "why one of them, or what it works on, makes no number on any machine"


class Evidence:
    """Answers for one project and its records of this moment."""

    def __init__(self, project: Project) -> None:
        self.project, self.state = project, State(project)

    @functools.cached_property
    def costs(self) -> Costs:
        """Seconds of jobs by records alone: what a table says rests on no reference."""
        return Costs(self.project, "none")

    def needs(self, exhibits: Mapping[str, str], verdict: Verdict) -> Needs:
        """`exhibits`: name in claims -> exhibit."""
        if verdict.missing:  # one seed each says how they come out; what that leaves open is asked for then
            return self._possible([(cell, 1) for cell in self._cells(exhibits, verdict.missing)])
        seeds = max(verdict.open_cells.values(), default=0)
        if not seeds:
            return Needs()
        if seeds > MOST_SEEDS:
            return Needs(seeds=seeds, too_many=True)
        more = self._with_seeds(seeds)
        wanted = [(cell, n) for key, n in verdict.open_cells.items() for cell in more._cells(exhibits, [key])]
        return self._possible(wanted, seeds)

    def sentence(self, exhibits: Mapping[str, str], verdict: Verdict) -> str:
        """For the column `would_decide`; empty for a verdict that is decided, or that no job decides."""
        if verdict.verdict in ("holds", "fails"):
            return ""
        needs = self.needs(exhibits, verdict)
        if needs.too_many:
            return f"more than {MOST_SEEDS} seeds at the gap seen so far: too small to be told"
        if needs.never:
            return f"nothing here: {needs.never}"
        if not needs.jobs:
            return ""
        what = f"{needs.seeds} seeds: " if needs.seeds else ""
        return f"{what}{len(needs.jobs)} job{'s' if len(needs.jobs) > 1 else ''}, {self.duration(needs.jobs)}"

    def _possible(self, wanted: list[tuple[Cell, int]], seeds: int = 0) -> Needs:
        """The jobs that these cells lack; none where one of theirs, or what it works on, can never be made: the others
        decide nothing alone."""
        every = (job for cell, _ in wanted for job in cell.jobs)
        why = next((why for job in every if (why := job.out_of_reach())), "")
        return Needs(never=why) if why else Needs(self._lacking(wanted), seeds)

    def hours(self, jobs: Iterable[Job]) -> float | None:
        """Hours of the jobs and of parents whose models they need, one after the other; None: no record says."""
        found = [self.costs.of_job(job) for job in self.chain(jobs)]
        return None if None in found else sum(found) / 3600

    def chain(self, jobs: Iterable[Job]) -> list[Job]:
        """The jobs, and the parents whose models are not here."""
        found: dict[str, Job] = {}
        waiting = list(jobs)
        while waiting:
            job = waiting.pop()
            if job.job_id not in found:
                found[job.job_id] = job
                waiting += [parent for parent in job.parents().values() if not self.state.has_model(parent)]
        return list(found.values())

    def duration(self, jobs: Iterable[Job]) -> str:
        """`about 31 minutes by recorded costs`."""
        hours = self.hours(jobs)
        if hours is None:
            return "no record says how long"
        return f"about {hours * 60:.0f} minutes" if hours < 2 else f"about {hours:.1f} hours"

    def _cells(self, exhibits: Mapping[str, str], keys: Iterable[Key]) -> list[Cell]:
        wanted = {(exhibits[short], key) for short, key in keys}
        return [
            cell
            for name in dict.fromkeys(name for name, _ in wanted)
            for cell in self.project.cells(name)
            # A figure's claims read statistics of a row, whatever its columns are.
            if any(n == name and _is_of(key, cell.row, cell.column, name in self.project.figures) for n, key in wanted)
        ]

    def _lacking(self, wanted: Iterable[tuple[Cell, int]]) -> tuple[Job, ...]:
        """Jobs without a record, of each cell no more than make it so many seeds."""
        found: list[Job] = []
        for cell, seeds in wanted:
            jobs = list(dict.fromkeys(cell.jobs))
            missing = [job for job in jobs if self.state.stored(job) is None]
            # a seed is a job, but where a cell is the mean of others
            found += missing if cell.mean_of else missing[: max(0, seeds - (len(jobs) - len(missing)))]
        return tuple(dict.fromkeys(found))

    @kept
    def _with_seeds(self, seeds: int) -> Evidence:
        config = self.project.config
        more = config.model_copy(update={"seeds": sorted({*config.seeds, *range(seeds)})})
        return Evidence(Project(more, self.project.root))


def _is_of(key: object, row: str, column: str, figure: bool) -> bool:
    return isinstance(key, tuple) and key[0] == row and (figure or key[1] == column)
