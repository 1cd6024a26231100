"""Scale files, workflow/scales/<scale>.yaml: what a scale changes, and what that voids."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from paperlm.errors import unknown
from paperlm.norms import norm_methods
from paperlm.spec.run import Frozen
from paperlm.spec.table import known_settings


class Change(Frozen):
    """A changed value and the reason for it."""

    value: Any
    why: str = Field(min_length=3)


class SeedNoise(Frozen):
    """Relative standard deviation of a run's perplexity over seeds, used when a cell has a single seed."""

    value: float = Field(gt=0, lt=1)
    source: str


class ClaimRule(Frozen):
    """Which claims this scale may judge. `none`: judges nothing, for the reason given."""

    judge: Literal["all", "none"] = "all"
    why: str = ""
    except_: dict[str, str] = Field({}, alias="except")
    "claim id -> reason why this scale cannot judge it"


class JobSize(Frozen):
    """What a cluster has to grant one pre-training job."""

    mem_mb: int = Field(gt=0)
    runtime: int = Field(gt=0)
    "minutes"


class Resources(Frozen):
    """Resources of this scale's pre-training jobs; sizes not named get `default`."""

    gpus: int = Field(ge=0)
    prepare: JobSize
    "tokenizing the text"
    default: JobSize
    sizes: dict[str, JobSize] = {}


class ScaleSpec(Frozen):
    """A whole scale file."""

    scale: str = Field(pattern=r"^[a-z][a-z0-9]*$")
    summary: str
    comparable: bool
    "True: absolute numbers may be compared with the published ones"
    device: Literal["cpu", "gpu"]
    "gpu: a run that has no record is only started where there is a GPU (config key run_missing)"
    settings: dict[str, Change] = {}
    sizes: dict[str, dict[str, Change]] = {}
    methods: dict[str, dict[str, Change]] = {}
    "norm method -> option -> value"
    benchmarks: Literal["full", "small"] = "full"
    "sizes of measured operations: as declared, or an eighth of each (to try the jobs)"
    claims: ClaimRule = ClaimRule()
    seed_noise: SeedNoise
    resources: Resources

    _known = field_validator("settings")(known_settings)

    @field_validator("sizes")
    @classmethod
    def known_size_settings(cls, value: dict[str, dict[str, Change]]) -> dict[str, dict[str, Change]]:
        for settings in value.values():
            known_settings(settings)
        return value

    @field_validator("methods")
    @classmethod
    def known_methods(cls, value: dict[str, dict[str, Change]]) -> dict[str, dict[str, Change]]:
        for method in value:
            if method not in norm_methods():
                raise ValueError(unknown("norm method", method, norm_methods()))
        return value
