"""What jobs took, here or on the machine that made the reference: for estimates only.

The reference is never an input of a table: what a claim says of the time that would decide it rests on records alone.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from paperlm.errors import PaperLMError, RecordError
from paperlm.files import glance, glance_lines, read_sealed, write_sealed
from paperlm.frozen import Frozen
from paperlm.jobs import Job, job_kinds, parse_job
from paperlm.plan.project import Project
from paperlm.record.calibration import Calibration, calibrated, stored
from paperlm.record.environment import cpu_name
from paperlm.result import Cost

WHAT = "costs of a reference"
MEASURE = "measure"
"What measurements are called among the kinds of jobs: the name of their rule."

Known = dict[str, dict[str, list[tuple[str, float]]]]
"Kind -> name without seed and hash -> (CPU or card, wall seconds) of each record."

Reference = Literal["none", "stored", "measured"]
"""Whether the costs of the reference stand in where no record says, and how fast this machine then counts: `stored`, as
it was measured before, else like the reference's; `measured`, measured now if it was not before, which loads torch."""


class ReferenceCosts(Frozen):
    """The file docs/reference/<scale>/costs.json."""

    machine: Calibration
    seconds: dict[str, dict[str, Annotated[float, Field(ge=0)]]] = Field(min_length=1)
    "kind -> name without seed and hash -> median wall seconds"


class Costs:
    """Seconds that jobs are expected to take at a project's scale, each on one card or processor: those of a record
    that several shared are taken times the speed of so many (`Resources.speed`).

    A job's own record comes before all; then records at hand before the reference, and jobs of the same name but for
    seed and hash before others of the kind.
    Seconds of this model of CPU and of GPUs are taken as they are, those of the reference's CPU times the ratio of the
    two calibrations. Those of a third CPU, of which no calibration is known, are taken as they are.
    """

    def __init__(self, project: Project, reference: Reference) -> None:
        """Raises RecordError for a damaged file of the reference."""
        self._root, self._measure = project.root, reference == "measured"
        self._reference = None if reference == "none" else _read(project.root / project.places.costs)
        self._here = _records(project)
        self._carried = False
        self._project = project
        self._other_scales, self._rated, self._uncounted = set(), set(), set()

    def of_job(self, job: Job) -> float | None:
        """Seconds of a job; None if nothing says. One that was made before takes what it took: others of its name may
        have other updates."""
        if found := self._made.get(job.job_id):
            return statistics.median(seconds * self._factor(device) for device, seconds in found)
        if job.out_of_reach():
            return 0.0  # it is blocked as soon as it begins
        name, flops = like(job.job_id), job.flops()
        known = any(name in costs.get(job.kind, {}) for costs in (self._there, self._here))
        if flops and not known and (paces := _of_kind(self._paces, job)):
            return flops * _usual(_nearest(paces, flops))
        found = self._of(job.kind, name)
        if found is None and flops and (paces := _of_kind(self._elsewhere, job)):
            near = _nearest(paces, flops)
            self._other_scales |= {pace.scale for pace in near}
            self._rated |= {job.kind}
            return flops * _usual(near)
        size = _of_a_token(job) if found is None else None
        if size and (paces := self._elsewhere_uncounted.get(job.kind)):
            # where nobody counts its operations: what the longest took, in proportion for a larger model
            near = _nearest(paces, size)
            found = max(pace.rate * max(pace.flops, size) for pace in near)
            self._uncounted |= {job.kind}
            self._other_scales |= {pace.scale for pace in near}
        return found

    def of_measurement(self, op: str, case: str) -> float | None:
        """Seconds of a measured case with all its methods; None if nothing says."""
        return self._of(MEASURE, f"{op}/{case}")

    def _of(self, kind: str, name: str) -> float | None:
        here, there = self._here.get(kind, {}), self._there.get(kind, {})
        for found in (here.get(name), there.get(name), [*chain(*here.values())], [*chain(*there.values())]):
            if found:
                return statistics.median(seconds * self._factor(cpu) for cpu, seconds in found)
        return None

    @functools.cached_property
    def _made(self) -> dict[str, list[tuple[str, float]]]:
        """Job id -> device and seconds of its records at hand."""
        found: dict[str, list[tuple[str, float]]] = {}
        for head in _heads(self._project):
            found.setdefault(head.job_id, []).append((head.device, head.seconds))
        return found

    @functools.cached_property
    def _paces(self) -> dict[str, list[_Pace]]:
        """Kind -> of this scale's records at hand that count their operations."""
        return _paces(self._project, [self._project.scale.scale])

    @functools.cached_property
    def _elsewhere(self) -> dict[str, list[_Pace]]:
        """The same of other scales on GPUs, for a scale on GPUs."""
        return _paces(self._project, self._others_on_gpus)

    @functools.cached_property
    def _elsewhere_uncounted(self) -> dict[str, list[_Pace]]:
        """Kind whose operations are not counted -> of records of such scales, by `_of_a_token` in their place."""
        found: dict[str, list[_Pace]] = {}
        for scale, head in ((s, head) for s in self._others_on_gpus for head in _heads(self._project, s)):
            if not _counted(head.kind) and (job := head.parsed) and (size := _of_a_token(job)):
                found.setdefault(head.kind, []).append(_Pace(scale, head.seconds / size, size))
        return found

    @functools.cached_property
    def _others_on_gpus(self) -> list[str]:
        """Other scales on GPUs, for a scale on GPUs."""
        project = self._project
        others = [scale for scale in project.scales if scale != project.scale.scale]
        if project.scale.device != "gpu":
            return []
        return [scale for scale in others if project.load_scale(scale).device == "gpu"]

    @functools.cached_property
    def _there(self) -> Known:
        if self._reference is None:
            return {}
        cpu = self._reference.machine.cpu
        return {
            kind: {name: [(cpu, seconds)] for name, seconds in names.items()}
            for kind, names in self._reference.seconds.items()
        }

    def _factor(self, device: str) -> float:
        if self._reference is None or device != self._reference.machine.cpu or device == cpu_name():
            return 1.0
        self._carried = True
        return 1.0 if self._own is None else self._own.step_seconds / self._reference.machine.step_seconds

    @functools.cached_property
    def _own(self) -> Calibration | None:
        if (known := stored(self._root)) is not None or not self._measure:
            return known
        print("measuring how fast this machine is, once: a few seconds", file=sys.stderr)
        return calibrated(self._root)

    @property
    def basis(self) -> str:
        """What the seconds that were asked for so far rest on."""
        if self._other_scales:
            scales, kinds = ", ".join(sorted(self._other_scales)), ", ".join(sorted(self._uncounted))
            parts = [f"by operations, at the rate that records of scale {scales} reached"] * bool(self._rated)
            parts += [f"{kinds} as the longest of scale {scales}, in proportion to their models"] * bool(kinds)
            return f"{'' if self._rated else 'with '}{'; '.join(parts)}"
        if not self._carried:
            return "by recorded costs"
        there = f"those of {self._reference.machine.cpu} on {self._reference.machine.date}"
        if self._own is None:
            return f"by {there}, as they are: python -m paperlm plan measures how fast this machine is"
        return f"by {there}, times {self._factor(self._reference.machine.cpu):.2g} for this machine"


