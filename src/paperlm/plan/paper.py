"""Paper files, workflow/papers/<paper>.yaml: jobs and settings with sources, tables, figures, claims, deviations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from paperlm.errors import SpecError, unknown
from paperlm.frozen import Frozen
from paperlm.jobs import kind_of
from paperlm.jobs.base import parent_kinds
from paperlm.plan.exhibit import DivergedRule, FigureSpec, JobCells, Settings, parts
from paperlm.plan.paper_names import check_names
from paperlm.plan.scale import Changes, SeedNoise, known_settings
from paperlm.plan.table import CaseSpec, MeasurementsTable, ModelSpec, TableSpec

Reason = Annotated[str, Field(min_length=3)]


class PaperInfo(Frozen):
    """Identity of the paper."""

    id: str = Field(pattern=r"^[a-z0-9]+$")
    title: str
    arxiv: str
    code: str
    licence_note: str = ""


class With(Frozen):
    """What a job has whatever the row of the exhibit says: a reward model that all rows share."""

    size: str = ""
    norm: dict[str, Any] | None = None


class JobSpec(Frozen):
    """A job of the paper: its kind, settings with sources, and for each parent the name of another job here."""

    model_config = ConfigDict(extra="allow", frozen=True)

    kind: str
    like: str = ""
    "another job of this file and kind, whose settings (its sizes' and scales' too) it has but for those given here"
    settings: Settings = {}
    with_: With = Field(With(), alias="with")

    @property
    def parents(self) -> dict[str, str]:
        """Field -> name of the paper's job that it is."""
        return dict(self.__pydantic_extra__ or {})

    @model_validator(mode="after")
    def known(self) -> JobSpec:
        try:
            kind = kind_of(self.kind)
        except SpecError as error:
            raise ValueError(str(error)) from None
        known_settings(self.kind, self.settings)
        fields = parent_kinds(kind)
        for key, value in self.parents.items():
            if key not in fields:
                raise ValueError(unknown("key", key, ["kind", "like", "settings", "with", *fields]))
            if not isinstance(value, str):
                raise ValueError(f"{key} is the name of a job in this file, got {value!r}")
        for key in fields:
            if kind.model_fields[key].is_required() and key not in self.parents:
                raise ValueError(f"{key} is missing: name the job of this file that a {self.kind} job works on")
        return self


class SizeSpec(Frozen):
    """One model size of the paper."""

    jobs: dict[str, Settings] = {}
    "name of a job -> settings for this size"
    norm: dict[str, Settings] = {}
    "norm method -> options for this size, where a row says {of: size}"
    values: Settings = {}
    "what tables need to know of it, e.g. published_batches"


class StandIn(Frozen):
    """Another model size in the place of one."""

    size: str
    why: str = Field(min_length=3)


class Replacement(Frozen):
    """Another job of the file in the place of one."""

    job: str
    why: Reason


class ScaleChanges(Frozen):
    """What this paper changes at a scale, beyond what the scale changes for all."""

    stand_ins: dict[str, StandIn] = {}
    "size -> the model size that is trained in its place"
    jobs: dict[str, Changes] = {}
    "name of a job of this file -> setting -> value"
    sizes: dict[str, dict[str, Changes]] = {}
    "size -> name of a job -> setting -> value"
    instead: dict[str, dict[str, Replacement]] = {}
    "exhibit -> name of a job -> the one in its place, as a row or column may say it at every scale"
    instead_of_sizes: dict[str, dict[str, StandIn]] = {}
    "exhibit -> size -> the paper's size whose jobs its cells show, for an exhibit that nobody would wait for otherwise"
    diverged: DivergedRule | None = None
    "in place of that of each table which has one"
    seed_noise: SeedNoise | None = None
    "of this paper's trainings, in place of the scale's; of a perplexity with a standard error of its own beside that"
    except_: dict[str, Reason] = Field({}, alias="except")
    "claim id -> why this scale cannot judge it"


UNCHANGED = ScaleChanges()
"What a paper changes at a scale of which it says nothing."


