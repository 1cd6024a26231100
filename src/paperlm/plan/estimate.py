"""`paperlm plan`: which jobs are to be made, by kind, and how long that takes by recorded costs."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from paperlm.errors import SpecError, unknown
from paperlm.jobs import Job
from paperlm.plan.project import Project
from paperlm.plan.state import State

Costs = dict[str, list[tuple[str, float]]]
"Kind -> (slug without seed, seconds) of every record at hand."


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


def recorded_costs(project: Project) -> Costs:
    """Wall seconds of the records at this scale, made here before committed ones."""
    found: Costs = {}
    for folder in (f"results/{project.scale.scale}", f"paper_tables/records/{project.scale.scale}"):
        for path in sorted((project.root / folder).glob("*/*.json")):
            try:
                head = json.loads(path.read_bytes())
                seconds = head["cost"]["wall_seconds"]
                if seconds:
                    found.setdefault(head["kind"], []).append((_like(head["job_id"]), seconds))
            except (ValueError, KeyError, TypeError):
                continue
    return found


def _like(job_id: str) -> str:
    """A job's name without hash and seed: jobs of one such name take about as long."""
    parts = job_id.split("-")[:-1]
    return "-".join(part for part in parts if not (part.startswith("s") and part[1:].isdigit()))


def seconds_of(job: Job, costs: Costs) -> float | None:
    """Seconds a job is expected to take: those of its like, else of its kind; None if no record says."""
    known = costs.get(job.kind, [])
    alike = [seconds for like, seconds in known if like == _like(job.job_id)]
    values = alike or [seconds for _, seconds in known]
    return statistics.median(values) if values else None


def lines(project: Project, names: Sequence[str]) -> list[tuple[str, int, float | None]]:
    """(kind, jobs to make, expected seconds) for each kind; None where no record of the kind says how long."""
    jobs = State(project).todo(*chosen(project, names)).values()
    costs = recorded_costs(project)
    found = []
    for kind in dict.fromkeys(job.kind for job in jobs):
        each = [seconds_of(job, costs) for job in jobs if job.kind == kind]
        found.append((kind, len(each), None if None in each else sum(each)))
    return found


def print_plan(project: Project, names: Sequence[str]) -> None:
    """The table of jobs to make, and the time they take on as many cores as there are, one job a core."""
    console, found = Console(), lines(project, names)
    if not found:
        console.print(f"nothing to make at scale {project.scale.scale}: every record is there, or needs a GPU")
        return
    grid = Table(title=f"jobs to make at scale {project.scale.scale}", title_justify="left")
    for column in ("kind", "jobs", "minutes, one after the other"):
        grid.add_column(column, justify="left" if column == "kind" else "right")
    for kind, count, seconds in found:
        grid.add_row(kind, str(count), "no record says" if seconds is None else f"{seconds / 60:.1f}")
    console.print(grid)
    console.print(summary(found, os.cpu_count() or 1))


def expectation(project: Project, names: Sequence[str]) -> str:
    """What `snakemake -n` ends with: jobs to make for exhibits (none: for all), by kind, and how long they take."""
    found = lines(project, names)
    kinds = ", ".join(f"{count} {kind}" for kind, count, _ in found)
    return summary(found, os.cpu_count() or 1) + (f" ({kinds})" if kinds else "")


def summary(found: Iterable[tuple[str, int, float | None]], cores: int) -> str:
    """One line: how many jobs, and how long on so many cores if every kind has a recorded cost."""
    found = list(found)
    jobs, known = sum(count for _, count, _ in found), [seconds for *_, seconds in found if seconds is not None]
    unknown_kinds = [kind for kind, _, seconds in found if seconds is None]
    time = f"about {sum(known) / 60 / cores:.0f} minutes on {cores} cores by recorded costs" if known else ""
    rest = f"no record says how long {', '.join(unknown_kinds)} takes" if unknown_kinds else ""
    return f"{jobs} jobs to make; " + "; ".join(filter(None, (time, rest)))
