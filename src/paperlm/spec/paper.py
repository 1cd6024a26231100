"""Paper files, workflow/papers/<paper>.yaml: settings with sources, tables, figures, claims, deviations."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field, field_validator, model_validator

from paperlm.errors import unknown
from paperlm.spec.run import Frozen
from paperlm.spec.table import (
    ArithmeticTable,
    CaseSpec,
    FigureSpec,
    MeasurementsTable,
    ModelSpec,
    RunsTable,
    Setting,
    Settings,
    SettingsTable,
    TableSpec,
    known_settings,
)


class PaperInfo(Frozen):
    """Identity of the paper."""

    id: str = Field(pattern=r"^[a-z0-9]+$")
    title: str
    arxiv: str
    code: str
    licence_note: str = ""


class SizeSpec(Frozen):
    """One model size of the paper: settings, and the Post-LN fraction if the paper's table of sizes has one."""

    settings: Settings = {}
    post_fraction: Setting | None = None

    _known = field_validator("settings")(known_settings)


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
    settings: Settings = {}
    "of its runs"
    sizes: dict[str, SizeSpec] = {}
    models: dict[str, ModelSpec] = {}
    "published models that tables of arithmetic and of measurements are about"
    cases: dict[str, CaseSpec] = {}
    "inputs of measured operations; the names are those of the measurement rows"
    tables: dict[str, TableSpec]
    figures: dict[str, FigureSpec] = {}
    deviations: list[Deviation] = []

    _known = field_validator("settings")(known_settings)

    @model_validator(mode="after")
    def names_resolve(self) -> PaperSpec:
        for place, kind, name, known in self._references():
            if name not in known:
                raise ValueError(f"{place}: {unknown(kind, name, known)}")
        return self

    def shape(self, case: str) -> tuple[int, int, int]:
        """Tokens, vocabulary and width of a case."""
        spec = self.cases[case]
        model = self.models.get(spec.model)
        return spec.tokens, spec.vocab or model.vocab, spec.width or model.width

    def softcap(self, case: str) -> float | None:
        """Cap of the case's logits; None: uncapped."""
        spec = self.cases[case]
        return spec.softcap if spec.model not in self.models else self.models[spec.model].softcap

    def _references(self) -> Iterator[tuple[str, str, str, object]]:
        """Every name used in one place and declared in another: (place, what it names, name, declared names)."""
        for name, case in self.cases.items():
            if case.vocab is None or case.width is None:
                yield f"cases.{name}.model", "model", case.model, self.models
            if case.on_cpu:
                yield f"cases.{name}.on_cpu", "case", case.on_cpu, self.cases
        for name, table in self.tables.items():
            at = f"tables.{name}"
            match table:
                case RunsTable():
                    for label, column in table.columns.items():
                        yield f"{at}.columns.{label}", "size", column.size, self.sizes
                case SettingsTable():
                    yield from ((f"{at}.sizes", "size", size, self.sizes) for size in table.sizes)
                case ArithmeticTable():
                    yield from ((f"{at}.models", "model", model, self.models) for model in table.models)
                case MeasurementsTable():
                    others = [column.case for column in table.columns.values() if column.case]
                    yield from ((f"{at}.cases", "case", case, self.cases) for case in (*table.cases, *others))
        for name, figure in self.figures.items():
            if figure.table:
                yield f"figures.{name}.table", "table", figure.table, self.tables
        for deviation in self.deviations:
            for touched in deviation.touches:
                yield "deviations.touches", "table", touched, {**self.tables, **self.figures}
