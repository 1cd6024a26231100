"""Everything declared, resolved: papers, scale, configuration -> cells -> runs.

Precedence of a setting, weakest first: model size (paperlm.models.sizes), paper, the paper's size, the table's row,
scale, the scale's size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from paperlm.data.registry import data_id
from paperlm.errors import PaperLMError, SpecError, unknown
from paperlm.figures import KINDS as FIGURE_KINDS
from paperlm.models.sizes import SIZES
from paperlm.spec.load import load, parse
from paperlm.spec.paper import Deviation, PaperSpec
from paperlm.spec.run import Frozen, RunConfig
from paperlm.spec.scale import JobSize, ScaleSpec
from paperlm.spec.table import FigureSpec, RunRow, Setting, TableSpec

ROOT = Path(__file__).resolve().parents[3]


class ProjectConfig(Frozen):
    """config.yaml: what is run and where the data is. Machine settings belong in a profile."""

    scale: str = "tiny"
    seeds: list[int] = Field([0], min_length=1)
    run_missing: str = Field("auto", pattern="^(auto|yes|no)$")
    "train cells without a record? auto: yes on the CPU scales, and where a GPU is seen on the GPU scales"

    @field_validator("run_missing", mode="before")
    @classmethod
    def unquoted(cls, value: Any) -> Any:
        """YAML reads a bare yes or no as a truth value."""
        return {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value

    local_data: str = ""
    "folder of the `local:` datasets"
    checkpoint_seconds: float = Field(60, gt=0)
    "a running job can lose at most so much work"
    editions: dict[str, str] = {}
    "table -> edition of the paper whose printed numbers it is compared with, instead of the one its paper file names"


@dataclass(frozen=True)
class Cell:
    """One cell of a table at one scale: a run per seed, and the source of every setting."""

    table: str
    row: str
    column: str
    runs: tuple[RunConfig, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)
    label: str | None = None


class Project:
    """Papers and one scale, loaded and checked. Construction raises SpecError for anything that does not resolve."""

    def __init__(self, config: dict[str, Any] | ProjectConfig | None = None, root: Path = ROOT) -> None:
        self.root = root
        if not isinstance(config, ProjectConfig):
            config = parse(dict(config or {}), ProjectConfig, "config.yaml")
        self.config = config
        scales = {p.stem: p for p in sorted((root / "workflow/scales").glob("*.yaml"))}
        if config.scale not in scales:
            raise SpecError(unknown("scale", config.scale, scales))
        self.scale = load_scale(scales[config.scale])
        self.papers: dict[str, PaperSpec] = {}
        self.tables: dict[str, tuple[PaperSpec, TableSpec]] = {}
        self.figures: dict[str, tuple[PaperSpec, FigureSpec]] = {}
        for path in sorted((root / "workflow/papers").glob("*.yaml")):
            paper = load(path, PaperSpec)
            self.papers[paper.paper.id] = paper
            for name, table in paper.tables.items():
                if name in self.tables:
                    raise SpecError(f"{path}: table {name!r} is declared by another paper as well; rename one")
                if table.published and not (root / table.published).is_file():
                    raise SpecError(f"{path}: tables.{name}.published: no file {table.published}")
                self.tables[name] = (paper, table)
            for name, figure in paper.figures.items():
                if name in self.tables or name in self.figures:
                    raise SpecError(f"{path}: {name!r} is declared twice; rename one")
                if figure.kind not in FIGURE_KINDS:
                    raise SpecError(f"{path}: figures.{name}.kind: " + unknown("kind", figure.kind, FIGURE_KINDS))
                self.figures[name] = (paper, figure)
        declared = {c.id for _, part in (*self.tables.values(), *self.figures.values()) for c in part.claims}
        for claim in self.scale.claims.except_:
            if claim not in declared:
                raise SpecError(f"{scales[config.scale]}: claims.except: " + unknown("claim", claim, declared))
        for table in config.editions:
            if not self.table(table)[1].edition:
                raise SpecError(f"editions: table {table!r} has one edition only; leave it out")

    def deviations(self, name: str) -> list[Deviation]:
        """What is done differently from the paper in a table or figure at this scale."""
        paper, _ = self.tables.get(name) or self.figures[name]
        return [d for d in paper.deviations if name in d.touches and (not d.scales or self.scale.scale in d.scales)]

    def table(self, name: str) -> tuple[PaperSpec, TableSpec]:
        """Paper and declaration of a table; SpecError with the nearest known name otherwise."""
        if name not in self.tables:
            raise SpecError(unknown("table", name, self.tables))
        return self.tables[name]

    def figure(self, name: str) -> tuple[PaperSpec, FigureSpec]:
        """Paper and declaration of a figure; SpecError with the nearest known name otherwise."""
        if name not in self.figures:
            raise SpecError(unknown("figure", name, self.figures))
        return self.figures[name]

    def edition(self, table: str) -> str:
        """The edition whose printed numbers a table is compared with; empty if there is only one."""
        return self.config.editions.get(table, self.table(table)[1].edition)

    @functools.cache  # noqa: B019 - a Project lives as long as the process
    def cells(self, table_name: str) -> tuple[Cell, ...]:
        """Every cell of a `runs` table, row by row."""
        paper, table = self.table(table_name)
        cells = []
        for row_name, row in table.rows.items():
            if row.scales and self.scale.scale not in row.scales:
                continue
            for column_name, column in table.columns.items():
                if row.label is not None:
                    cells.append(Cell(table_name, row_name, column_name, label=row.label))
                    continue
                settings = resolve_settings(paper, column.size, self.scale)
                settings |= {k: v for k, v in row.settings.items() if k not in scale_changes(self.scale, column.size)}
                norm, norm_source = resolve_norm(paper, row, column.size, self.scale)
                where = f"{table_name} [{row_name}, {column_name}] at scale {self.scale.scale}"
                seeds = {*self.config.seeds, *range(table.seeds.get(self.scale.scale, 0))}
                runs = tuple(build_run(settings, column.size, norm, seed, where) for seed in sorted(seeds))
                sources = {key: setting.source for key, setting in settings.items()} | {"norm": norm_source}
                cells.append(Cell(table_name, row_name, column_name, runs, sources))
        return tuple(cells)

    @functools.cached_property
    def runs(self) -> dict[str, RunConfig]:
        """Run id -> run, over all tables; tables that ask for the same run share it."""
        return {
            run.run_id: run
            for name, (_, table) in self.tables.items()
            if table.kind == "runs"
            for cell in self.cells(name)
            for run in cell.runs
        }

    def tables_of(self, run_id: str) -> list[str]:
        """Names of the tables that a run feeds."""
        return [
            name
            for name, (_, table) in self.tables.items()
            if table.kind == "runs" and any(run.run_id == run_id for c in self.cells(name) for run in c.runs)
        ]

    @functools.cached_property
    def compared_by_loss(self) -> frozenset[str]:
        """Ids of the runs of tables with more than one loss: each of them must compute the one that it names."""
        tables = [
            [run for cell in self.cells(name) for run in cell.runs]
            for name, (_, table) in self.tables.items()
            if table.kind == "runs"
        ]
        return frozenset(run.run_id for runs in tables if len({r.loss for r in runs}) > 1 for run in runs)

    def job_size(self, run: RunConfig) -> JobSize:
        """Memory and minutes to ask a cluster for."""
        return self.scale.resources.sizes.get(run.size, self.scale.resources.default)


def load_scale(path: Path) -> ScaleSpec:
    """A scale file; its name must be the scale's."""
    scale = load(path, ScaleSpec)
    if scale.scale != path.stem:
        raise SpecError(f"{path}: scale is {scale.scale!r}; it must be the file's name, {path.stem!r}")
    return scale