def like(job_id: str) -> str:
    """A job's name without hash and seed: jobs of one such name take about as long."""
    parts = job_id.split("-")[:-1]
    return "-".join(part for part in parts if not (part.startswith("s") and part[1:].isdigit()))


def write_costs(project: Project) -> None:
    """Write the reference's file from the records that this model of CPU made, and its calibration.

    None is written where there is no such record; committed records of GPUs say themselves what they cost. What the
    file said of other jobs of the project is kept, of another CPU times the ratio of the two calibrations.
    """
    mine = {
        kind: {name: [seconds for cpu, seconds in found if cpu == cpu_name()] for name, found in names.items()}
        for kind, names in _records(project).items()
    }
    seconds = {
        kind: {name: statistics.median(values) for name, values in names.items() if values}
        for kind, names in mine.items()
        if any(names.values())
    }
    if not seconds:
        return
    machine = calibrated(project.root)
    if (before := _read(project.root / project.places.costs)) is not None:
        ratio = machine.step_seconds / before.machine.step_seconds if before.machine.cpu != machine.cpu else 1.0
        declared = {like(job_id) for job_id in project.jobs}
        for kind, names in before.seconds.items():
            kept = {name: s * ratio for name, s in names.items() if kind == MEASURE or name in declared}
            seconds[kind] = kept | seconds.get(kind, {})
    rounded = {
        kind: {name: float(f"{value:.4g}") for name, value in sorted(names.items())}
        for kind, names in sorted(seconds.items())
        if names
    }
    costs = ReferenceCosts(machine=machine, seconds=rounded)
    write_sealed(project.root / project.places.costs, WHAT, costs.model_dump())


def _read(path: Path) -> ReferenceCosts | None:
    if not path.exists() and not path.is_symlink():
        return None
    remedy = "restore it with git checkout, or delete it: then only records made here say how long jobs take"
    found = read_sealed(path, WHAT, ["machine", "seconds"], RecordError, remedy)
    try:
        return ReferenceCosts(machine=found["machine"], seconds=found["seconds"])
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "the file"
        raise RecordError(f"{path}: no costs of a reference ({where}: {error.errors()[0]['msg']}); {remedy}") from None


def _records(project: Project) -> Known:
    """Every record at this scale, and every case that was measured here."""
    found: Known = {}
    for kind, name, device, seconds in (*_of_jobs(project), *_of_measurements(project)):
        found.setdefault(kind, {}).setdefault(name, []).append((device, seconds))
    return found


