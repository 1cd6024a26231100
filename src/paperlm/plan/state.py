"""What is there and what has to be made: records and models are two things.

Tables and figures ask for records, which are committed or made; children ask for models. A record of earlier rules is
made again where that is cheap, and marked where it is not.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paperlm.files import glance
from paperlm.jobs import Job
from paperlm.kept import kept
from paperlm.plan.project import Project
from paperlm.record.model_store import has_model
from paperlm.record.record import drift
from paperlm.result import UNIGRAM
from paperlm.train.gpu_lock import visible_gpus


@dataclass(frozen=True)
class Stored:
    """The record of a job: where it is, and what has changed since it was made."""

    path: str
    drifted: tuple[str, ...] = ()


Want = Literal["have", "make", "absent"]


class State:
    """What of a project is there, at the moment of asking. Reads no more than the head of each record."""

    def __init__(self, project: Project) -> None:
        self.project, self.places = project, project.places

    @functools.cached_property
    def gpus(self) -> list[str]:
        """Cards of this machine; empty on a scale that needs none."""
        return visible_gpus() if self.project.scale.device == "gpu" else []

    @functools.cached_property
    def makes_missing(self) -> bool:
        """Whether jobs without a record are made (config key run_missing)."""
        wish = self.project.config.run_missing
        return wish == "yes" or (wish == "auto" and (self.project.scale.device == "cpu" or bool(self.gpus)))

    @functools.cached_property
    def makes_drifted(self) -> bool:
        """Whether jobs whose record is of earlier rules are made again (config key remake)."""
        wish = self.project.config.remake
        cheap = self.project.scale.device == "cpu"
        return self.makes_missing and (wish == "drifted" or (wish == "auto" and cheap))

    @kept
    def stored(self, job: Job) -> Stored | None:
        """The job's record: one of today's rules before one of earlier rules, a committed one before one made here."""
        found = []
        for path in (self.places.committed(job), self.places.made(job)):
            if self.places.is_file(path):
                found.append(Stored(path, tuple(_drift(self.places.root / path, job))))
        return min(found, key=lambda s: bool(s.drifted), default=None)

    def want(self, job: Job) -> Want:
        """Whether a record is there, will be made, or stays absent."""
        stored = self.stored(job)
        if stored is None:
            return "make" if self.makes_missing else "absent"
        return "make" if stored.drifted and self.makes_drifted else "have"

    def record(self, job: Job) -> str | None:
        """Path of the record that an exhibit reads: the stored one, or where it will be made; None: not run."""
        match self.want(job):
            case "have":
                return self.stored(job).path
            case "make":
                return self.places.made(job)
        return None

    def records(self, name: str, together: Collection[str] = ()) -> list[str]:
        """Records that an exhibit is built from, in order, without those that are absent and will not be made.

        Those of trainings that its jobs work on the end of are among them: whether one collapsed is said beside numbers
        of its model. A claim that reads another exhibit is judged on what is at hand of it or is made in the same call,
        `together` (job ids): nothing is made for a claim alone.
        """
        jobs = self.project.jobs_of(name)
        found = [self.record(job) for job in jobs]
        found += [self._of_training(name, one) for job in jobs for one in job.worked_on()]
        for job in (job for other in self.project.reads(name)[1:] for job in self.project.jobs_of(other)):
            if job.job_id in together:
                found.append(self.record(job))
            elif stored := self.stored(job):
                found.append(stored.path)
        return list(dict.fromkeys(filter(None, found)))

    def _of_training(self, name: str, job: Job) -> str | None:
        """Record of a job that an exhibit does not show, if it measures what a collapse is seen by; None: there is
        none, and none is made for this exhibit."""
        if UNIGRAM not in (job.metrics() or ()):
            return None
        stored = self.stored(job)
        if job.job_id in self.todo(name) and (stored is None or stored.drifted):
            return self.places.made(job)
        return stored.path if stored else None

    @kept
    def todo(self, *names: str) -> Mapping[str, Job]:
        """Jobs to make for these exhibits (none: for all): records that are asked for and missing, closed over the
        parents whose model is missing."""
        found: dict[str, Job] = {}
        asked = (job for name in names or self.project.exhibits for job in self.project.jobs_of(name))
        waiting = [job for job in asked if self.want(job) == "make"]
        while waiting:
            job = waiting.pop()
            if job.job_id not in found:
                found[job.job_id] = job
                waiting += [parent for parent in job.parents().values() if not self.has_model(parent)]
        return found

    @kept
    def has_model(self, job: Job) -> bool:
        """Whether the model is here with every snapshot that children need, and of rules that serve."""
        updates = {None, *self.project.keep.get(job.job_id, ())}
        return has_model(self.places.root / self.places.model(job), job, updates, self.makes_drifted)


def _drift(path: Path, job: Job) -> list[str]:
    """What has changed since a stored record was made; an unreadable one is left to the reader, who names it."""
    head = glance(path) or {}
    try:
        return drift(job, head["behaviour"], head.get("ancestors", {}))
    except (KeyError, TypeError, AttributeError):
        return []