def scale_changes(scale: ScaleSpec, size: str) -> dict[str, Setting]:
    """What the scale changes for one size, as settings whose source names the scale."""
    changes = scale.settings | scale.sizes.get(size, {})
    return {key: Setting(value=c.value, source=f"scale {scale.scale}: {c.why}") for key, c in changes.items()}


def resolve_settings(paper: PaperSpec, size: str, scale: ScaleSpec) -> dict[str, Setting]:
    """Every setting of a size at a scale but norm and seed, with its source."""
    if size not in SIZES:
        raise SpecError(unknown("model size", size, SIZES))
    shape = SIZES[size]
    settings = {
        key: Setting(value=getattr(shape, key), source=shape.source)
        for key in ("hidden_size", "intermediate_size", "n_heads", "n_layers")
    }
    fields = {key: field for key, field in RunConfig.model_fields.items() if not field.is_required()}
    defaults = {key: Setting(value=field.default, source="default of a run") for key, field in fields.items()}
    return defaults | settings | paper.settings | paper.sizes[size].settings | scale_changes(scale, size)


def resolve_norm(paper: PaperSpec, row: RunRow, size: str, scale: ScaleSpec) -> tuple[dict[str, Any], str]:
    """The row's method and its source: the size's alpha filled in, the scale's options applied (printed rows only)."""
    norm, source = dict(row.norm), row.source
    if norm.get("post_fraction") == {"of": "size"}:
        fraction = paper.sizes[size].post_fraction
        if fraction is None:
            raise SpecError(f"sizes.{size}.post_fraction is missing, which the row's norm refers to: add it")
        norm["post_fraction"] = fraction.value
        source = f"{source}; alpha: {fraction.source}"
    if not row.scales:
        for option, change in scale.methods.get(norm["name"], {}).items():
            norm[option] = change.value
            source = f"{source}; {option} by scale {scale.scale}: {change.why}"
    return norm, source


def build_run(settings: dict[str, Setting], size: str, norm: dict[str, Any], seed: int, where: str) -> RunConfig:
    """The run that these settings describe; SpecError names the cell otherwise."""
    values = {key: setting.value for key, setting in settings.items()}
    run = parse({**values, "size": size, "norm": norm, "seed": seed}, RunConfig, where)
    try:
        data_id(run.data_settings())
    except PaperLMError as error:
        raise SpecError(f"{where}: {error}") from None
    return run
