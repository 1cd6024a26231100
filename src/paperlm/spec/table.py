"""Tables of a paper file. `kind` says where the numbers come from: runs, settings, arithmetic or measurements."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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

Printed = bool | Literal["not found"]
"Whether the paper prints a row or column; not found: it does, but no source with its numbers was found."


def known_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for a setting that no run has."""
    for key in settings:
        if key not in SETTINGS:
            raise ValueError(unknown("setting", key, SETTINGS))
    return settings


class Condition(Frozen):
    """What has to be true for a claim to be tested at all, and why."""

    expression: str
    why: str


class ClaimSpec(Frozen):
    """A statement about a table, as an expression over the table's cells (paperlm.tables.claims)."""

    id: str
    says: str
    expression: str
    published: bool | None
    "whether the printed numbers satisfy it; False documents a contradiction inside the paper; null: they do not say"
    given: Condition | None = None
    note: str = ""
    "added to the verdict's reason"


class Table(Frozen):
    """What every kind of table has."""

    title: str
    number: str
    published: str = ""
    "the printed table; empty if the paper prints none"
    edition: str = ""
    "value of the printed file's column Edition that is compared (config key `editions` overrides it)"
    claims_name: str
    "how claims call this table, e.g. M1"
    claims: list[ClaimSpec] = []
    notes: list[str] = []


# -- kind: runs -------------------------------------------------------------------------------------------------------


class RunRow(Frozen):
    """One row of a table of runs: a normalization method, or the label row of training tokens."""

    norm: dict[str, Any] | None = None
    label: Literal["tokens"] | None = None
    source: str
    settings: Settings = {}
    scales: list[str] = []
    "an extra row that the paper does not print, run at these scales only; no claim reads it"

    _known = field_validator("settings")(known_settings)

    @model_validator(mode="after")
    def one_kind(self) -> RunRow:
        if (self.norm is None) == (self.label is None):
            raise ValueError("give exactly one of norm and label")
        return self

    @property
    def printed(self) -> Printed:
        """Whether the paper prints the row."""
        return not self.scales


class RunColumn(Frozen):
    """One column of a table of runs."""

    size: str
    printed: Literal[True] = True


class RunsTable(Table):
    """One pre-training run per cell and seed."""

    kind: Literal["runs"]
    metric: str = "ppl_paper"
    "the record's metric that is printed and compared with the published number"
    claims_metric: str = "ppl_true"
    "the record's metric that claims are judged on"
    seeds: dict[str, int] = {}
    "scale -> how many seeds are run there at least, whatever config.yaml says: what its figures need"
    rows: dict[str, RunRow]
    columns: dict[str, RunColumn]


# -- kind: settings ---------------------------------------------------------------------------------------------------


class SettingsTable(Table):
    """The paper's hyper-parameters, a row per size."""

    kind: Literal["settings"]
    sizes: list[str]


# -- kind: arithmetic -------------------------------------------------------------------------------------------------


class ModelSpec(Frozen):
    """A published model as arithmetic sees it: vocabulary, width, blocks, elements of its checkpoint."""

    vocab: int = Field(gt=0)
    width: int = Field(gt=0)
    layers: int = Field(gt=0)
    elements: int | None = Field(None, gt=0)
    "parameters and stored buffers; None: not known"
    softcap: float | None = Field(None, gt=0)
    source: str


class QuantityColumn(Frozen):
    """One column of a table of arithmetic: a quantity of paperlm.cost.memory, and how it is printed."""

    quantity: str
    form: Literal["count", "mib", "times", "integer"]
    "count: 5.87M; mib: mebibytes without decimals; times: 11.9x"
    printed: Printed = True


class ArithmeticTable(Table):
    """Numbers that follow from constants alone: a row per model, nothing is run."""

    kind: Literal["arithmetic"]
    constants: Settings
    "fields of paperlm.cost.memory.Setup"
    models: list[str]
    columns: dict[str, QuantityColumn]


# -- kind: measurements -----------------------------------------------------------------------------------------------


class CaseSpec(Frozen):
    """Inputs of a measured loss: so many tokens, of which a share counts, against a vocabulary of a width."""

    model: str
    "one of the paper's models, which has vocabulary, width and softcap; or any title, with the sizes given here"
    tokens: int = Field(gt=0)
    counting: float = Field(1.0, gt=0, le=1)
    "share of the tokens that enter the loss"
    vocab: int | None = Field(None, gt=0)
    width: int | None = Field(None, gt=0)
    softcap: float | None = Field(None, gt=0)
    element_bytes: int = Field(2, gt=0)
    "bytes of one element of the inputs"
    on_cpu: str = ""
    "case that is measured in its place where there is no GPU; without one its cells say `not run` there"
    source: str


class MeasuredRow(Frozen):
    """One row of a table of measurements: the method, as `name` of the measurement rows calls it."""

    method: str
    "lower_bound: its memory is computed (paperlm.cost.loss)"
    source: str
    by_value: bool = False
    "memory is compared with the printed number"
    why: str = ""
    "if not by value: what else decides it"
    printed: Printed = True
    remarks: dict[str, str] = {}
    "column -> what has to be known about this cell; its reason in the diff"


class MeasuredColumn(Frozen):
    """One column of a table of measurements: a field of the measurement row with this metric and these other fields."""

    metric: str
    where: dict[str, str] = {}
    "fields of the measurement row and the values they must have"
    field: str = "value"
    case: str = ""
    "measured on this case instead of the table's"
    only: str = ""
    "a quantity of the data: of the row with this method alone"
    printed: Printed = True


class MeasurementsTable(Table):
    """Speed, memory and error of one operation, from rows of paper_tables/records/bench/<op>.jsonl."""

    kind: Literal["measurements"]
    op: str
    printed_on: str
    "machine and versions of the printed numbers"
    device: str
    "card of the committed rows; rows of another one are used only where there are none of this one"
    cases: list[str] = Field(min_length=1)
    "with several, each has its own block of rows, labelled `<model>: <row>`"
    rows: dict[str, MeasuredRow]
    columns: dict[str, MeasuredColumn]
    tolerance: float = Field(0.01, gt=0)
    "relative difference of memory that still counts as the printed value"


TableSpec = Annotated[RunsTable | SettingsTable | ArithmeticTable | MeasurementsTable, Field(discriminator="kind")]


class FigureSpec(Frozen):
    """A figure: drawn by paperlm.figures.<kind>, from the constants, measurements or runs of a table."""

    title: str
    number: str
    kind: str
    table: str = ""
    options: dict[str, Any] = {}
    claims_name: str = ""
    "how its claims call the figure's statistics, e.g. F4"
    claims: list[ClaimSpec] = []
    in_words: dict[str, str] = {}
    "statistic -> what the paper's text says of it; its figures print no numbers"
    notes: list[str] = []
    "printed under the figure"
