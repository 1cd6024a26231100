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


class Change(Frozen):
    """A changed value and the reason for it."""

    value: Any
    why: str = Field(min_length=3)


Changes = dict[str, Change]


class SeedNoise(Frozen):
    """Relative standard deviation of a run's perplexity over seeds, used when a cell has a single seed."""

    value: float = Field(gt=0, lt=1)
    source: str


class Gpus(Frozen):
    """GPUs of one job, and why so many."""

    value: int = Field(ge=0)
    source: str = ""
    "where it is said that the published run had so many"
    why: str = ""
    "the reason, where nobody says or there is a better one"

    @model_validator(mode="after")
    def has_a_reason(self) -> Gpus:
        if max(len(self.source), len(self.why)) < 3:
            raise ValueError("say where so many GPUs are published (source), or the reason for them (why)")
        return self


NO_CARD = Gpus(value=0, why="computes on a processor")


class Scaling(Frozen):
    """Speed of several GPUs that share a job, as a share of what each reaches alone, times their number."""

    value: float = Field(gt=0, le=1)
    why: str = Field(min_length=3)


class JobSize(Frozen):
    """What a cluster has to grant one job, all of its processes together, on one machine."""

    mem_mb: int = Field(gt=0)
    runtime: int = Field(gt=0)
    "minutes"
    gpus: Gpus | None = None
    "None: the scale's, of a kind that computes on a card"


class Resources(Frozen):
    """Resources of this scale's jobs. `jobs`: by `<kind>/<size>` or `<kind>`; the others get `default`."""

    gpus: Gpus
    "of a job that computes on a card, unless `jobs` says otherwise, and of a measurement"
    scaling: Scaling | None = None
    "needed where a job has several GPUs"
    prepare: JobSize
    "preparing data"
    default: JobSize
    jobs: dict[str, JobSize] = {}

    @field_validator("jobs")
    @classmethod
    def known_jobs(cls, value: dict[str, JobSize]) -> dict[str, JobSize]:
        for key, asked in value.items():
            kind, slash, size = key.partition("/")
            cls_of_kind = kind_of(_known_kind(kind))
            if slash and size not in ALL_SIZES:
                raise ValueError(unknown("model size", size, ALL_SIZES))
            count = asked.gpus.value if asked.gpus else 0
            if count and not cls_of_kind.on_card:
                raise ValueError(f"{key}: a {kind} job computes on a processor: leave gpus out")
            if count > 1 and not cls_of_kind.distributed:
                raise ValueError(f"{key}: a {kind} job runs in one process, which computes on one GPU, not on {count}")
        return value

    @model_validator(mode="after")
    def one_card_is_the_rule(self) -> Resources:
        for name, asked in (("prepare", self.prepare), ("default", self.default)):
            if asked.gpus is not None:
                raise ValueError(f"{name}: gpus are those of the scale, or of a kind of job: leave them out")
        if self.gpus.value > 1:
            raise ValueError(f"gpus: {self.gpus.value} for all kinds: most run in one process; give them under jobs")
        several = [key for key, asked in self.jobs.items() if asked.gpus and asked.gpus.value > 1]
        if several and self.scaling is None:
            raise ValueError(f"scaling is missing: it tells how fast the GPUs of {several[0]} are together")
        return self

    def of(self, kind: str, size: str) -> JobSize:
        """What a job of a kind on a model of a size gets; `gpus` is given."""
        found = self.jobs.get(f"{kind}/{size}") or self.jobs.get(kind) or self.default
        return found.model_copy(update={"gpus": (found.gpus or self.gpus) if kind_of(kind).on_card else NO_CARD})

    def speed(self, gpus: int) -> float:
        """How many times as fast so many GPUs are as one; 1 without any."""
        share = self.scaling.value if self.scaling else 1.0
        return gpus * share if gpus > 1 else 1.0


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
    benchmarks: Literal["full", "small"] = "full"
    "sizes of measured operations: as declared, or an eighth of each (to try the jobs)"
    claims: Judging = Judging()
    seed_noise: SeedNoise
    resources: Resources

    @model_validator(mode="after")
    def a_cpu_is_no_card(self) -> ScaleSpec:
        cards = {"gpus": self.resources.gpus, **{f"jobs.{key}.gpus": a.gpus for key, a in self.resources.jobs.items()}}
        if wrong := [name for name, gpus in cards.items() if self.device == "cpu" and gpus and gpus.value]:
            raise ValueError(f"resources.{wrong[0]}: the scale computes on a cpu, so it is 0")
        return self

    @model_validator(mode="after")
    def names_exist(self) -> ScaleSpec:
        _known_changes("jobs", self.jobs)
        for size, jobs in self.sizes.items():
            if size not in ALL_SIZES:
                raise ValueError(f"sizes: {unknown('model size', size, ALL_SIZES)}")
            _known_changes(f"sizes.{size}", jobs)
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