@dataclass(frozen=True)
class _Head:
    """What a record says of its cost."""

    kind: str
    job_id: str
    device: str
    cost: Cost
    speed: float
    "of its processes together, that of one being 1"
    outcome: Any
    job: Any
    "as they are in the record"

    @property
    def seconds(self) -> float:
        """That one card or processor would have taken."""
        return self.cost.wall_seconds * self.speed

    @property
    def name(self) -> str:
        """The job's, without seed and hash."""
        return like(self.job_id)

    @property
    def flops(self) -> float | None:
        """Operations that it counted; of a kind that counts none while it runs, those of its job."""
        if self.cost.flops or not _counted(self.kind) or self.outcome not in ("trained", "measured"):
            return self.cost.flops  # one that diverged may have stopped early
        return self.parsed.flops() if self.parsed else None

    @functools.cached_property
    def parsed(self) -> Job | None:
        """The record's job; None where it is of another form of the kind."""
        try:
            return parse_job(self.job)
        except (PaperLMError, ValueError):
            return None


def _heads(project: Project, scale: str = "") -> Iterator[_Head]:
    """Records at a scale, this one unless another is named, that say what they cost; who reads a damaged one for its
    numbers names it."""
    scale = scale or project.scale.scale
    speed = project.load_scale(scale).resources.speed
    for folder in (f"results/{scale}", f"paper_tables/records/{scale}"):
        for path in sorted((project.root / folder).glob("*/*.json")):
            head = glance(path) or {}
            try:
                made, cost = head["environment"], Cost.model_validate(head["cost"])
                device = made["cpu"] if made["device"] == "CPU" else made["device"]
                job_id, kind = str(head["job_id"]), str(head["kind"])
                outcome, job = head.get("outcome"), head.get("job")
                found = _Head(kind, job_id, str(device), cost, speed(cost.world_size), outcome, job)
            except (LookupError, TypeError, ValidationError):
                continue
            if cost.wall_seconds and found.outcome not in ("blocked", "out_of_memory"):
                yield found


def _counted(kind: str) -> bool:
    """Whether jobs of a kind say how many operations they are."""
    return kind in job_kinds() and job_kinds()[kind].flops is not Job.flops


def _of_a_token(job: Job) -> float | None:
    """Operations to train on a token of the model that a job works on, of one from elsewhere six for each weight; None
    where nobody says how large it is."""
    model = next((one for one in (job, *job.ancestors()) if one.kind == "pretrain"), None)
    if model:
        return model.flops_of_a_token(model.seq_len)
    return 6.0 * count if (count := job.weight_count()) else None


@dataclass(frozen=True)
class _Pace:
    """Seconds per operation that a record reached, and its operations."""

    scale: str
    rate: float
    flops: float


def _paces(project: Project, scales: list[str]) -> dict[str, list[_Pace]]:
    found: dict[str, list[_Pace]] = {}
    for scale in scales:
        for head in _heads(project, scale):
            if flops := head.flops:
                found.setdefault(head.kind, []).append(_Pace(scale, head.seconds / flops, flops))
    return found


def _of_kind(paces: dict[str, list[_Pace]], job: Job) -> list[_Pace] | None:
    """Those of the kind that a job is paced as, which is of longer jobs, before those of its own."""
    return paces.get(job.paced_as) or paces.get(job.kind)


def _nearest(paces: list[_Pace], flops: float) -> list[_Pace]:
    """Those of about as many operations, or of as near to it as there are: small models do not fill a card, and of a
    short job much is not training."""
    distance = [abs(math.log(pace.flops / flops)) for pace in paces]
    limit = min(distance) + math.log(2)
    return [pace for pace, one in zip(paces, distance, strict=True) if one <= limit]


def _usual(paces: list[_Pace]) -> float:
    """The rate that a quarter of them reached or beat: others may have shared their card, of which no record tells."""
    rates = sorted(pace.rate for pace in paces)
    return rates[(len(rates) - 1) // 4]


def _of_jobs(project: Project) -> Iterator[tuple[str, str, str, float]]:
    for head in _heads(project):
        yield head.kind, head.name, head.device, head.seconds


def _of_measurements(project: Project) -> Iterator[tuple[str, str, str, float]]:
    """Of each case one row: all of them hold the seconds of the whole case (`paperlm.bench.measure_case`)."""
    for path in sorted(project.root.glob(f"results/{project.scale.scale}/bench/*/*.jsonl")):
        try:
            row = glance_lines(path)[0]
            name, device, seconds = f"{row['op']}/{row['case']}", str(row["device"]), float(row["case_seconds"])
        except (LookupError, TypeError, ValueError):
            continue
        if device.startswith("cpu ("):  # `cpu (AMD EPYC, 1 thread)`
            device = device.removeprefix("cpu (").rpartition(", ")[0]
        yield MEASURE, name, device, seconds
