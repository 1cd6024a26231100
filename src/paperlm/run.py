"""Make a job: `python -m paperlm run`, by hand and from the workflow's rule alike.

The lock of the job, its inputs checked, the work, its model with a manifest, its record, and a comparison with the
committed record if there is one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paperlm import ranks
from paperlm.data.settings import DataSettings
from paperlm.data.shards import load_manifest
from paperlm.errors import JobError, RecordError, SpecError, unknown
from paperlm.files import discard, gone_beside, temporary_beside
from paperlm.jobs import Inputs, Job, Machine, Result, parse_job, run_job
from paperlm.jobs.base import Stage, Trunk, in_order
from paperlm.locks import held
from paperlm.plan.project import Project
from paperlm.plan.state import State
from paperlm.record.agreement import disagreements
from paperlm.record.environment import begun_with, capture, has_unfinished
from paperlm.record.model_store import Origin, checked_model, has_model, read_manifest, store_model, weights_of
from paperlm.record.places import Places
from paperlm.record.record import DataUsed, Record, drift, read_record, write_record
from paperlm.result import NO_MODEL, Cost
from paperlm.train.gpu_lock import gpus_of_job

LOOK_SECONDS = 10.0
"What jobs on a CPU left in cycles is looked for after so long, which is a fortieth of the time."
_looked = time.monotonic()


@dataclass(frozen=True)
class Parents:
    """What a job works on."""

    models: dict[str, Path]
    "parent's field -> checked folder"
    origin: Origin
    "what goes with those models"
    blocked: str
    "why there is one that left none"


@dataclass(frozen=True)
class Maker:
    """Makes jobs at one scale. `local_data`: folder of the `local:` sets."""

    places: Places
    machine: Machine
    local_data: str = ""
    keep: Mapping[str, tuple[Stage, ...]] = field(default_factory=dict)
    "job id -> its states that children need"
    makes_drifted: bool = False
    "whether a parent's model of earlier rules is made again"

    def with_parents(self, job: Job, remake: bool = False) -> None:
        """The job, after the parents whose models are missing and the data that is not prepared."""
        for name, parent in job.parents().items():
            state = job.snapshot(name)
            kept = in_order((*self._keep(parent), *(() if state is None else (state,))))
            folder = self.places.root / self.places.model(parent)
            # a kill between the two leaves a model without its record
            recorded = (self.places.root / self.places.made(parent)).is_file()
            if not recorded or not has_model(folder, parent, {state, *kept}, self.makes_drifted):
                replace(self, keep={**self.keep, parent.job_id: kept}).with_parents(parent)
        for settings in job.data():
            self.prepare(settings)
        self.make(job, remake)

    def prepare(self, settings: DataSettings) -> None:
        """Prepare data unless it is there."""
        from paperlm.data.items import prepare_any

        manifest = self.places.root / self.places.data(settings)
        if not manifest.is_file():
            prepare_any(settings, manifest.parent, self.local_data)

    def make(self, job: Job, remake: bool = False) -> None:
        """Do the job and store model and record; nothing if another process did it while we waited for its lock.

        Under torchrun the leading process holds the lock for all, and tells the others whether there is work.

        Raises JobError for an input that is missing, altered or another job's, and for processes that cannot share the
        job, RecordError if the new numbers contradict the committed ones, and what the job raises.
        """
        folder = self.places.root / self.places.model(job)
        record_path = self.places.root / self.places.made(job)
        before = _stamp(record_path)
        if why := job.unshared(ranks.world_size()):
            raise JobError(f"{why}: run it without torchrun")
        if ranks.leads():
            for ancestor in job.ancestors():
                self._tidy(ancestor)

        def made_meanwhile() -> bool:
            there = _stamp(record_path) not in (None, before)
            complete = not job.leaves_model or has_model(folder, job, {None, *self._keep(job)})
            return there and complete and not remake

        lock = held(self.places.root / self.places.lock(job), job.job_id) if ranks.leads() else contextlib.nullcontext()
        with lock:
            if ranks.agreed(made_meanwhile):
                if ranks.leads():
                    print(f"{job.job_id}: another process has made it", file=sys.stderr)
                return
            done = self._do(job)
            if done is None:
                return
            record, origin = done
            self._compare(job, record)
            if job.leaves_model:
                store_model(self._building(job), folder, job, record.outcome, origin)
                record = record.model_copy(update={"weights": weights_of(folder, job)})
            write_record(record_path, record)
            discard(self.places.root / self.places.work(job))

    def _tidy(self, job: Job) -> None:
        """Remove what a kill left of a job when it was all but finished: it would not be made again for that."""
        work, record = (self.places.root / place for place in (self.places.work(job), self.places.made(job)))
        left = [p for p in (gone_beside(work), temporary_beside(record)) if p.exists()]
        if left:
            with held(self.places.root / self.places.lock(job), job.job_id):
                for path in left:
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _keep(self, job: Job) -> tuple[Stage, ...]:
        return self.keep.get(job.job_id, ())

    def _building(self, job: Job) -> Path:
        return self.places.root / self.places.work(job) / "model"

    def _do(self, job: Job) -> tuple[Record, Origin] | None:
        started = time.monotonic()
        parents = self._parents(job)
        data = tuple(self.places.root / self.places.data(settings) for settings in job.data())
        manifests = [load_manifest(path, one.data_id) for path, one in zip(data, job.data(), strict=True)]
        work = self.places.root / self.places.work(job)
        work.mkdir(parents=True, exist_ok=True)
        code = begun_with(work) if ranks.leads() else None
        building = self._building(job) if job.leaves_model else None
        if building is not None and ranks.leads():
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
        if parents.blocked and not ranks.leads():
            return None
        if parents.blocked:
            result = Result(outcome="blocked", reason=parents.blocked)
        else:
            inputs = Inputs(data=data, models=parents.models, work=work, model=building, keep=self._keep(job))
            _let_go()
            with gpus_of_job(enabled=self.machine.device != "cpu"), _one_thread(self.machine):
                result = _measured(job, inputs, self.machine)
                if result is None:  # not the leading process of several
                    return None
                environment = capture(self.machine.torch_device(), code)
        if parents.blocked:
            environment = capture(Machine(device="cpu").torch_device(), code)
        record = Record(
            job_id=job.job_id,
            kind=job.kind,
            behaviour=job.behaviours(),
            ancestors=parents.origin.ancestors,
            weights=parents.origin.weights,
            job=job.canonical(),
            outcome=result.outcome,
            reason=result.reason,
            metrics={key: _finite(value) for key, value in result.metrics.items()},
            standard_errors={key: e for key, e in result.standard_errors.items() if _finite(e) is not None},
            series=result.series,
            answers=result.answers,
            labels=list(dict.fromkeys([*parents.origin.labels, *result.labels])),
            versions=result.versions,
            data=[DataUsed(**{key: m[key] for key in DataUsed.model_fields}) for m in manifests],
            cost=result.cost or Cost(wall_seconds=round(time.monotonic() - started, 2)),
            environment=environment,
        )
        labels = dict.fromkeys([*parents.origin.labels, *result.model_labels])
        return record, replace(parents.origin, labels=tuple(labels))

    def _parents(self, job: Job) -> Parents:
        found, labels, blocked, ancestors, weights = {}, [], "", {}, {}
        for name, parent in job.parents().items():
            folder = self.places.root / self.places.model(parent)
            manifest = read_manifest(folder, parent)
            labels += manifest["labels"]
            ancestors |= {parent.job_id: manifest["behaviour"], **manifest["ancestors"]}
            if (outcome := manifest["outcome"]) in NO_MODEL:
                why = f" ({never})" if (never := parent.out_of_reach()) else ""
                blocked = f"{parent.job_id} ended as {outcome.replace('_', ' ')}: there is no model to work on{why}"
            else:
                found[name] = checked_model(folder, parent, job.snapshot(name))
                weights |= weights_of(folder, parent)
        return Parents(found, Origin(tuple(dict.fromkeys(labels)), ancestors, weights), blocked)

    def _compare(self, job: Job, record: Record) -> None:
        """RecordError if a committed record of the same rules says something else."""
        path = self.places.root / self.places.committed(job)
        if not path.is_file():
            return
        committed = read_record(path, job.job_id)
        if drift(job, committed.behaviour, committed.ancestors):
            return
        if wrong := disagreements(committed, record):
            rejected = self.places.root / self.places.made(job)
            rejected = rejected.with_name(f"{job.job_id}.rejected.json")
            write_record(rejected, record)
            raise RecordError(
                f"{job.job_id}: made again, and it contradicts {path}: {'; '.join(wrong)}. The new record is "
                f"{rejected}; python -m paperlm why tells what changed; if it is meant, raise the kind's `behaviour`. "
                "To go on with this one instead, delete the committed record and run the job again: what its "
                "checkpoints hold is not done anew, and tables then show this machine's number"
            )


def _measured(job: Job, inputs: Inputs, machine: Machine) -> Result | None:
    """What the job found; that it does not fit on the card is a result as well, as tables print it. Where unfinished
    work is kept it did fit once: that stays, and the error is one."""
    try:
        return run_job(job, inputs, machine)
    except RuntimeError as error:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(error, torch.cuda.OutOfMemoryError) or ranks.world_size() > 1:
            raise
        if has_unfinished(inputs.work):
            raise
        if inputs.model is not None:
            shutil.rmtree(inputs.model)
            inputs.model.mkdir()
        print(f"{job.job_id}: {str(error).partition(chr(10))[0]}", file=sys.stderr)
    return Result(outcome="out_of_memory")


@contextlib.contextmanager
def _one_thread(machine: Machine) -> Iterator[None]:
    """On a CPU a job has one thread, as it has under Snakemake: how many add up changes the last bits. Who asks for
    more with OMP_NUM_THREADS has them, and the record says so."""
    if "OMP_NUM_THREADS" in os.environ or machine.torch_device().type != "cpu":
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _finite(value: float | int | None) -> float | int | None:
    return None if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


def _let_go() -> None:
    """Free what earlier jobs of this process left in cycles and in the compiler's caches: on a card it would count in
    this job's peak of memory. To look for cycles takes a quarter of a second, and on a CPU they can wait a while."""
    global _looked
    torch = sys.modules.get("torch")
    on_card = torch is not None and torch.cuda.is_initialized()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if on_card or time.monotonic() - _looked > LOOK_SECONDS:
        gc.collect()
        _looked = time.monotonic()
    if on_card:
        torch.cuda.empty_cache()


