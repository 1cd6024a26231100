"""What the Snakemake rules ask: paths, patterns of names, resources, parameters whose change makes a rule run again."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paperlm.data.settings import DataSettings
from paperlm.data.sources import check_present
from paperlm.errors import SpecError, nearest
from paperlm.files import write_json
from paperlm.frozen import digest
from paperlm.jobs import Job, job_kinds
from paperlm.kept import kept
from paperlm.plan.echo import our_settings
from paperlm.plan.measured import measured_methods, places, read_rows
from paperlm.plan.project import Project
from paperlm.plan.scale import JobSize
from paperlm.plan.state import State
from paperlm.plan.table import ArithmeticTable, MeasurementsTable, SettingsTable
from paperlm.record.record import behaviours_of_ancestors

NOTHING = "nothing-to-make"
"A pattern that matches no name."


def one_of(names: Sequence[str]) -> str:
    """Regular expression of names, which are sorted and no two alike. What some begin with is written once: Snakemake
    looks through the whole expression for each file of each job."""
    parts = []
    for _, group in itertools.groupby(names, key=lambda name: name[:1]):
        few = list(group)
        head = os.path.commonprefix([few[0], few[-1]])  # noqa: RUF071 - of characters, not of folders
        rest = f"(?:{one_of([name[len(head) :] for name in few])})" if len(few) > 1 else ""
        parts.append(re.escape(head) + rest)
    return "|".join(parts)


def size_of(job: Job) -> str:
    """Size of the model of a job or of the nearest ancestor that has one; empty: none has."""
    return next(filter(None, (getattr(one, "size", "") for one in (job, *job.ancestors()))), "")


def asked_of(project: Project, job: Job) -> JobSize:
    """Memory, minutes and GPUs of a job by its kind and the size of its model. Raises SpecError for several GPUs that
    cannot share it."""
    found = project.scale.resources.of(job.kind, size := size_of(job))
    if why := job.unshared(max(1, found.gpus.value)):
        raise SpecError(
            f"{project.scales[project.scale.scale]}: resources.jobs: {found.gpus.value} GPUs for {job.kind}"
            f"{f'/{size}' if size else ''}, of which {job.job_id} is one: {why}; give it another number"
        )
    return found


class Workflow:
    """The workflow's view of a project."""

    def __init__(self, project: Project) -> None:
        self.project, self.places, self.state = project, project.places, State(project)
        self.together: Collection[str] = ()
        "Ids of jobs that this call makes: claims on other exhibits wait for them."
        self.datasets: dict[str, DataSettings] = {}
        self._read: dict[str, list[str]] = {}
        "job -> ids of what it reads"
        for job_id, job in self.state.todo().items():
            asked_of(project, job)
            found = {settings.data_id: settings for settings in job.data()}
            self._read[job_id] = list(found)
            self.datasets |= found

    # -- jobs --

    @functools.cached_property
    def kinds(self) -> dict[str, type[Job]]:
        """Kinds of which this project has jobs to make, each of which gets a rule."""
        wanted = {job.kind for job in self.state.todo().values()}
        return {name: kind for name, kind in job_kinds().items() if name in wanted}

    def pattern(self, kind: str) -> str:
        """Regular expression of the names of a kind that the rule may make.

        A record's name holds every setting that can change its number, so a stored one is a source file: no edit of a
        rule and no newer file makes it again. Delete a record to make its job anew.
        """
        return one_of(sorted(name for name, job in self.state.todo().items() if job.kind == kind)) or NOTHING

    def job(self, job_id: str) -> Job:
        """A job of the project."""
        return self.project.jobs[job_id]

    def data_of(self, job_id: str) -> list[str]:
        """Manifests of what the job reads; DataError if local text that it needs is not at hand."""
        return [self._manifest(data_id) for data_id in self._read[job_id]]

    @kept
    def _manifest(self, data_id: str) -> str:
        path = self.places.data(self.datasets[data_id])
        if not self.places.is_file(path):
            check_present(self.datasets[data_id].dataset, self.project.config.local_data)
        return path

    def models_of(self, job_id: str) -> list[str]:
        """Manifests of the parents' models."""
        return list(dict.fromkeys(self.places.manifest(parent) for parent in self.job(job_id).parents().values()))

    def settings(self, job_id: str) -> str:
        """The job as JSON, for `paperlm run --job`."""
        return json.dumps(self.job(job_id).canonical(), separators=(",", ":"))

    def keep(self, job_id: str) -> str:
        """What the job keeps for others beside its end, for `paperlm run --keep`: updates, and `trunk-<update>`."""
        return ",".join(map(str, self.project.keep.get(job_id, ())))

    def rules_of(self, job_id: str) -> str:
        """Digest of the behaviours that the job is made under: a new one makes it again."""
        job = self.job(job_id)
        return digest([job.behaviours(), behaviours_of_ancestors(job)])

    @kept
    def job_size(self, job_id: str) -> JobSize:
        """Memory, minutes and GPUs to ask a cluster for."""
        return asked_of(self.project, self.job(job_id))

    def gpus(self, job_id: str, here: bool = True) -> int:
        """GPUs that a job computes on: as many as its scale says. `here`: on this machine, where it has some but fewer,
        the most of them that can share it, since their number changes no result."""
        asked = self.job_size(job_id).gpus.value
        cards = len(self.state.gpus) if here else 0
        return self.processes(job_id, cards) if 0 < cards < asked else asked

    def processes(self, job_id: str, cards: int) -> int:
        """The most processes that can share a job on so many cards; 1 on none."""
        return next(count for count in range(max(1, cards), 0, -1) if not self.job(job_id).unshared(count))

    def threads_per_job(self, cores: int | None) -> int:
        """Threads a job claims for each of its cards: one on a CPU; on GPUs so many that no card is idle, with as many
        cores or more, and that jobs outnumber cards, and wait for one, only where cores are no multiple of them.

        Snakemake ignores `resources: gpu` unless a limit is given, so the bare command `--cores 8` on one card has to
        be held back by threads.
        """
        if not self.state.gpus or not cores:
            return 1
        return max(1, cores // len(self.state.gpus))

    def side_by_side(self, cores: int, most: int) -> int:
        """What computes at a time on so many cores: the cores; on a scale of GPUs the cards of this machine, or so many
        as its largest job has, `most`, where it has none."""
        return max(1, most, min(cores, len(self.state.gpus))) if self.project.scale.device == "gpu" else cores

    # -- exhibits --

    def inputs(self, name: str) -> list[str]:
        """Files an exhibit is built from: records, or measurement rows of its table."""
        _, exhibit = self.project.exhibit(name)
        if table := getattr(exhibit, "table", ""):
            return self.inputs(table)
        if isinstance(exhibit, MeasurementsTable):
            found = [self.measurement(exhibit.op, case) for case in measured_methods(self.project, name)]
            return list(dict.fromkeys(filter(None, found)))
        return self.state.records(name, self.together)

    def consistency_digest(self) -> str:
        """Changes with the checks of printed numbers that the paper files declare."""
        papers = self.project.papers.items()
        return digest({name: [check.model_dump() for check in paper.consistency] for name, paper in papers})

    def exhibit_digest(self, name: str) -> str:
        """Changes when something changes that the exhibit shows: its own declaration, the jobs of its cells, the state
        of their records, departures, and what the scale says of all exhibits. A word about another one does not."""
        paper, exhibit = self.project.exhibit(name)
        scale, own = self.project.scale, self.project.changes(paper)
        records = {job.job_id: self._state_of(job) for job in self.project.jobs_of(name)}
        table = getattr(exhibit, "table", "")
        return digest(
            {
                "exhibit": exhibit.model_dump(mode="json"),
                "table": self.exhibit_digest(table) if table else "",
                "paper": paper.paper.model_dump(mode="json"),
                "values": [cell.values for cell in self.project.cells(name)],
                "computed": self._computed_from(name),
                "departures": [d.model_dump(mode="json") for d in self.project.deviations(name)],
                "scale": [
                    scale.scale,
                    scale.summary,
                    scale.comparable,
                    scale.claims.model_dump(),
                    self.project.seed_noise(name).model_dump(),
                ],
                "rule": own.diverged.model_dump() if own.diverged else None,
                "except": {c.id: own.except_[c.id] for c in exhibit.claims if c.id in own.except_},
                "records": records,
                "edition": self.project.config.editions.get(name, ""),
            },
            16,
        )

    def _computed_from(self, name: str) -> Any:
        """What a table that is no table of jobs is computed from, beside its own declaration."""
        paper, exhibit = self.project.exhibit(name)
        match exhibit:
            case SettingsTable():
                return [
                    {key: setting.model_dump() for key, setting in our_settings(self.project, name, row).items()}
                    for row in exhibit.lines()
                ]
            case ArithmeticTable():
                return {key: paper.models[key].model_dump() for key in exhibit.models}
            case MeasurementsTable():
                cases = {case for place in places(self.project, name) for case in (place.case, place.measured) if case}
                models = {paper.cases[case].model for case in cases} & set(paper.models)
                measured = {key: paper.cases[key].model_dump() for key in sorted(cases)}
                return [measured, {key: paper.models[key].model_dump() for key in sorted(models)}]
        return None

    def _state_of(self, job: Job) -> list[str] | None:
        """What the exhibit will say of the record: nothing, that it is of earlier rules, or (also of one that is about
        to be made: the digest must not change by that) neither."""
        want = self.state.want(job)
        if want == "absent":
            return None
        return list(self.state.stored(job).drifted) if want == "have" else []

    def ask_again(self) -> None:
        """Snakemake lets a finished exhibit stand when a record beneath it is gone. Give such a one a newer input, so
        that record and exhibit are made again."""
        for name in self.project.exhibits:
            if any(map(self.places.is_file, self.targets(name))):
                jobs = self.project.jobs_of(name)
                gone = [job.job_id for job in jobs if self.state.want(job) == "make" and not self.state.stored(job)]
                if gone:
                    write_json(self.places.root / self.places.again(name), {"gone": gone, "seen": time.time_ns()})

    def again(self, name: str) -> list[str]:
        """What `ask_again` has written for an exhibit, if it ever had to."""
        return [path] if self.places.is_file(path := self.places.again(name)) else []

    def has_claims(self, name: str) -> bool:
        """Whether an exhibit's files include verdicts."""
        return bool(self.project.exhibit(name)[1].claims)

    def targets(self, *names: str, built: bool = False) -> list[str]:
        """Files that stand for these exhibits (none: for all) where `all` or a paper's name asks for them.

        `built`: only those all of whose files are there, for a report.
        """
        found = []
        for name in names or self.project.exhibits:
            found.append(f"paper_tables/{name}.{'csv' if name in self.project.tables else 'svg'}")
            if name in self.curves:
                found.append(f"paper_tables/{name}.curves.svg")
        return [target for target in found if not built or self._is_built(target)]

    def _is_built(self, target: str) -> bool:
        """Whether the files are there that the rule of a target marks for the report."""
        name, _, suffix = target.removeprefix("paper_tables/").partition(".")
        files = [target]
        if suffix == "csv":
            files.append(f"results/report/{name}.html")
        if suffix == "csv" or (suffix == "svg" and self.has_claims(name)):
            files += [f"paper_tables/{name}.{kind}.csv" for kind in ("diff", "claims")]
        return all(map(self.places.is_file, files))

    @functools.cached_property
    def curves(self) -> list[str]:
        """Tables whose jobs have training curves."""
        return [
            name
            for name, (_, table) in self.project.tables.items()
            if table.kind == "jobs" and any(job.has_curve for job in self.project.jobs_of(name))
        ]

    # -- measurements --

    def measurement(self, op: str, case: str) -> str | None:
        """File with the rows of a case: the committed one if it has any, else one that exists or will be made."""
        if case in self._committed_cases(op):
            return self.places.committed_measurements(op)
        local = self.places.measurements(op, case)
        return local if self.state.makes_missing or self.places.is_file(local) else None

    @kept
    def _committed_cases(self, op: str) -> frozenset[str]:
        """Cases with committed rows. They were made on a GPU: the CPU scales measure their own."""
        path = self.places.root / self.places.committed_measurements(op)
        if self.project.scale.device == "cpu" or not path.is_file():
            return frozenset()
        return frozenset(row["case"] for row in read_rows(path))

    @functools.cached_property
    def measurements(self) -> dict[tuple[str, str], list[str]]:
        """(operation, case) that can be measured at this scale -> the methods that tables ask for."""
        found: dict[tuple[str, str], list[str]] = {}
        for name, (_, table) in self.project.tables.items():
            if isinstance(table, MeasurementsTable):
                for case, methods in measured_methods(self.project, name).items():
                    known = found.setdefault((table.op, case), [])
                    known += [method for method in methods if method not in known]
        return found

    def to_measure(self, *names: str) -> list[tuple[str, str]]:
        """(operation, case) that exhibits (none: all) need and that are not measured yet."""
        found: dict[tuple[str, str], None] = {}
        for name in names or self.project.exhibits:
            table = getattr(self.project.exhibit(name)[1], "table", "") or name
            _, spec = self.project.exhibit(table)
            if isinstance(spec, MeasurementsTable):
                for case in measured_methods(self.project, table):
                    path = self.measurement(spec.op, case)
                    if path and not self.places.is_file(path):
                        found[spec.op, case] = None
        return list(found)

    def unknown_target(self, target: str, rules: Iterable[str]) -> str:
        """Message for a target that no rule makes, with the nearest one that some rule does."""
        made = [self.places.made(job) for job in self.state.todo().values()]
        files = {Path(path).name: path for path in [*self._exhibit_files(), *made]}
        near = nearest(Path(target).name, {**files, **{rule: rule for rule in rules}})
        hint = f"; did you mean {files.get(near, near)!r}?" if near else ";"
        papers, example = ", ".join(self.project.papers), next(self._exhibit_files())
        return f"no rule makes {target!r}{hint} Targets are the papers ({papers}) and files such as {example}"

    def _exhibit_files(self) -> Iterator[str]:
        """What the rules of tables and figures write below paper_tables."""
        for name in self.project.exhibits:
            kinds = ["csv"] if name in self.project.tables else ["svg", "png", "csv", "notes.txt"]
            if name in self.project.tables or self.has_claims(name):
                kinds += ["diff.csv", "claims.csv"]
            if name in self.curves:
                kinds += ["curves.svg", "curves.png", "curves.csv", "curves.notes.txt"]
            yield from (f"paper_tables/{name}.{kind}" for kind in kinds)

    def made_by(self, targets: Sequence[str]) -> Collection[str]:
        """Ids of the jobs that a call with these targets makes for exhibits. Without a target Snakemake makes all."""
        if not targets or "all" in targets:
            return self.state.todo()
        named = self.asked(targets)
        return self.state.todo(*named) if named else ()

    def asked(self, arguments: Sequence[str]) -> list[str]:
        """Exhibits that a command line names: a file of theirs, or a paper."""
        found: dict[str, None] = {}
        for argument in arguments:
            if argument in self.project.papers:
                found |= dict.fromkeys(self.project.papers[argument].exhibits())
            elif match := re.fullmatch(r"(?:.*/)?(?:paper_tables|results/report)/(\w+)\.[a-z.]+", argument):
                found[match[1]] = None
        return [name for name in found if name in self.project.exhibits]

    def asked_for(self, arguments: list[str]) -> list[str]:
        """Those of them that are built and have something to show in a terminal."""
        told = [name for name in self.asked(arguments) if name in self.project.tables or self.has_claims(name)]
        # Training curves are made without their table.
        return [name for name in told if self.places.is_file(f"paper_tables/{name}.csv")]
