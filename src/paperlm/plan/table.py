"""Declarations of tables in a paper file. `kind` says where a table's numbers come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paperlm.frozen import Frozen
from paperlm.plan.exhibit import DivergedRule, Exhibit, JobCells, Settings

Printed = bool | Literal["not found"]
"Whether the paper prints a row or column; not found: it does, but no source with its numbers was found."


class Noise(Frozen):
    """Relative difference between two printed cells that says nothing, and where that is from."""

    value: float = Field(ge=0, lt=1)
    source: str = Field(min_length=3)


class Predicted(Frozen):
    """Cells that a theory fixes whatever the models' size, so that they are compared with the print at every scale."""

    rows: list[str] = Field(min_length=1)
    columns: list[str] = Field(min_length=1)
    within: float = Field(gt=0)
    "difference, in the printed unit, that the theory leaves open"
    why: str = Field(min_length=3)


class JobsTable(JobCells):
    """A table of numbers that jobs computed."""

    kind: Literal["jobs"]
    published: str = ""
    "the printed table; empty if the paper prints none"
    label_columns: int = Field(1, ge=0)
    "columns of the printed table that name its rows"
    header_lines: int = Field(1, ge=1)
    "lines of the printed table that name its columns"
    left_out: list[str] = []
    "printed columns that another table compares"
    edition: str = ""
    metric: str
    printed_metric: str = ""
    "what is compared with the print where it is another form of it (paperlm.tables.metrics)"
    incomparable: str = ""
    "why its numbers are not compared with the printed ones, whatever the scale"
    incomparable_at: list[str] = []
    "at these scales only; empty: at all"
    factor: float = Field(1.0, gt=0)
    "printed number / metric: 100 for percentages"
    out_of_memory_above: float | None = None
    """GiB that the paper's card holds, for a table of bytes counted at the printed sizes: a count above agrees with a
    print that ran out of memory"""
    diverged: DivergedRule | None = None
    print_noise: Noise | None = None
    predicted: list[Predicted] = []

    def prediction(self, row: str, column: str) -> Predicted | None:
        """What predicts a cell at every scale; None: nothing does."""
        return next((one for one in self.predicted if row in one.rows and column in one.columns), None)


class PrintedTable(Exhibit):
    """A table of another kind."""

    published: str = ""
    edition: str = ""
    "value of the printed file's column Edition that is compared (config key `editions` overrides it)"
    label_columns: int = Field(1, ge=0)
    header_lines: int = Field(1, ge=1)


class EchoColumn(Frozen):
    """A printed hyper-parameter and the setting of ours that it is compared with."""

    setting: str = ""
    "name of a setting of the job, or `norm.<option>`"
    then: str = ""
    "name of a second one, printed behind an arrow where it has another value"
    times: list[str] = []
    "settings, or constants below, that it is multiplied with"
    form: Literal["plain", "thousands", "millions", "billions", "scientific", "percent"] = "plain"
    source: str = ""
    "why a product is what the paper prints"
    not_run: str = ""
    "why there is nothing to compare: the paper prints a result, and nothing here makes it"
    in_print: bool = True
    "False: a column of ours beside those that the paper prints"

    @model_validator(mode="after")
    def one_of_both(self) -> EchoColumn:
        if bool(self.setting) == bool(self.not_run):
            raise ValueError("give `setting`, or `not_run` with the reason why the column has none")
        if self.not_run and not self.in_print:
            raise ValueError("not_run: a column that is neither printed nor made says nothing; leave it out")
        return self


class EchoRow(Frozen):
    """A row of a table of hyper-parameters: which job of which size it is of."""

    size: str
    job: str = ""
    "another job of the paper than the table's"


class SettingsTable(PrintedTable):
    """The paper's hyper-parameters beside those of our own job at the `paper` scale."""

    kind: Literal["settings"]
    job: str
    norm: dict[str, Any]
    "the method whose options the columns may name"
    sizes: list[str] = []
    "a row each, called as the size"
    rows: dict[str, EchoRow] = {}
    "in place of sizes: rows with names of their own, or of several jobs"
    constants: Settings = {}
    columns: dict[str, EchoColumn]

    @model_validator(mode="after")
    def sizes_or_rows(self) -> SettingsTable:
        if bool(self.sizes) == bool(self.rows):
            raise ValueError("give `sizes`, a row each, or `rows`")
        return self

    def lines(self) -> dict[str, EchoRow]:
        """Label -> job and size of every row."""
        rows = self.rows or {size: EchoRow(size=size) for size in self.sizes}
        return {label: row.model_copy(update={"job": row.job or self.job}) for label, row in rows.items()}


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
    """One column of a table of arithmetic: a quantity of its formula, and how it is printed."""

    quantity: str
    form: Literal["count", "mib", "times", "integer"]
    "count: 5.87M; mib: mebibytes without decimals; times: 11.9x"
    printed: Printed = True


class ArithmeticTable(PrintedTable):
    """Numbers that follow from constants alone: a row per model, nothing is run."""

    kind: Literal["arithmetic"]
    formula: str
    "module of paperlm.cost with Setup, QUANTITIES and quantities(model, setup)"
    constants: Settings
    "fields of the formula's Setup"
    models: list[str]
    columns: dict[str, QuantityColumn]


class CaseSpec(Frozen):
    """Inputs of a measured operation: of a loss so many tokens, of which a share counts, against a vocabulary of a
    width; of a codec so many weights; of updates so many sequences of a length."""

    model: str
    "one of the paper's models, which has vocabulary, width and softcap; or any title, with the sizes given here"
    weights: int | None = Field(None, gt=0)
    "of a codec, and nothing else than this and `element_bytes`"
    sequences: int | None = Field(None, gt=0)
    "of an update; the model is known by the case's name"
    length: int | None = Field(None, gt=0)
    "tokens of each of them"
    tokens: int | None = Field(None, gt=0)
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

    @model_validator(mode="after")
    def of_one_operation(self) -> CaseSpec:
        if [self.tokens, self.weights, self.sequences].count(None) != 2:
            raise ValueError("give `tokens`, of a loss, `weights`, of a codec, or `sequences`, of an update")
        if not self.tokens and self.model_fields_set & {"counting", "vocab", "width", "softcap"}:
            raise ValueError("counting, vocab, width and softcap are of a loss: leave them out without `tokens`")
        if (self.sequences is None) != (self.length is None):
            raise ValueError("sequences and length go together")
        return self


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
    misprints: dict[str, str] = {}
    "column -> why the printed number is not what it says; it is then not compared"
    scales: list[str] = []
    "a row of ours that is measured at these scales only; no claim reads it"

    @model_validator(mode="after")
    def _ours_where_it_is_not_everywhere(self) -> MeasuredRow:
        if self.scales and self.printed is not False:
            raise ValueError("a row at some scales only is not printed: say `printed: false`")
        return self


class MeasuredColumn(Frozen):
    """One column of a table of measurements: a field of the measurement row with this metric and these other fields."""

    metric: str
    where: dict[str, str] = {}
    "fields of the measurement row and the values they must have"
    field: str = "value"
    factor: float = Field(1.0, gt=0)
    "printed number / field"
    case: str = ""
    "measured on this case instead of the table's"
    only: str = ""
    "a quantity of the data: of the row with this method alone"
    incomparable: str = ""
    "why its numbers are never compared with the printed ones"
    printed: Printed = True


class MeasurementsTable(PrintedTable):
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


TableSpec = Annotated[JobsTable | SettingsTable | ArithmeticTable | MeasurementsTable, Field(discriminator="kind")]