class Deviation(Frozen):
    """Something done differently from the paper or its code, and why; printed under the exhibits it touches."""

    what: Reason
    why: Reason
    touches: list[str] = Field(min_length=1)
    scales: list[str] = []
    "scales at which it is done; empty means all"


class PrintedCheck(Frozen):
    """What the printed numbers should satisfy among themselves, as an expression of the language of claims."""

    id: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*$")
    says: str
    expression: str
    for_each: dict[str, list[str | int | float | bool]] = {}
    "as in claims"
    known: str = ""
    "how a contradiction is read, for a check that does not hold in every part"


class PaperSpec(Frozen):
    """A whole paper file."""

    paper: PaperInfo
    jobs: dict[str, JobSpec] = {}
    sizes: dict[str, SizeSpec] = {}
    models: dict[str, ModelSpec] = {}
    "published models that tables of arithmetic and of measurements are about"
    cases: dict[str, CaseSpec] = {}
    "inputs of measured operations; the names are those of the measurement rows"
    made_by: dict[str, str] = {}
    "method of a measurement row -> whose code it is, said beside the row wherever it stands"
    tables: dict[str, TableSpec] = {}
    figures: dict[str, FigureSpec] = {}
    scales: dict[str, ScaleChanges] = {}
    deviations: list[Deviation] = []
    consistency: list[PrintedCheck] = []
    "what paper_tables/published_consistency.csv checks"

    @model_validator(mode="after")
    def names_resolve(self) -> PaperSpec:
        check_names(self)
        return self

    def claims(self) -> Iterator[tuple[str, str]]:
        """(exhibit, id) of every claim."""
        for name, exhibit in self.exhibits().items():
            yield from ((name, claim.id) for claim in exhibit.claims)

    def scale_names(self) -> Iterator[tuple[str, str]]:
        """Every scale that is named: (place, scale)."""
        yield from (("scales", scale) for scale in self.scales)
        for deviation in self.deviations:
            yield from (("deviations.scales", scale) for scale in deviation.scales)
        for name, exhibit in self.exhibits().items():
            yield from ((f"{name}.incomparable_at", scale) for scale in getattr(exhibit, "incomparable_at", ()))
            for claim in exhibit.claims:
                yield from ((f"{claim.id}.only_at", scale) for scale in (claim.only_at.scales if claim.only_at else ()))
            for part, label, spec in parts(exhibit):
                yield from ((f"{name}.{part}.{label}.scales", scale) for scale in spec.scales)
            if isinstance(exhibit, MeasurementsTable):
                for label, row in exhibit.rows.items():
                    yield from ((f"{name}.rows.{label}.scales", scale) for scale in row.scales)
            if isinstance(exhibit, JobCells):
                yield from ((f"{name}.seeds", scale) for scale in exhibit.seeds)
                points = exhibit.along.points if exhibit.along else {}
                yield from ((f"{name}.along.points", scale) for scale in points if scale != "default")

    def lineage(self, name: str) -> list[str]:
        """The jobs that a job takes settings from, itself last."""
        like = self.jobs[name].like
        return [*(self.lineage(like) if like else []), name]

    def shape(self, case: str) -> tuple[int, int, int]:
        """Tokens, vocabulary and width of a case of a loss."""
        spec = self.cases[case]
        model = self.models.get(spec.model)
        return spec.tokens, spec.vocab or model.vocab, spec.width or model.width

    def inputs(self, case: str) -> dict[str, float | None]:
        """What the `shape` of a case's measurement rows has to say."""
        if weights := self.cases[case].weights:
            return {"weights": weights}
        if sequences := self.cases[case].sequences:
            return {"batch": sequences, "seq_len": self.cases[case].length}
        sizes = dict(zip(("tokens", "vocab", "width"), self.shape(case), strict=True))
        return {**sizes, "counting": self.cases[case].counting, "softcap": self.softcap(case)}

    def softcap(self, case: str) -> float | None:
        """Cap of the case's logits; None: uncapped."""
        spec = self.cases[case]
        return spec.softcap if spec.model not in self.models else self.models[spec.model].softcap

    def exhibits(self) -> dict[str, TableSpec | FigureSpec]:
        """Tables and figures by name."""
        return {**self.tables, **self.figures}
