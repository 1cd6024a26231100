"""Everything declared, loaded and checked: papers, one scale, configuration -> cells -> jobs."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from paperlm.errors import SpecError, unknown
from paperlm.frozen import Frozen
from paperlm.jobs import Job
from paperlm.jobs.base import Seed, Stage, kept_for
from paperlm.jobs.hub_model import HubModel
from paperlm.kept import kept
from paperlm.load import load, parse, read_yaml
from paperlm.plan.exhibit import DivergedRule, FigureSpec, JobCells, Part, Setting
from paperlm.plan.paper import UNCHANGED, Deviation, PaperSpec, ScaleChanges
from paperlm.plan.resolve import Context, Resolver
from paperlm.plan.scale import ScaleSpec, SeedNoise
from paperlm.plan.table import TableSpec
from paperlm.record.places import Places

ROOT = Path(__file__).resolve().parents[3]


def clone() -> Path:
    """The clone of the repository that this package stands in; SpecError where it was installed without one."""
    if not (ROOT / "workflow/scales").is_dir():
        raise SpecError(
            f"this works in a clone of the repository only: {ROOT} has no workflow/scales. Clone it, and run "
            "python -m paperlm there"
        )
    return ROOT


class ProjectConfig(Frozen):
    """config.yaml: what is run and where the data is. Machine settings belong in a profile."""

    scale: str = "tiny"
    seeds: list[Seed] = Field([0], min_length=1)
    run_missing: str = Field("auto", pattern="^(auto|yes|no)$")
    "make jobs without a record? auto: yes on the CPU scales, and where a GPU is seen on the GPU scales"
    remake: str = Field("auto", pattern="^(auto|drifted|no)$")
    "make jobs again whose record is of earlier rules? auto: on the CPU scales; drifted: wherever jobs are made"

    @field_validator("seeds")
    @classmethod
    def different(cls, value: list[int]) -> list[int]:
        if len(set(value)) < len(value):
            raise ValueError(f"a seed is named twice: {value}")
        return value

    @field_validator("run_missing", "remake", mode="before")
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


def configuration(root: Path, given: Mapping[str, Any] | None = None) -> ProjectConfig:
    """What config.yaml says, with the keys that a command line gives (`--config`). Raises SpecError naming which of
    the two is wrong."""
    path = root / "config.yaml"
    content = read_yaml(path)
    file = parse({} if content is None else content, ProjectConfig, str(path))
    if not given:
        return file
    return parse({**file.model_dump(), **given}, ProjectConfig, "--config")


@dataclass(frozen=True)
class Cell:
    """One cell of an exhibit at one scale: a job per seed, how it is read, and the source of every setting."""

    exhibit: str
    row: str
    column: str
    jobs: tuple[Job, ...] = ()
    metric: str = ""
    mean_of: tuple[str, ...] = ()
    "columns whose mean it is; the jobs are theirs"
    sum_of_column: str = ""
    "metric of the column's jobs that it counts"
    size: str = ""
    "the paper's, whose jobs it shows"
    asked_size: str = ""
    "that of the row or column, where it is another"
    values: dict[str, Any] = field(default_factory=dict)
    "what the paper's size says for tables"
    factor: float | None = None
    "printed number / metric, where a row or column says it in place of the table"
    sources: dict[str, dict[str, Setting]] = field(default_factory=dict)
    "job of the chain -> setting -> value and source"
    printed: bool = True
    stands_for: str = ""
    "the published checkpoint that a row or column names, where the jobs work on another model"


class Project:
    """Papers and one scale, loaded and checked. Construction raises SpecError for anything that does not resolve."""

    def __init__(self, config: dict[str, Any] | ProjectConfig | None = None, root: Path = ROOT) -> None:
        self.root = root
        if not isinstance(config, ProjectConfig):
            config = parse(config or {}, ProjectConfig, "configuration")
        self.config = config
        self.scales = {p.stem: p for p in sorted((root / "workflow/scales").glob("*.yaml"))}
        if config.scale not in self.scales:
            raise SpecError(unknown("scale", config.scale, self.scales))
        # All of them: a mistake in another scale's file shows today, not on the cluster.
        self._loaded = {name: self._load_scale(name) for name in self.scales}
        self.scale = self._loaded[config.scale]
        self.places = Places(root, config.scale)
        self.papers: dict[str, PaperSpec] = {}
        self.tables: dict[str, tuple[PaperSpec, TableSpec]] = {}
        self.figures: dict[str, tuple[PaperSpec, FigureSpec]] = {}
        self._claims: dict[str, str] = {}
        "claim's id -> where it stands"
        for path in sorted((root / "workflow/papers").glob("*.yaml")):
            self._add(path, load(path, PaperSpec))
        for table in config.editions:
            if not self.table(table)[1].edition:
                raise SpecError(f"editions: table {table!r} has one edition only; leave it out")

    def _add(self, path: Path, paper: PaperSpec) -> None:
        if paper.paper.id != path.stem:
            raise SpecError(f"{path}: paper.id is {paper.paper.id!r}; it must be the file's name, {path.stem!r}")
        self.papers[paper.paper.id] = paper
        for name, table in paper.tables.items():
            if name in self.tables or name in self.figures:
                raise SpecError(f"{path}: table {name!r} is declared twice; rename one")
            if table.published and not (file := self.root / table.published).is_file():
                there = [str(p.relative_to(self.root)) for p in file.parent.glob("*.csv")]
                raise SpecError(f"{path}: tables.{name}.published: {unknown('file', table.published, there)}")
            self.tables[name] = (paper, table)
        for name, figure in paper.figures.items():
            if name in self.tables or name in self.figures:
                raise SpecError(f"{path}: {name!r} is declared twice; rename one")
            self.figures[name] = (paper, figure)
        for place, scale in paper.scale_names():
            if scale not in self.scales:
                raise SpecError(f"{path}: {place}: " + unknown("scale", scale, self.scales))
        for name, claim in (*paper.claims(), *(("consistency", check.id) for check in paper.consistency)):
            if claim in self._claims:
                raise SpecError(f"{path}: {name}: claim {claim!r} stands in {self._claims[claim]} already; rename one")
            self._claims[claim] = f"{path.name}, {name}"
        known = [claim for _, claim in paper.claims()]
        for scale, changes in paper.scales.items():
            for claim in changes.except_:
                if claim not in known:
                    raise SpecError(f"{path}: scales.{scale}.except: " + unknown("claim", claim, known))

    def load_scale(self, name: str) -> ScaleSpec:
        """What a scale's file says."""
        return self._loaded[name]

    def _load_scale(self, name: str) -> ScaleSpec:
        scale = load(self.scales[name], ScaleSpec)
        if scale.scale != name:
            raise SpecError(f"{self.scales[name]}: scale is {scale.scale!r}; it must be the file's name, {name!r}")
        return scale

    # -- names --

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

    def exhibit(self, name: str) -> tuple[PaperSpec, TableSpec | FigureSpec]:
        """Paper and declaration of a table or figure; SpecError with the nearest known name otherwise."""
        known = {**self.tables, **self.figures}
        if name not in known:
            raise SpecError(unknown("table or figure", name, known))
        return known[name]

    @property
    def exhibits(self) -> list[str]:
        """Names of all tables and figures."""
        return [*self.tables, *self.figures]

    def deviations(self, name: str) -> list[Deviation]:
        """What is done differently from the paper in an exhibit at this scale."""
        paper, _ = self.exhibit(name)
        return [d for d in paper.deviations if name in d.touches and (not d.scales or self.scale.scale in d.scales)]

    def changes(self, paper: PaperSpec) -> ScaleChanges:
        """What a paper changes at this scale."""
        return paper.scales.get(self.scale.scale, UNCHANGED)

    def diverged_rule(self, name: str) -> DivergedRule | None:
        """When a number of a table counts as diverged at this scale; None if the table has no such rule."""
        paper, table = self.exhibit(name)
        if getattr(table, "diverged", None) is None:
            return None
        return self.changes(paper).diverged or table.diverged

    def seed_noise(self, name: str) -> SeedNoise:
        """How much a perplexity of an exhibit varies between seeds of training at this scale."""
        return self.changes(self.exhibit(name)[0]).seed_noise or self.scale.seed_noise

    def edition(self, table: str) -> str:
        """The edition whose printed numbers a table is compared with; empty if there is only one."""
        return self.config.editions.get(table, self.table(table)[1].edition)

    # -- cells and jobs --

    @kept
    def resolver(self, paper_id: str) -> Resolver:
        """Resolver of a paper at this scale."""
        return Resolver(self.papers[paper_id], self.scale)

    @kept
    def cells(self, name: str) -> tuple[Cell, ...]:
        """Every cell of an exhibit of jobs, row by row; empty for another exhibit."""
        paper, exhibit = self.exhibit(name)
        if not isinstance(exhibit, JobCells) or not exhibit.job:
            return ()
        pairs = itertools.product(self._parts(exhibit.rows), self._columns(exhibit))
        found = tuple(self._cell(name, paper, exhibit, row, column) for row, column in pairs)
        at_work = {job for cell in found for job in cell.sources}
        for replaced, other in self.changes(paper).instead.get(name, {}).items():
            if other.job not in at_work:
                raise SpecError(
                    f"scales.{self.scale.scale}.instead.{name}: no cell works on what {other.job!r} stands for; leave "
                    f"{replaced!r} out"
                )
        asked = {cell.asked_size for cell in found}
        for size in self.changes(paper).instead_of_sizes.get(name, {}):
            if size not in asked:
                raise SpecError(
                    f"scales.{self.scale.scale}.instead_of_sizes.{name}: no cell asks for {size!r}; leave it out"
                )
        return found

    def cells_anywhere(self, name: str) -> Iterator[Cell]:
        """Those cells, and of the rows and columns of other scales those that could be made at this one, for checks."""
        paper, exhibit = self.exhibit(name)
        yield from self.cells(name)
        for row, column in itertools.product(exhibit.rows.items(), () if exhibit.along else exhibit.columns.items()):
            elsewhere = any(part.scales and self.scale.scale not in part.scales for _, part in (row, column))
            # What only another scale's settings make possible is checked there.
            with contextlib.suppress(SpecError):
                if elsewhere:
                    yield self._cell(name, paper, exhibit, row, column)

    def _parts(self, parts: dict[str, Part]) -> Iterator[tuple[str, Part]]:
        return ((name, part) for name, part in parts.items() if not part.scales or self.scale.scale in part.scales)

    def _columns(self, exhibit: JobCells) -> Iterator[tuple[str, Part]]:
        if exhibit.along is not None:
            return iter(exhibit.along.columns(self.scale.scale).items())
        return self._parts(exhibit.columns)

    def _cell(
        self, name: str, paper: PaperSpec, exhibit: JobCells, row: tuple[str, Part], column: tuple[str, Part]
    ) -> Cell:
        where = f"{name} [{row[0]}, {column[0]}] at scale {self.scale.scale}"
        parts = (row[1], column[1])
        common = {"exhibit": name, "row": row[0], "column": column[0], "printed": all(part.printed for part in parts)}
        if counted := next((part.sum_of_column for part in parts if part.sum_of_column), ""):
            return Cell(**common, sum_of_column=counted)
        if averaged := next((part.mean_of for part in parts if part.mean_of), []):
            if nested := next((c for c in averaged if exhibit.columns[c].mean_of), ""):
                raise SpecError(f"{where}: mean_of names {nested!r}, which is a mean itself: name the columns it is of")
            others = [self._cell(name, paper, exhibit, row, (c, exhibit.columns[c])) for c in averaged]
            jobs = tuple(dict.fromkeys(job for cell in others for job in cell.jobs))
            return Cell(
                **common, jobs=jobs, metric=exhibit.metric, mean_of=tuple(averaged), size=others[0].size,
                asked_size=others[0].asked_size, values=others[0].values, sources=others[0].sources,
                stands_for=others[0].stands_for,
            )  # fmt: skip
        try:
            context = Context().joined(*parts)
            own = context.instead
            here = self.changes(paper).instead.get(name, {})
            context = replace(context, instead={**{one: other.job for one, other in here.items()}, **own})
            asked, smaller = context.size, self.changes(paper).instead_of_sizes.get(name, {})
            context = replace(context, size=smaller[asked].size if asked in smaller else asked)
        except SpecError as error:
            raise SpecError(f"{where}: {error}") from None
        job = next((part.job for part in parts if part.job), exhibit.job)
        resolver = self.resolver(paper.paper.id)
        found = [resolver.job(job, context, where, seed) for seed in self.seeds(exhibit)]
        if idle := [one for one in own.values() if one not in found[0].sources]:
            raise SpecError(f"{where}: instead: {job} does not work on what {idle[0]!r} stands for; leave it out")
        size = context.size or paper.jobs[job].with_.size
        known = dict(paper.sizes[size].values) if size in paper.sizes else {}
        for part in parts:
            known |= part.values.get(size, {})
        values = {key: setting.value for key, setting in known.items()}
        metric = next((part.metric for part in reversed(parts) if part.metric), exhibit.metric)
        factor = next((part.factor for part in reversed(parts) if part.factor is not None), None)
        checkpoints = [one for one in context.settings if paper.jobs[one].kind == HubModel.kind]
        named = [context.settings[one].get("name") for one in checkpoints if one not in found[0].sources]
        return Cell(
            **common, jobs=tuple(dict.fromkeys(r.job for r in found)), metric=metric, size=size,
            asked_size=asked if asked in smaller else "", values=values, sources=found[0].sources, factor=factor,
            stands_for=next((str(setting.value) for setting in named if setting), ""),
        )  # fmt: skip

    def seeds(self, exhibit: JobCells) -> list[int]:
        """Seeds that an exhibit is made with."""
        return sorted({*self.config.seeds, *range(exhibit.seeds.get(self.scale.scale, 0))})

    @kept
    def jobs_of(self, name: str) -> tuple[Job, ...]:
        """Jobs whose records an exhibit is built from; a figure may be drawn from those of its table."""
        _, exhibit = self.exhibit(name)
        own = tuple(dict.fromkeys(job for cell in self.cells(name) for job in cell.jobs))
        table = getattr(exhibit, "table", "")
        return own + (self.jobs_of(table) if table else ())

    @kept
    def called(self, name: str) -> dict[str, str]:
        """Name in the claims of an exhibit -> exhibit: its own before those of its paper before those of others."""
        mine, found = self.exhibit(name)[0], {}
        nearest_last = sorted(self.exhibits, key=lambda other: (other == name, self.exhibit(other)[0] is mine))
        for other in nearest_last:
            if short := self.exhibit(other)[1].claims_name:
                found[short] = other
        return found

    @kept
    def reads(self, name: str) -> tuple[str, ...]:
        """The exhibit itself, and the others whose cells its claims read."""
        named, claims = self.called(name), self.exhibit(name)[1].claims
        found = [named[short] for claim in claims for short in claim.reads if short in named]
        return tuple(dict.fromkeys([name, *found]))

    @functools.cached_property
    def jobs(self) -> dict[str, Job]:
        """Job id -> job, over all exhibits, ancestors included; exhibits and papers that ask for one job share it."""
        found: dict[str, Job] = {}
        for name in self.exhibits:
            for job in self.jobs_of(name):
                if job.job_id not in found:
                    found[job.job_id] = job
                    found |= {a.job_id: a for a in job.ancestors() if a.job_id not in found}
        return found

    def job_named(self, name: str) -> Job | None:
        """The job of an id, or of the beginning of one if a single job's begins so; None for another name."""
        found = [job for job_id, job in self.jobs.items() if job_id.startswith(name)]
        return self.jobs.get(name) or (found[0] if len(found) == 1 else None)

    @functools.cached_property
    def keep(self) -> dict[str, tuple[Stage, ...]]:
        """Job id -> its states that some child needs: a job keeps the union."""
        return kept_for(self.jobs.values())

    def exhibits_of(self, job_id: str) -> list[str]:
        """Exhibits that a job feeds directly."""
        return [name for name in self.exhibits if any(job.job_id == job_id for job in self.jobs_of(name))]
