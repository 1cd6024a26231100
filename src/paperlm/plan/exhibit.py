"""Declarations of tables and figures in a paper file. `kind` says where a table's numbers come from."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from paperlm.errors import SpecError
from paperlm.frozen import Frozen


class Setting(Frozen):
    """A value and where it comes from: a place in the paper, the authors' code, or `assumed` with a reason."""

    value: Any
    source: str = Field(min_length=3)


Settings = dict[str, Setting]

Printed = bool | Literal["not found"]
"Whether the paper prints a row or column; not found: it does, but no source with its numbers was found."


class Condition(Frozen):
    """What has to be true for a claim to be tested at all, and why."""

    expression: str
    why: str


class ClaimSpec(Frozen):
    """A statement about an exhibit, as an expression over its cells (paperlm.tables.claims)."""

    id: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*$")
    says: str
    expression: str
    for_each: dict[str, list[str | int | float | bool]] = {}
    "loop variables of the expression -> their values: the claim is judged for each, and as a whole for all"
    expression_in_print: str = ""
    "where the print says it with other rows than those that say the same here"
    of_print: str = ""
    "why it is about the print alone, so that nothing that is made here can test it"
    published: bool | None
    "whether the printed numbers satisfy it; False documents a contradiction inside the paper; null: they do not say"
    given: Condition | None = None
    note: str = ""
    "added to the verdict's reason"

    @field_validator("for_each")
    @classmethod
    def loops_are_not_empty(cls, value: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """A loop over nothing would hold without a comparison."""
        for name, values in value.items():
            if not name.isidentifier():
                raise ValueError(f"for_each: {name!r} is no name of a variable")
            if not values or len(set(map(str, values))) != len(values):
                raise ValueError(f"for_each.{name}: give different values, at least one")
        return value

    @property
    def reads(self) -> tuple[str, ...]:
        """Names, as exhibits call themselves in claims, that its expressions read."""
        text = self.expression + (f" {self.given.expression}" if self.given else "")
        return tuple(dict.fromkeys(re.findall(r"\b([A-Za-z]\w*)\[", text)))


class DivergedRule(Frozen):
    """When a job whose losses stayed finite counts as diverged all the same.

    `above`: perplexity above a number (the papers' 1,360-1,440 lie above 1,000). `unigram_within`: perplexity above
    (1 - x) times that of the data's unigram distribution, which is where those published numbers come from.
    """

    above: float | None = Field(None, gt=0)
    unigram_within: float | None = Field(None, gt=0, lt=1)
    source: str = Field(min_length=3)

    @model_validator(mode="after")
    def one_rule(self) -> DivergedRule:
        if (self.above is None) == (self.unigram_within is None):
            raise ValueError("give exactly one of above and unigram_within")
        return self

    def threshold(self, unigram_perplexity: float) -> float:
        """Perplexity from which a job counts as diverged."""
        return self.above if self.above is not None else (1 - self.unigram_within) * unigram_perplexity


class Exhibit(Frozen):
    """What tables and figures share."""

    title: str
    number: str
    claims_name: str = ""
    "how claims call it, e.g. M1"
    claims: list[ClaimSpec] = []
    notes: list[str] = []


# -- cells that are jobs ----------------------------------------------------------------------------------------------


class Part(Frozen):
    """What a row or column contributes to the job of its cells, and to how the cell is read."""

    size: str = ""
    norm: dict[str, Any] | None = None
    "options may be {of: size}: what the paper's size says"
    settings: dict[str, Settings] = {}
    "name of a job of the paper -> settings for it"
    job: str = ""
    "another job of the paper than the exhibit's"
    instead: dict[str, str] = {}
    "name of a job of the paper -> the one in its place, wherever the cell's job or what it works on is that one"
    metric: str = ""
    "another metric than the exhibit's"
    factor: float | None = Field(None, gt=0)
    "printed number / metric, in place of the table's"
    mean_of: list[str] = []
    "of these columns of the same row, in place of a metric"
    sum_of_column: str = ""
    "metric of the column's jobs, whose mean is printed as a count; such a row has no job of its own"
    source: str = ""
    incomparable: str = ""
    "why its printed numbers are another quantity than ours, whatever the scale"
    in_print: bool = True
    "False: a column or row of ours beside those that the paper prints"
    scales: list[str] = []
    "an extra row or column that the paper does not print, at these scales only; no claim reads it"

    @property
    def printed(self) -> bool:
        """Whether the paper prints it."""
        return self.in_print and not self.scales


class Along(Frozen):
    """Columns at equal steps along a run: states of the parent that a job measures, from its start."""

    job: str
    "name of the job whose `at` they set"
    share: str = Field("1", pattern=r"^\d+(/\d+)?$")
    "part of the run that they cover"
    points: dict[str, int] = Field(min_length=1)
    "scale -> how many there are behind the start; `default` for the others"

    @model_validator(mode="after")
    def part_of_a_run(self) -> Along:
        if self.share.endswith("/0") or not 0 < Fraction(self.share) <= 1:
            raise ValueError(f"share {self.share} is no part of a run: write one above 0 and up to 1, e.g. 1/2")
        if any(count < 1 for count in self.points.values()):
            raise ValueError("points: give at least one for each scale")
        return self

    def columns(self, scale: str) -> dict[str, Part]:
        """Label -> what the column contributes: `at` as a share of the run, which the plan turns into an update."""
        if not (points := self.points.get(scale) or self.points.get("default")):
            raise SpecError(f"along.points: neither {scale} nor default is there: add one of them")
        shares = [Fraction(self.share) * index / points for index in range(points + 1)]
        source = f"{points} equal steps over {self.share} of the run"
        return {
            str(share): Part(settings={self.job: {"at": Setting(value=f"share {share}", source=source)}})
            for share in shares
        }


class JobCells(Exhibit):
    """An exhibit whose cells are jobs: a job for each row, column and seed."""

    job: str
    "name of a job in the paper file"
    metric: str = ""
    "of the record, that claims are judged on, e.g. ppl_true or mmlu/acc"
    rows: dict[str, Part]
    columns: dict[str, Part] = {"": Part()}
    along: Along | None = None
    "in place of columns"
    seeds: dict[str, Annotated[int, Field(gt=0)]] = {}
    "scale -> how many seeds there are at least, whatever config.yaml says"


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
    edition: str = ""
    metric: str
    printed_metric: str = ""
    "what is compared with the print where it is another form of it (paperlm.tables.metrics)"
    incomparable: str = ""
    "why its numbers are never compared with the printed ones, at any scale"
    factor: float = Field(1.0, gt=0)
    "printed number / metric: 100 for percentages"
    diverged: DivergedRule | None = None
    print_noise: Noise | None = None
    predicted: list[Predicted] = []

    def prediction(self, row: str, column: str) -> Predicted | None:
        """What predicts a cell at every scale; None: nothing does."""
        return next((one for one in self.predicted if row in one.rows and column in one.columns), None)


# -- other tables -----------------------------------------------------------------------------------------------------


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
    width; of a codec so many weights."""

    model: str
    "one of the paper's models, which has vocabulary, width and softcap; or any title, with the sizes given here"
    weights: int | None = Field(None, gt=0)
    "of a codec, and nothing else than this and `element_bytes`"
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
        if (self.tokens is None) == (self.weights is None):
            raise ValueError("give `tokens`, of a loss, or `weights`, of a codec")
        if self.weights and self.model_fields_set & {"counting", "vocab", "width", "softcap"}:
            raise ValueError("counting, vocab, width and softcap are of a loss: leave them out beside `weights`")
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


# -- figures ----------------------------------------------------------------------------------------------------------


class FigureSpec(JobCells):
    """A figure: drawn by paperlm/figures/<draw>.py from its jobs, or from the constants or measurements of a table."""

    draw: str
    job: str = ""
    rows: dict[str, Part] = {}
    table: str = ""
    "table whose constants, measurements or jobs it is drawn from"
    options: dict[str, Any] = {}
    in_words: dict[str, str] = {}
    "statistic -> what the paper's text says of it; its figures print no numbers"

    @model_validator(mode="after")
    def jobs_with_rows(self) -> FigureSpec:
        if bool(self.job) != bool(self.rows):
            raise ValueError("a figure of jobs has `job` and `rows`, another one neither")
        return self