def _stamp(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None


def run_given(
    root: Path, settings: Mapping[str, Any], scale: str, keep: str, machine: Machine, local_data: str,
    with_parents: bool, again: bool,
) -> None:  # fmt: skip
    """Make a job that no exhibit need have, into the folders of a scale below `root`. keep: updates after which its
    model is kept, separated by commas (`trunk-<update>`: for one to go on from).

    SpecError for another scale or update.
    """
    scales = [path.stem for path in (root / "workflow/scales").glob("*.yaml")]
    if scale not in scales:
        raise SpecError(f"--scale: {unknown('scale', scale, scales)}")
    job = parse_job(settings)
    parts = list(filter(None, keep.split(",")))
    updates = [part.removeprefix("trunk-") for part in parts]
    if not all(update.isdecimal() and int(update) in job.snapshots() for update in updates):
        there = job.snapshots()
        states = f"it has states {there.start} to {there.stop - 1}" if there else "it has none beside its last"
        raise SpecError(f"--keep takes updates of the job separated by commas, got {keep!r}; {states}")
    stages = tuple(Trunk(int(u)) if u != part else int(u) for part, u in zip(parts, updates, strict=True))
    maker = Maker(Places(root, scale), machine, local_data, {job.job_id: stages})
    (maker.with_parents if with_parents else maker.make)(job, again)


def run_named(project: Project, what: str, machine: Machine, with_parents: bool, again: bool) -> None:
    """Make the job of that id, or those of a table or figure whose records are missing. SpecError for another name."""
    state = State(project)
    maker = Maker(project.places, machine, project.config.local_data, project.keep, state.makes_drifted)
    if with_parents and ranks.world_size() > 1:
        raise SpecError("--with-parents is for one process: make the parents first, then the job under torchrun")
    if what not in project.exhibits and (job := project.job_named(what)):
        if not again and ranks.agreed(lambda: state.want(job) == "have"):
            if ranks.leads():
                print(f"{what}: has a record, {state.stored(job).path}; --again makes it once more", file=sys.stderr)
            return
        (maker.with_parents if with_parents else maker.make)(job, again)
        return
    if again and what in project.exhibits:
        raise SpecError("--again is for one job: give its id")
    if what not in project.exhibits:
        raise SpecError(unknown("job, table or figure", what, [*project.exhibits, *project.jobs]))
    if not project.jobs_of(what):
        raise SpecError(f"{what} is built from no job; snakemake measures or computes it: snakemake -n shows how")

    def wanted(job: Job) -> bool:
        stored = state.stored(job)
        return stored is None or bool(stored.drifted and state.makes_drifted)

    for job in project.jobs_of(what):
        if ranks.agreed(functools.partial(wanted, job)):
            (maker.with_parents if with_parents else maker.make)(job)
