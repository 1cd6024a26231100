"""`paperlm plan`: which jobs are to be made, by kind, and how long that takes by what such jobs took before."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from paperlm.errors import SpecError, unknown
from paperlm.jobs import Job
from paperlm.plan.costs import MEASURE, Costs, Reference
from paperlm.plan.project import Project
from paperlm.plan.workflow import Workflow, size_of


@dataclass(frozen=True)
class Need:
    """What one job, or the measurement of one case, asks for."""

    kind: str
    name: str
    "job id; of a measurement operation/case"
    size: str
    "of its model, as resources are given by it; may be empty"
    gpus: int
    mem_mb: int
    granted: int
    "minutes that a cluster grants it"
    seconds: float | None
    "that it is expected to take on so many GPUs; None where nothing says"
    card_bytes: int | None = None
    "that each GPU holds at least; None where nothing says, or without one"
    never: str = ""
    "why it ends as blocked on any machine; empty: it may give a number"

    def line(self) -> str:
        """Its cards, memory and hours."""
        hours = f"{_tenths(self.seconds)} hours" if self.seconds is not None else _at_most(self.granted)
        return f"{self.name}: {_cards(self.gpus)}, {self.mem_mb / 1000:.0f} GB of memory, {_held([self])}{hours}"


@dataclass(frozen=True)
class Estimate:
    """Jobs to make, and the seconds they are expected to take."""

    needs: tuple[Need, ...]
    longest: float
    "seconds of the longest chain of jobs that wait for one another: more cores do not shorten it"
    basis: str
    "what the seconds rest on"

    @property
    def kinds(self) -> dict[str, list[float | None]]:
        """Kind -> seconds of each of its jobs; None where nothing says."""
        found: dict[str, list[float | None]] = {}
        for need in self.needs:
            found.setdefault(need.kind, []).append(need.seconds)
        return found

    @property
    def most(self) -> int:
        """GPUs of the job that has most."""
        return max((need.gpus for need in self.needs), default=0)

    def asks(self) -> Iterator[str]:
        """Cards, memory and hours of each job, in a line for all of a kind that ask for the same."""
        alike: dict[tuple[str, int, int, int, bool], list[Need]] = {}
        for need in self.needs:
            key = (need.kind, need.gpus, need.mem_mb, need.granted, need.seconds is None)
            alike.setdefault(key, []).append(need)
        several = Counter(kind for kind, *_ in alike)
        for (kind, gpus, memory, granted, silent), jobs in alike.items():
            sizes = ", ".join(dict.fromkeys(job.size for job in jobs if job.size))
            of = f" of {sizes}" if sizes and several[kind] > 1 else ""
            hours = "no record says how long, " + _at_most(granted, " each") if silent else _hours(gpus, jobs)
            each = " each" if gpus else ""
            asked = f"{_cards(gpus)}{each}, {memory / 1000:.0f} GB of memory, {_held(jobs)}{hours}"
            yield f"{len(jobs)} {kind}{of}: {asked}"

    def blocked(self) -> Iterator[str]:
        """How many of the jobs give no number on any machine, a line a reason."""
        for why, count in Counter(need.never for need in self.needs if need.never).items():
            jobs = "1 of these jobs ends" if count == 1 else f"{count} of these jobs end"
            yield f"{jobs} as blocked, without a number: {why}"

    def minutes(self, kind: str) -> float | None:
        """Minutes of the jobs of a kind, one after the other; None where nothing says how long it takes."""
        return None if None in self.kinds[kind] else sum(self.kinds[kind]) / 60

    def line(self, at_once: int, how: str, in_cards: bool = False) -> str:
        """How many jobs, and how long with so many at a time; `how` says it in words. in_cards: with so many cards, of
        which a job has several."""
        known = [(need.seconds, need.gpus if in_cards else 1) for need in self.needs if need.seconds is not None]
        silent = [kind for kind in self.kinds if self.minutes(kind) is None]
        work = sum(seconds * max(1, cards) for seconds, cards in known)
        minutes = max(work / at_once, self.longest) / 60
        shown = f"{minutes:.0f} minutes" if minutes >= 1.5 else "a minute"
        if minutes >= 120:
            shown = f"{minutes / 60:,.1f} hours"
        time = f"about {shown} {how} {self.basis}" if known else ""
        rest = f"no record says how long {', '.join(silent)} take{'s' * (len(silent) == 1)}" if silent else ""
        count = len(self.needs)
        return "; ".join(filter(None, (f"{count} job{'s' * (count != 1)} to make", time, rest)))


def _cards(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "no GPU"


def _held(jobs: Sequence[Need]) -> str:
    """What each card of some jobs holds: every one has the whole model, however many share the work."""
    known = [need.card_bytes / 1e9 for need in jobs if need.card_bytes]
    if not known:
        return ""
    first, last = (f"{size:.0f}" if size >= 10 else f"{size:.1f}" for size in (min(known), max(known)))
    return f"at least {first if first == last else f'{first} to {last}'} GB on each GPU without activations, "


def _at_most(minutes: int, each: str = "") -> str:
    hours = f"{minutes / 60:,.0f}"
    return f"at most {hours} hour{'s' * (hours != '1')}{each} are asked for"


def _hours(gpus: int, jobs: Sequence[Need]) -> str:
    """Hours of each of some jobs, and those of their cards in all."""
    first, last = (_tenths(f(job.seconds for job in jobs)) for f in (min, max))
    span = first if first == last else f"{first} to {last}"
    total = _tenths(sum(job.seconds for job in jobs) * max(1, gpus))
    return f"{span} hours each, {total} {'GPU-hours' if gpus else 'hours'} in all"


def _tenths(seconds: float) -> str:
    """In hours."""
    return f"{seconds / 3600:,.1f}" if seconds >= 360 else "under 0.1"


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


def estimate(plan: Workflow, names: Sequence[str], reference: Reference, here: bool = True) -> Estimate:
    """What these exhibits, or those of these papers, still need. here: on this machine, whose cards may be fewer than a
    job asks a cluster for."""
    asked, costs = chosen(plan.project, names), Costs(plan.project, reference)
    jobs, resources = plan.state.todo(*asked), plan.project.scale.resources
    needs: dict[str, Need] = {}
    for job_id, job in jobs.items():
        alone, size, gpus = costs.of_job(job), plan.job_size(job_id), plan.gpus(job_id, here)
        seconds = None if alone is None else alone / resources.speed(gpus)
        held, never = job.card_bytes() if gpus else None, job.out_of_reach()
        needs[job_id] = Need(job.kind, job_id, size_of(job), gpus, size.mem_mb, size.runtime, seconds, held, never)
    gpus, size = resources.gpus.value, resources.default
    measured = [
        Need(MEASURE, f"{op}/{case}", "", gpus, size.mem_mb, size.runtime, costs.of_measurement(op, case))
        for op, case in plan.to_measure(*asked)
    ]

    def ends(job: Job) -> float:
        """Seconds from the start to the job's end, each of its ancestors that is to be made before it."""
        before = [ends(parent) for parent in job.parents().values() if parent.job_id in jobs]
        return max(before, default=0.0) + (needs[job.job_id].seconds or 0.0)

    longest = max([*map(ends, jobs.values()), *(need.seconds or 0.0 for need in measured)], default=0.0)
    kinds = {job.kind: None for job in jobs.values()}
    ordered = sorted(needs.values(), key=lambda need: list(kinds).index(need.kind))
    return Estimate((*ordered, *measured), longest, costs.basis)


