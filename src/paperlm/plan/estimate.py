"""`paperlm plan`: which jobs are to be made, by kind, and how long that takes by what such jobs took before."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from paperlm.errors import SpecError, unknown
from paperlm.jobs import Job, job_kinds
from paperlm.plan.costs import MEASURE, Costs, Reference
from paperlm.plan.project import Project
from paperlm.plan.scale import JobSize
from paperlm.plan.workflow import Workflow


@dataclass(frozen=True)
class Estimate:
    """Jobs to make, and the seconds they are expected to take."""

    kinds: dict[str, list[float | None]]
    "kind -> seconds of each of its jobs; None where nothing says"
    longest: float
    "seconds of the longest chain of jobs that wait for one another: more cores do not shorten it"
    basis: str
    "what the seconds rest on"
    memory: dict[str, int]
    "kind -> MB of main memory that its largest job asks for"
    granted: dict[str, int]
    "kind -> minutes that a cluster grants its longest job"
    gpus: int = 0
    "GPUs that a job of a kind that computes on one asks for"

    def asks(self, kind: str) -> str:
        """Cards, hours and memory of the jobs of a kind, on a scale of GPUs."""
        minutes, gpus = self.minutes(kind), self.gpus if kind == MEASURE or job_kinds()[kind].on_card else 0
        cards = f"{gpus} GPU{'s' if gpus > 1 else ''} each" if gpus else "no GPU"
        unit = "GPU-hours" if gpus else "hours"
        known = minutes is not None
        hours = f"{(gpus or 1) * minutes / 60:,.1f} {unit} in all" if known else self._unknown(kind)
        return f"{len(self.kinds[kind])} {kind}: {cards}, {self.memory[kind] / 1000:.0f} GB of memory, {hours}"

    def _unknown(self, kind: str) -> str:
        return f"no record says how long, at most {self.granted[kind] / 60:,.0f} hours each are asked for"

    def minutes(self, kind: str) -> float | None:
        """Minutes of the jobs of a kind, one after the other; None where nothing says how long it takes."""
        return None if None in self.kinds[kind] else sum(self.kinds[kind]) / 60

    def line(self, at_once: int, how: str) -> str:
        """How many jobs, and how long with so many at a time; `how` says it in words."""
        count = sum(map(len, self.kinds.values()))
        known = [seconds for each in self.kinds.values() for seconds in each if seconds is not None]
        silent = [kind for kind in self.kinds if self.minutes(kind) is None]
        minutes = max(sum(known) / at_once, self.longest) / 60
        shown = f"{minutes:.0f} minutes" if minutes >= 1.5 else "a minute"
        if minutes >= 120:
            shown = f"{minutes / 60:,.1f} hours"
        time = f"about {shown} {how} {self.basis}" if known else ""
        rest = f"no record says how long {', '.join(silent)} take{'s' * (len(silent) == 1)}" if silent else ""
        return "; ".join(filter(None, (f"{count} job{'s' * (count != 1)} to make", time, rest)))


def chosen(project: Project, names: Sequence[str]) -> list[str]:
    """Exhibits that names of tables, figures and papers stand for; all without a name. SpecError for another name."""
    found: dict[str, None] = {}
    for name in names:
        if name in project.papers:
            found |= dict.fromkeys(project.papers[name].exhibits())
        elif name in project.exhibits:
            found[name] = None
        else:
            raise SpecError(unknown("table, figure or paper", name, [*project.exhibits, *project.papers]))
    return list(found) or project.exhibits


def estimate(plan: Workflow, names: Sequence[str], reference: Reference) -> Estimate:
    """What these exhibits, or those of these papers, still need."""
    asked, costs = chosen(plan.project, names), Costs(plan.project, reference)
    jobs, measurements = plan.state.todo(*asked), plan.to_measure(*asked)
    seconds = {job_id: costs.of_job(job) for job_id, job in jobs.items()}
    kinds: dict[str, list[float | None]] = {}
    for job_id, job in jobs.items():
        kinds.setdefault(job.kind, []).append(seconds[job_id])
    if measurements:
        kinds[MEASURE] = [costs.of_measurement(*one) for one in measurements]

    def ends(job: Job) -> float:
        """Seconds from the start to the job's end, each of its ancestors that is to be made before it."""
        before = [ends(parent) for parent in job.parents().values() if parent.job_id in jobs]
        return max(before, default=0.0) + (seconds[job.job_id] or 0.0)

    longest = max([*map(ends, jobs.values()), *(value or 0.0 for value in kinds.get(MEASURE, ()))], default=0.0)
    resources = plan.project.scale.resources
    sizes: dict[str, list[JobSize]] = {}
    for job_id, job in jobs.items():
        sizes.setdefault(job.kind, []).append(plan.job_size(job_id))
    if measurements:
        sizes[MEASURE] = [resources.default]
    memory = {kind: max(size.mem_mb for size in each) for kind, each in sizes.items()}
    granted = {kind: max(size.runtime for size in each) for kind, each in sizes.items()}
    return Estimate(kinds, longest, costs.basis, memory, granted, resources.gpus)


