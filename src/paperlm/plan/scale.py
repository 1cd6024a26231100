"""Scale files, workflow/scales/<scale>.yaml: what a scale changes for every paper. They know no paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from paperlm.errors import SpecError, unknown
from paperlm.frozen import Frozen
from paperlm.jobs import kind_of
from paperlm.jobs.base import parent_kinds
from paperlm.load import parse_part
from paperlm.models.sizes import ALL_SIZES
from paperlm.norms import build_method, needed_options


class Change(Frozen):
    """A changed value and the reason for it."""

    value: Any
    why: str = Field(min_length=3)


Changes = dict[str, Change]


class SeedNoise(Frozen):
    """Relative standard deviation of a run's perplexity over seeds, used when a cell has a single seed."""

    value: float = Field(gt=0, lt=1)
    source: str


class JobSize(Frozen):
    """What a cluster has to grant one job."""

    mem_mb: int = Field(gt=0)
    runtime: int = Field(gt=0)
    "minutes"


class Resources(Frozen):
    """Resources of this scale's jobs. `jobs`: by `<kind>/<size>` or `<kind>`; the others get `default`."""

    gpus: int = Field(ge=0)
    prepare: JobSize
    "preparing data"
    default: JobSize
    jobs: dict[str, JobSize] = {}

    @field_validator("jobs")
    @classmethod
    def known_jobs(cls, value: dict[str, JobSize]) -> dict[str, JobSize]:
        for key in value:
            kind, slash, size = key.partition("/")
            _known_kind(kind)
            if slash and size not in ALL_SIZES:
                raise ValueError(unknown("model size", size, ALL_SIZES))
        return value

    def of(self, kind: str, size: str) -> JobSize:
        """What a job of a kind on a model of a size gets."""
        return self.jobs.get(f"{kind}/{size}") or self.jobs.get(kind) or self.default


class Judging(Frozen):
    """Whether this scale may judge claims at all. `none`: it judges nothing, for the reason given."""

    judge: Literal["all", "none"] = "all"
    why: str = ""


class ScaleSpec(Frozen):
    """A whole scale file."""

    scale: str = Field(pattern=r"^[a-z][a-z0-9]*$")
    summary: str
    comparable: bool
    "True: absolute numbers may be compared with the published ones"
    device: Literal["cpu", "gpu"]
    "gpu: a job that has no record is only started where there is a GPU (config key run_missing)"
    jobs: dict[str, Changes] = {}
    "kind of job -> setting -> value"
    sizes: dict[str, dict[str, Changes]] = {}
    "model size -> kind of job -> setting -> value"
    norms: dict[str, Changes] = {}
    "norm method -> option -> value, in rows that a paper prints"
    benchmarks: Literal["full", "small"] = "full"
    "sizes of measured operations: as declared, or an eighth of each (to try the jobs)"
    claims: Judging = Judging()
    seed_noise: SeedNoise
    resources: Resources

    @model_validator(mode="after")
    def names_exist(self) -> ScaleSpec:
        _known_changes("jobs", self.jobs)
        for size, jobs in self.sizes.items():
            if size not in ALL_SIZES:
                raise ValueError(f"sizes: {unknown('model size', size, ALL_SIZES)}")
            _known_changes(f"sizes.{size}", jobs)
        for method, changes in self.norms.items():
            try:
                base = {"base": {"name": "pre_ln"}} if "base" in needed_options(method, changes) else {}
                build_method({"name": method, **base, **{option: change.value for option, change in changes.items()}})
            except SpecError as error:
                raise ValueError(f"norms: {error}") from None
        return self


def _known_changes(place: str, jobs: dict[str, Changes]) -> None:
    for kind, changes in jobs.items():
        try:
            known_settings(_known_kind(kind), changes)
        except ValueError as error:
            raise ValueError(f"{place}.{kind}: {error}") from None


def known_settings(kind: str, settings: Mapping[str, Any]) -> None:
    """ValueError for a setting that a kind of job does not have, and for a value that the setting cannot have.

    `settings`: name -> what has the value as its `value`. Size, norm, seed and parents are no settings: the exhibit's
    rows and columns, config.yaml and the paper's `jobs` give them. What settings say together is checked where a cell
    has all of them.
    """
    cls = kind_of(kind)
    allowed = set(cls.model_fields) - {"size", "norm", "seed"} - set(parent_kinds(cls))
    for key in settings:
        if key not in allowed:
            raise ValueError(unknown("setting", key, allowed))
    # Which states there are, and what share 1/2 means, says the run that the cell's model is of (resolve).
    parse_part({key: given.value for key, given in settings.items() if key != "at"}, cls)


def _known_kind(kind: str) -> str:
    try:
        return kind_of(kind).kind
    except SpecError as error:
        raise ValueError(str(error)) from None
