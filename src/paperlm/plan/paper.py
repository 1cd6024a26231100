"""Paper files, workflow/papers/<paper>.yaml: jobs and settings with sources, tables, figures, claims, deviations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from paperlm.errors import SpecError, unknown
from paperlm.frozen import Frozen
from paperlm.jobs import kind_of
from paperlm.jobs.base import parent_kinds
from paperlm.models.sizes import ALL_SIZES
from paperlm.norms import build_method, known_options
from paperlm.plan.exhibit import (
    ArithmeticTable,
    CaseSpec,
    DivergedRule,
    FigureSpec,
    JobCells,
    MeasurementsTable,
    ModelSpec,
    Settings,
    SettingsTable,
    TableSpec,
)
from paperlm.plan.scale import Changes, known_settings

NAME = r"^[A-Za-z][A-Za-z0-9_]*$"
"Names that become files, targets and wildcards."


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


class ScaleChanges(Frozen):
    """What this paper changes at a scale, beyond what the scale changes for all."""

    stand_ins: dict[str, StandIn] = {}
    "size -> the model size that is trained in its place"
    jobs: dict[str, Changes] = {}
    "name of a job of this file -> setting -> value"
    sizes: dict[str, dict[str, Changes]] = {}
    "size -> name of a job -> setting -> value"
    diverged: DivergedRule | None = None
    "in place of that of each table which has one"
    except_: dict[str, Reason] = Field({}, alias="except")
    "claim id -> why this scale cannot judge it"


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
        for place, kind, name, known in self._references():
            if name not in known:
                raise ValueError(f"{place}: {unknown(kind, name, known)}")
        for section in ("tables", "figures", "cases", "jobs"):
            for name in getattr(self, section):
                if not re.fullmatch(NAME, name):
                    raise ValueError(f"{section}: {name!r} becomes a file name: use letters, digits and _ only")
        for place, name, settings in self._settings():
            try:
                known_settings(self.jobs[name].kind, settings)
            except ValueError as error:
                raise ValueError(f"{place}.{name}: {error}") from None
        self._check_parents()
        for name, exhibit in self.exhibits().items():
            for part, label, spec in _parts(exhibit):
                for one, other in spec.instead.items():
                    self._check_instead(f"{name}.{part}.{label}.instead", one, other)
        self._check_norms()
        self._check_claims()
        return self

    def _check_instead(self, place: str, one: str, other: str) -> None:
        """ValueError for a job of a kind that nothing which works on the other one can take, and for a circle."""
        kind, wanted = self.jobs[other].kind, self.jobs[one].kind
        fields = [
            parent_kinds(kind_of(job.kind))[field]
            for job in self.jobs.values()
            for field, name in job.parents.items()
            if name == one
        ]
        taken = {name for kinds in fields for name in kinds} | {wanted}
        if kind not in taken:
            kinds = " or ".join(map(repr, sorted(taken)))
            raise ValueError(f"{place}: {other!r} is a job of kind {kind!r}; in place of {one!r} it has to be {kinds}")
        if one in self.works_on(other):
            raise ValueError(f"{place}: {other!r} works on {one!r} itself, which it cannot take the place of")

    def works_on(self, name: str) -> set[str]:
        """The jobs of this file that a job works on, theirs, and so on; of a circle, each of them."""
        found: set[str] = set()
        waiting = list(self.jobs[name].parents.values())
        while waiting:
            if (other := waiting.pop()) not in found and other in self.jobs:
                found.add(other)
                waiting += self.jobs[other].parents.values()
        return found

    def _check_norms(self) -> None:
        """ValueError for a method, option or value that does not exist."""
        for size, spec in self.sizes.items():
            for method, options in spec.norm.items():
                try:
                    known_options(method, options)
                except SpecError as error:
                    raise ValueError(f"sizes.{size}.norm: {error}") from None
        for place, norm in self._norms():
            try:
                build_method(self._filled(norm))
            except SpecError as error:
                raise ValueError(f"{place}: {error}") from None

    def _norms(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every norm method that is named: (place, its description)."""
        for name, job in self.jobs.items():
            if job.with_.norm:
                yield f"jobs.{name}.with.norm", job.with_.norm
        for name, exhibit in self.exhibits().items():
            if isinstance(exhibit, SettingsTable):
                yield f"tables.{name}.norm", exhibit.norm
            for part, label, spec in _parts(exhibit):
                if spec.norm:
                    yield f"{name}.{part}.{label}.norm", spec.norm

    def _filled(self, norm: dict[str, Any]) -> dict[str, Any]:
        """A description whose options of the size are those of the first size that has them."""
        method = norm.get("name", "")
        filled = dict(norm)
        for option, value in norm.items():
            if isinstance(value, dict) and option == "base":
                filled[option] = self._filled(value)
            elif isinstance(value, dict):
                if value != {"of": "size"}:
                    raise SpecError(
                        f"{option}: {value}: write {{of: size}} for what the size says, or the value itself"
                    )
                known_options(method, [option])
                given = [
                    size.norm[method][option] for size in self.sizes.values() if option in size.norm.get(method, {})
                ]
                if not given:
                    raise SpecError(f"no size says {option}: add sizes.<size>.norm.{method}.{option}")
                filled[option] = given[0].value
        return filled

    def _check_claims(self) -> None:
        """ValueError for names that claims use twice, or cannot use."""
        names: dict[str, str] = {}
        for exhibit, spec in self.exhibits().items():
            if (name := spec.claims_name) and not name.isidentifier():
                raise ValueError(f"{exhibit}.claims_name: {name!r}: use letters, digits and _ only, a letter first")
            if name and name in names:
                raise ValueError(f"{exhibit}.claims_name: {name!r} is that of {names[name]} already; rename one")
            names[name] = exhibit

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
            for part, label, spec in _parts(exhibit):
                yield from ((f"{name}.{part}.{label}.scales", scale) for scale in spec.scales)
            if isinstance(exhibit, JobCells):
                yield from ((f"{name}.seeds", scale) for scale in exhibit.seeds)
                points = exhibit.along.points if exhibit.along else {}
                yield from ((f"{name}.along.points", scale) for scale in points if scale != "default")

    def _check_parents(self) -> None:
        """ValueError for a parent of the wrong kind and for a circle."""
        for name, job in self.jobs.items():
            seen = [name]
            while (like := self.jobs[seen[-1]].like) and like not in seen:
                seen.append(like)
            if like:
                raise ValueError(f"jobs.{name}.like: goes in a circle: {' -> '.join([*seen, like])}")
            if job.like and self.jobs[job.like].kind != job.kind:
                other = self.jobs[job.like].kind
                raise ValueError(f"jobs.{name}.like: {job.like!r} is a {other} job, not a {job.kind} one")
            kinds = parent_kinds(kind_of(job.kind))
            for field, other in job.parents.items():
                if other in self.jobs and self.jobs[other].kind not in kinds[field]:
                    wanted = " or ".join(kinds[field])
                    raise ValueError(
                        f"jobs.{name}.{field}: {other!r} is a {self.jobs[other].kind} job; it has to be {wanted}"
                    )
            if name in (others := self.works_on(name)):
                between = ", ".join(one for one in self.jobs if one in others and one != name)
                raise ValueError(f"jobs.{name}: works on itself, by way of {between or 'nothing'}")

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
        sizes = dict(zip(("tokens", "vocab", "width"), self.shape(case), strict=True))
        return {**sizes, "counting": self.cases[case].counting, "softcap": self.softcap(case)}

    def softcap(self, case: str) -> float | None:
        """Cap of the case's logits; None: uncapped."""
        spec = self.cases[case]
        return spec.softcap if spec.model not in self.models else self.models[spec.model].softcap

    def exhibits(self) -> dict[str, TableSpec | FigureSpec]:
        """Tables and figures by name."""
        return {**self.tables, **self.figures}

    def _settings(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Every place that gives settings of a named job: (place, job, settings)."""
        for size, spec in self.sizes.items():
            yield from ((f"sizes.{size}.jobs", name, settings) for name, settings in spec.jobs.items())
        for scale, changes in self.scales.items():
            yield from ((f"scales.{scale}.jobs", name, settings) for name, settings in changes.jobs.items())
            for size, jobs in changes.sizes.items():
                yield from ((f"scales.{scale}.sizes.{size}", name, settings) for name, settings in jobs.items())
        for name, exhibit in self.exhibits().items():
            for part, label, spec in _parts(exhibit):
                yield from ((f"{name}.{part}.{label}.settings", job, s) for job, s in spec.settings.items())

    def _references(self) -> Iterator[tuple[str, str, str, object]]:
        """Every name used in one place and declared in another: (place, what it names, name, declared names)."""
        for name, job in self.jobs.items():
            yield from ((f"jobs.{name}.{field}", "job", other, self.jobs) for field, other in job.parents.items())
            if job.like:
                yield f"jobs.{name}.like", "job", job.like, self.jobs
            if job.with_.size:
                yield f"jobs.{name}.with.size", "size", job.with_.size, self.sizes
        for place, name, _ in self._settings():
            yield place, "job", name, self.jobs
        for scale, changes in self.scales.items():
            yield from ((f"scales.{scale}.sizes", "size", size, self.sizes) for size in changes.sizes)
            for size, other in changes.stand_ins.items():
                yield f"scales.{scale}.stand_ins", "size", size, self.sizes
                yield f"scales.{scale}.stand_ins.{size}", "model size", other.size, ALL_SIZES
        for size in self.sizes:
            yield "sizes", "model size", size, ALL_SIZES
        for name, case in self.cases.items():
            if not case.weights and (case.vocab is None or case.width is None):
                yield f"cases.{name}.model", "model", case.model, self.models
            if case.on_cpu:
                yield f"cases.{name}.on_cpu", "case", case.on_cpu, self.cases
        for name, exhibit in self.exhibits().items():
            yield from self._references_of(name, exhibit)
        for deviation in self.deviations:
            for touched in deviation.touches:
                yield "deviations.touches", "exhibit", touched, self.exhibits()

    def _references_of(self, name: str, exhibit: Any) -> Iterator[tuple[str, str, str, object]]:
        at = f"tables.{name}" if name in self.tables else f"figures.{name}"
        if isinstance(exhibit, JobCells) and exhibit.job:
            yield f"{at}.job", "job", exhibit.job, self.jobs
        if isinstance(exhibit, JobCells) and exhibit.along:
            yield f"{at}.along.job", "job", exhibit.along.job, self.jobs
        for part, label, spec in _parts(exhibit):
            if spec.size:
                yield f"{at}.{part}.{label}", "size", spec.size, self.sizes
            if spec.job:
                yield f"{at}.{part}.{label}.job", "job", spec.job, self.jobs
            for pair in spec.instead.items():
                yield from ((f"{at}.{part}.{label}.instead", "job", job, self.jobs) for job in pair)
            yield from ((f"{at}.{part}.{label}.mean_of", "column", c, exhibit.columns) for c in spec.mean_of)
        for index, one in enumerate(getattr(exhibit, "predicted", ())):
            yield from ((f"{at}.predicted[{index}]", "row", row, exhibit.rows) for row in one.rows)
            yield from ((f"{at}.predicted[{index}]", "column", column, exhibit.columns) for column in one.columns)
        match exhibit:
            case SettingsTable():
                for label, line in exhibit.lines().items():
                    where = f"{at}.rows.{label}" if exhibit.rows else at
                    yield f"{where}.job", "job", line.job, self.jobs
                    yield where if exhibit.rows else f"{at}.sizes", "size", line.size, self.sizes
            case ArithmeticTable():
                yield from ((f"{at}.models", "model", model, self.models) for model in exhibit.models)
            case MeasurementsTable():
                others = [column.case for column in exhibit.columns.values() if column.case]
                yield from ((f"{at}.cases", "case", case, self.cases) for case in (*exhibit.cases, *others))
            case FigureSpec() if exhibit.table:
                yield f"{at}.table", "table", exhibit.table, self.tables


def _parts(exhibit: Any) -> Iterator[tuple[Literal["rows", "columns"], str, Any]]:
    if isinstance(exhibit, JobCells):
        yield from (("rows", label, part) for label, part in exhibit.rows.items())
        yield from (("columns", label, part) for label, part in exhibit.columns.items())