def print_plan(project: Project, names: Sequence[str], cores: int | None) -> None:
    """The table of jobs to make, and the time they take on so many cores (None: all of this machine)."""
    console, plan = Console(), Workflow(project)
    found = estimate(plan, names, "measured")
    if not found.kinds:
        console.print(_nothing(plan), highlight=False)
        return
    grid = Table(title=f"jobs to make at scale {project.scale.scale}", title_justify="left")
    for column in ("kind", "jobs", "minutes, one after the other"):
        grid.add_column(column, justify="left" if column == "kind" else "right")
    for kind, each in found.kinds.items():
        minutes = found.minutes(kind)
        grid.add_row(kind, str(len(each)), "no record says" if minutes is None else f"{minutes:.1f}")
    console.print(grid)
    for kind in found.kinds if found.gpus else ():
        console.print(found.asks(kind), highlight=False)
    console.print(found.line(*_side_by_side(plan, cores)), highlight=False)


def expectation(plan: Workflow, names: Sequence[str], cores: int | None, nodes: int | None) -> str:
    """What `snakemake -n` ends with: jobs to make for exhibits (none: for all), by kind, and how long they take.

    cores: None for those of this machine. nodes: jobs at a time of a cluster, None without one. RecordError for a
    damaged file of the reference.
    """
    found = estimate(plan, names, "stored")
    if not found.kinds:
        return _nothing(plan)
    side_by_side = (nodes, f"with {nodes} jobs at a time") if nodes else _side_by_side(plan, cores)
    if found.gpus:
        return "\n".join([found.line(*side_by_side), *(f"  {found.asks(kind)}" for kind in found.kinds)])
    kinds = ", ".join(f"{len(each)} {kind}" for kind, each in found.kinds.items())
    return f"{found.line(*side_by_side)} ({kinds})"


def _nothing(plan: Workflow) -> str:
    """Why there are no jobs to make, and what plans them all the same."""
    there = f"nothing to make at scale {plan.project.scale.scale}: every record is there"
    if plan.state.makes_missing:
        return there
    return f"{there}, or none is made on this machine (--config run_missing=yes plans those that are missing)"


def stated_cores(arguments: Sequence[str], cores: int | None) -> int | None:
    """The cores that a command line of Snakemake states; None if it states none, which counts as 1 in a dry run."""
    stated = any(re.fullmatch(r"-c.*|--cores(=.*)?", argument) for argument in arguments)
    return cores if stated or (cores or 1) > 1 else None


def _side_by_side(plan: Workflow, cores: int | None) -> tuple[int, str]:
    """How many jobs run at a time, and in words."""
    count = plan.jobs_at_once(cores or os.cpu_count() or 1)
    what = "GPU" if plan.project.scale.resources.gpus else "core"
    return count, f"on {count} {what}{'s' if count > 1 else ''}"