def print_plan(project: Project, names: Sequence[str], cores: int | None, each: bool = False) -> None:
    """The table of jobs to make, and the time they take on so many cores (None: all of this machine).

    each: a line for every job, in place of one for those that ask for the same.
    """
    console = Console()
    said, plan, found = _here_or_elsewhere(Workflow(project), lambda plan: estimate(plan, names, "measured"))
    if said:
        console.print(said, highlight=False, markup=False, soft_wrap=True)
    if not found.kinds:
        return
    grid = Table(title=f"jobs to make at scale {project.scale.scale}", title_justify="left")
    for column in ("kind", "jobs", "minutes, one after the other"):
        grid.add_column(column, justify="left" if column == "kind" else "right")
    for kind, jobs in found.kinds.items():
        minutes = found.minutes(kind)
        grid.add_row(kind, str(len(jobs)), "no record says" if minutes is None else f"{minutes:.1f}")
    console.print(grid)
    lines = [need.line() for need in found.needs] if each else found.asks() if found.most else ()
    for line in (*lines, *found.blocked()):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(found.line(*_side_by_side(plan, found, cores)), highlight=False)


def expectation(plan: Workflow, names: Sequence[str], cores: int | None, nodes: int | None) -> str:
    """What `snakemake -n` ends with: jobs to make for exhibits (none: for all), by kind, and how long they take.

    cores: None for those of this machine. nodes: jobs at a time of a cluster, None without one. RecordError for a
    damaged file of the reference.
    """
    said, plan, found = _here_or_elsewhere(plan, lambda plan: estimate(plan, names, "stored", here=not nodes))
    if not found.kinds:
        return said
    lines = [said] if said else []
    side_by_side = (nodes, f"with {nodes} jobs at a time") if nodes else _side_by_side(plan, found, cores)
    if found.most:
        more = (f"  {line}" for line in (*found.asks(), *found.blocked()))
        return "\n".join([*lines, found.line(*side_by_side), *more])
    kinds = ", ".join(f"{len(each)} {kind}" for kind, each in found.kinds.items())
    return "\n".join([*lines, f"{found.line(*side_by_side)} ({kinds})", *found.blocked()])


def _here_or_elsewhere(plan: Workflow, of: Callable[[Workflow], Estimate]) -> tuple[str, Workflow, Estimate]:
    """What is said before an estimate, and the estimate with its plan: of this machine; where that makes nothing since
    a GPU or a word is missing, of one that makes what has no record."""
    found, nothing = of(plan), f"nothing to make at scale {plan.project.scale.scale}"
    if found.kinds:
        return "", plan, found
    config = plan.project.config
    if not plan.state.makes_missing:
        why = "run_missing=no" if config.run_missing == "no" else "no GPU is seen on this machine"
        plan = Workflow(Project(config.model_copy(update={"run_missing": "yes"}), plan.project.root))
        found = of(plan)
        if found.kinds:
            return f"{nothing}, since {why}; elsewhere, or with --config run_missing=yes:", plan, found
    return f"{nothing}: every record is there", plan, found


def stated_cores(arguments: Sequence[str], cores: int | None) -> int | None:
    """The cores that a command line of Snakemake states; None if it states none, which counts as 1 in a dry run."""
    stated = any(re.fullmatch(r"-c.*|--cores(=.*)?", argument) for argument in arguments)
    return cores if stated or (cores or 1) > 1 else None


def _side_by_side(plan: Workflow, found: Estimate, cores: int | None) -> tuple[int, str, bool]:
    """How many cores or cards compute at a time, in words, and whether they are cards."""
    cards = plan.project.scale.device == "gpu"
    count = plan.side_by_side(cores or os.cpu_count() or 1, found.most)
    return count, f"on {count} {'GPU' if cards else 'core'}{'s' if count > 1 else ''}", cards
