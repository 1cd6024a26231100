"""Kinds of jobs, one file each, found by scanning this folder.

To add one: a new file here with a class that derives from Job and a function `run(job, inputs, machine) -> Result`. It
is then usable as `kind: <name>` in every paper file, and the rule, the verbs and the parametrized tests know it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from paperlm.errors import SpecError, unknown
from paperlm.jobs.base import Inputs, Job, Machine
from paperlm.load import explained
from paperlm.result import Result

__all__ = ["Inputs", "Job", "Machine", "Result", "job_from", "job_kinds", "run_job"]


@functools.cache
def job_kinds() -> dict[str, type[Job]]:
    """Name -> class of every kind in this folder (and in folders appended to `paperlm.jobs.__path__`)."""
    found: dict[str, type[Job]] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        if info.name == "base":
            continue
        module = importlib.import_module(f"{__name__}.{info.name}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == module.__name__ and issubclass(cls, Job):
                if vars(cls).get("kind") != info.name:
                    raise SpecError(
                        f"jobs/{info.name}.py: {cls.__name__}.kind has to be the file's name, {info.name!r}"
                    )
                if not callable(getattr(module, "run", None)):
                    raise SpecError(f"jobs/{info.name}.py: define run(job, inputs, machine) -> Result")
                if info.name in found:
                    raise SpecError(f"jobs/{info.name}.py: two classes derive from Job; one file is one kind")
                found[info.name] = cls
    return found


def kind_of(name: object) -> type[Job]:
    """The class of a kind; SpecError with the nearest known name otherwise."""
    if not isinstance(name, str) or name not in job_kinds():
        raise SpecError(unknown("kind of job", name, job_kinds()))
    return job_kinds()[name]


def job_from(value: Mapping[str, Any]) -> Job:
    """The job that `Job.canonical` describes. SpecError for an unknown kind, ValidationError for bad fields."""
    if not isinstance(value, Mapping) or "kind" not in value:
        raise SpecError(f"a job is written as {{kind: <kind>, ...}}, got {value!r}")
    return kind_of(value["kind"]).model_validate({key: item for key, item in value.items() if key != "kind"})


def parse_job(value: Any) -> Job:
    """As `job_from`, with every problem as one SpecError."""
    try:
        return job_from(value)
    except ValidationError as error:
        raise SpecError(explained(error, kind_of(value["kind"]), f"a job of kind {value['kind']}")) from None


def module_of(job: Job) -> ModuleType:
    """The file of a job's kind."""
    return importlib.import_module(type(job).__module__)


def run_job(job: Job, inputs: Inputs, machine: Machine) -> Result:
    """Do the job. Raises what its kind raises: DataError, CheckpointError, Interrupted, PaperLMError on a full disk."""
    return module_of(job).run(job, inputs, machine)
