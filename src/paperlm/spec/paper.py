"""Paper files, workflow/papers/<paper>.yaml: settings with sources, tables, claims, deviations."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from paperlm.errors import unknown
from paperlm.spec.run import Frozen, RunConfig

SETTINGS = set(RunConfig.model_fields) - {"size", "norm", "seed"}
"Settings a paper, size or scale may give; norm comes from a table's row, size from its column, seed from config.yaml."


class Setting(Frozen):
    """A value and where it comes from: a place in the paper, the authors' code, or `assumed` with a reason."""

    value: Any
    source: str = Field(min_length=3)


Settings = dict[str, Setting]


def known_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for a setting that no run has."""
    for key in settings:
        if key not in SETTINGS:
            raise ValueError(unknown("setting", key, SETTINGS))
    return settings


class PaperInfo(Frozen):
    """Identity of the paper."""

    id: str = Field(pattern=r"^[a-z0-9]+$")
    title: str
    arxiv: str
    code: str
    licence_note: str = ""


class SizeSpec(Frozen):
    """One model size of the paper: settings, and the Post-LN fraction that Mix-LN uses at it."""

    settings: Settings = {}
    post_fraction: Setting

    _known = field_validator("settings")(known_settings)


class RowSpec(Frozen):
    """One row of a table of runs: a normalization method, or the label row of training tokens."""

    norm: dict[str, Any] | None = None
    label: Literal["tokens"] | None = None
    source: str
    settings: Settings = {}
    scales: list[str] = []
    "an extra row that the paper does not print, run at these scales only; no claim reads it"

    _known = field_validator("settings")(known_settings)

    @model_validator(mode="after")
    def one_kind(self) -> RowSpec:
        if (self.norm is None) == (self.label is None):
            raise ValueError("give exactly one of norm and label")
        return self


class ColumnSpec(Frozen):
    """One column of a table of runs."""

    size: str


class ClaimSpec(Frozen):
    """A statement of the paper about its table, as an expression over the table's cells (paperlm.tables.claims)."""

    id: str
    says: str
    expression: str
    published: bool
    "whether the printed numbers satisfy it; False documents a contradiction inside the paper"


class TableSpec(Frozen):
    """A printed table. kind `runs`: one pre-training run per cell; kind `settings`: the paper's hyper-parameters."""

    title: str
    number: str
    kind: Literal["runs", "settings"]
    published: str
    claims_name: str
    "how claims call this table, e.g. M1"
    metric: str = "ppl_paper"
    "the record's metric that is printed and compared with the published number"
    claims_metric: str = "ppl_true"
    "the record's metric that claims are judged on"
    better: Literal["lower", "higher"] = "lower"
    rows: dict[str, RowSpec] = {}
    columns: dict[str, ColumnSpec] = {}
    sizes: list[str] = []
    "kind settings: one row per size"
    claims: list[ClaimSpec] = []
    notes: list[str] = []


class Deviation(Frozen):
    """Something done differently from the paper or its code, and why; printed under the tables it touches."""

    what: str
    why: str
    touches: list[str]
    scales: list[str] = []
    "scales at which it is done; empty means all"


class PaperSpec(Frozen):
    """A whole paper file."""

    paper: PaperInfo
    settings: Settings
    sizes: dict[str, SizeSpec]
    tables: dict[str, TableSpec]
    deviations: list[Deviation] = []

    _known = field_validator("settings")(known_settings)

    @model_validator(mode="after")
    def names_resolve(self) -> PaperSpec:
        for name, table in self.tables.items():
            for label, column in table.columns.items():
                if column.size not in self.sizes:
                    raise ValueError(f"tables.{name}.columns.{label}: " + unknown("size", column.size, self.sizes))
            for size in table.sizes:
                if size not in self.sizes:
                    raise ValueError(f"tables.{name}.sizes: " + unknown("size", size, self.sizes))
        for deviation in self.deviations:
            for touched in deviation.touches:
                if touched not in self.tables:
                    raise ValueError("deviations.touches: " + unknown("table", touched, self.tables))
        return self
