"""Toy kinds of jobs in a folder of their own, found by scanning; and a process that makes one.

`python support_jobs.py KINDS ROOT JOB` makes a job of them as `paperlm run` does, in a process that can be killed.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from paperlm import jobs
from paperlm.jobs import Job, parse_job
from paperlm.jobs.base import Machine
from paperlm.record.places import Places
from paperlm.record.record import Record, read_record, write_record
from paperlm.run import Maker

TOY_MODEL = '''
"""Counts to a number, remembering how far it got; the count is its model."""

import json
import os
import time
from typing import ClassVar, Literal

from paperlm.files import write_json
from paperlm.jobs.base import Job
from paperlm.result import Result, Series


class ToyModel(Job):
    kind: ClassVar[str] = "toy_model"
    summary: ClassVar[str] = "counts"
    leaves_model: ClassVar[bool] = True

    steps: int = 3
    seed: int = 0
    ends: Literal["trained", "not_finite"] = "trained"

    def slug(self):
        return f"toy-s{self.seed}"

    def snapshots(self):
        return range(self.steps)


def run(job, inputs, machine):
    far = inputs.work / "count.json"
    start = count = json.loads(far.read_text()) if far.is_file() else 0
    while count < job.steps:
        if count in inputs.keep:
            (inputs.model / f"at-{count}").mkdir(exist_ok=True)
            (inputs.model / f"at-{count}" / "config.json").write_text(str(count))
        count += 1
        write_json(far, count)
        time.sleep(float(os.environ.get("TOY_PAUSE", 0)))
    if job.ends == "trained":
        (inputs.model / "config.json").write_text(str(count))
        (inputs.model / "weights.bin").write_bytes(bytes(range(100)))
    value = job.seed + count + float(os.environ.get("TOY_ERROR", 0))
    print("went on from", start, flush=True)
    errors = {"count": 0.5, "lost": float("nan"), "unknown": None}
    return Result(outcome=job.ends, metrics={"count": value, "lost": float("nan")}, standard_errors=errors)
'''

TOY_NUMBER = '''
"""Reads the count of a model."""

from typing import ClassVar

from paperlm.jobs.base import At, Job, parent
from paperlm.result import Result


class ToyNumber(Job):
    kind: ClassVar[str] = "toy_number"
    summary: ClassVar[str] = "reads a count"

    of: parent("toy_model")
    at: At = "end"
    factor: float = 1.0

    def slug(self):
        return f"number-{self.of.slug()}"


def run(job, inputs, machine):
    count = int((inputs.models["of"] / "config.json").read_text())
    return Result(outcome="measured", metrics={"value": job.factor * count})
'''

TOY_CHAIN = '''
"""Works on a pre-training run or on another of its kind."""

from typing import ClassVar

from paperlm.jobs.base import Job, parent


class ToyChain(Job):
    kind: ClassVar[str] = "toy_chain"
    summary: ClassVar[str] = "a link"

    of: parent("pretrain", "toy_chain")

    def slug(self):
        return "link"


def run(job, inputs, machine):
    raise NotImplementedError
'''


def write_kinds(folder: Path) -> Path:
    """The toy kinds as files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("toy_model", TOY_MODEL), ("toy_number", TOY_NUMBER), ("toy_chain", TOY_CHAIN)):
        (folder / f"{name}.py").write_text(text)
    return folder


TOY_PAPER = """
paper: {id: toy, title: A toy, arxiv: "0", code: none}
jobs:
  model: {kind: toy_model, settings: {steps: {value: 4, source: a toy}}}
  early: {kind: toy_number, of: model, settings: {at: {value: 2, source: a toy}}}
  number: {kind: toy_number, of: model}
tables:
  toy_table1:
    title: Counts
    number: Table 1
    kind: jobs
    job: number
    metric: value
    rows:
      once: {source: a toy}
      twice: {source: a toy, settings: {number: {factor: {value: 2.0, source: a toy}}}}
    columns: {count: {}, early: {job: early}}
    claims_name: T1
    claims:
      - {id: TOY-1, says: Twice is more, expression: "T1['twice','count'] > T1['once','count']", published: null}
  toy_table2:
    title: Counts of models
    number: Table 2
    kind: jobs
    job: model
    metric: count
    rows: {A: {source: a toy}}
    columns: {count: {}}
"""


def write_paper(root: Path) -> Path:
    """A paper of two tables of toys, in place of the papers that `root` has."""
    folder = root / "workflow/papers"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.yaml"):
        path.unlink()
    (folder / "toy.yaml").write_text(TOY_PAPER)
    return root


def maker(root: Path, **more: object) -> Maker:
    """A maker of jobs at the smoke scale below `root`."""
    return Maker(Places(root, "smoke"), Machine(device="cpu", progress=False), **more)


def model(**settings: object) -> Job:
    return parse_job({"kind": "toy_model", **settings})


def number(of: Job | None = None, **settings: object) -> Job:
    return parse_job({"kind": "toy_number", "of": (of or model()).canonical(), **settings})


def made(root: Path, job: Job) -> Record:
    return read_record(root / Places(root, "smoke").made(job), job.job_id)


def folder_of(root: Path, job: Job) -> Path:
    return root / Places(root, "smoke").model(job)


def commit(root: Path, job: Job, **changes: object) -> Path:
    """Make a job, move its record to the committed ones with changes, and remove everything else of it."""
    maker(root).with_parents(job)
    places = Places(root, "smoke")
    path = root / places.committed(job)
    write_record(path, made(root, job).model_copy(update=changes))
    shutil.rmtree(root / "results")
    return path


if __name__ == "__main__":
    kinds, root, job = sys.argv[1:]
    jobs.__path__.append(kinds)
    maker(Path(root)).make(jobs.parse_job(json.loads(job)))
