"""What a paper file names in one place has to be declared in another, and to fit there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paperlm.errors import SpecError, unknown
from paperlm.jobs import kind_of
from paperlm.jobs.base import parent_kinds
from paperlm.models.sizes import ALL_SIZES
from paperlm.norms import build_method, known_options
from paperlm.plan.exhibit import FigureSpec, JobCells, parts
from paperlm.plan.scale import known_settings
from paperlm.plan.table import ArithmeticTable, MeasurementsTable, SettingsTable

if TYPE_CHECKING:
    from paperlm.plan.paper import PaperSpec

NAME = r"^[A-Za-z][A-Za-z0-9_]*$"
"Names that become files, targets and wildcards."


def check_names(paper: PaperSpec) -> None:
    """ValueError, with place and nearest name, for the first name that is declared nowhere or does not fit."""
    for place, kind, name, known in _references(paper):
        if name not in known:
            raise ValueError(f"{place}: {unknown(kind, name, known)}")
    for section in ("tables", "figures", "cases", "jobs"):
        for name in getattr(paper, section):
            if not re.fullmatch(NAME, name):
                raise ValueError(f"{section}: {name!r} becomes a file name: use letters, digits and _ only")
    for place, name, settings in _settings(paper):
        try:
            known_settings(paper.jobs[name].kind, settings)
        except ValueError as error:
            raise ValueError(f"{place}.{name}: {error}") from None
    _check_parents(paper)
    for name, exhibit in paper.exhibits().items():
        for part, label, spec in parts(exhibit):
            for one, other in spec.instead.items():
                _check_instead(paper, f"{name}.{part}.{label}.instead", one, other)
    for scale, changes in paper.scales.items():
        for name, jobs in changes.instead.items():
            for one, other in jobs.items():
                _check_instead(paper, f"scales.{scale}.instead.{name}", one, other.job)
    _check_norms(paper)
    _check_claims(paper)


def _settings(paper: PaperSpec) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every place that gives settings of a named job: (place, job, settings)."""
    for size, spec in paper.sizes.items():
        yield from ((f"sizes.{size}.jobs", name, settings) for name, settings in spec.jobs.items())
    for scale, changes in paper.scales.items():
        yield from ((f"scales.{scale}.jobs", name, settings) for name, settings in changes.jobs.items())
        for size, jobs in changes.sizes.items():
            yield from ((f"scales.{scale}.sizes.{size}", name, settings) for name, settings in jobs.items())
    for name, exhibit in paper.exhibits().items():
        for part, label, spec in parts(exhibit):
            yield from ((f"{name}.{part}.{label}.settings", job, s) for job, s in spec.settings.items())


def _references(paper: PaperSpec) -> Iterator[tuple[str, str, str, object]]:
    """Every name used in one place and declared in another: (place, what it names, name, declared names)."""
    for name, job in paper.jobs.items():
        yield from ((f"jobs.{name}.{field}", "job", other, paper.jobs) for field, other in job.parents.items())
        if job.like:
            yield f"jobs.{name}.like", "job", job.like, paper.jobs
        if job.with_.size:
            yield f"jobs.{name}.with.size", "size", job.with_.size, paper.sizes
    for place, name, _ in _settings(paper):
        yield place, "job", name, paper.jobs
    for scale, changes in paper.scales.items():
        yield from ((f"scales.{scale}.sizes", "size", size, paper.sizes) for size in changes.sizes)
        for name, jobs in changes.instead.items():
            at = f"scales.{scale}.instead"
            yield at, "exhibit", name, paper.exhibits()
            for one, other in jobs.items():
                yield from ((f"{at}.{name}", "job", job, paper.jobs) for job in (one, other.job))
        for name, sizes in changes.instead_of_sizes.items():
            at = f"scales.{scale}.instead_of_sizes"
            yield at, "exhibit", name, paper.exhibits()
            for one, other in sizes.items():
                yield from ((f"{at}.{name}", "size", size, paper.sizes) for size in (one, other.size))
        for size, other in changes.stand_ins.items():
            yield f"scales.{scale}.stand_ins", "size", size, paper.sizes
            yield f"scales.{scale}.stand_ins.{size}", "model size", other.size, ALL_SIZES
    for size in paper.sizes:
        yield "sizes", "model size", size, ALL_SIZES
    for name, case in paper.cases.items():
        if case.tokens and (case.vocab is None or case.width is None):
            yield f"cases.{name}.model", "model", case.model, paper.models
        if case.on_cpu:
            yield f"cases.{name}.on_cpu", "case", case.on_cpu, paper.cases
    for name, exhibit in paper.exhibits().items():
        yield from _references_of(paper, name, exhibit)
    for deviation in paper.deviations:
        for touched in deviation.touches:
            yield "deviations.touches", "exhibit", touched, paper.exhibits()


def _references_of(paper: PaperSpec, name: str, exhibit: Any) -> Iterator[tuple[str, str, str, object]]:
    at = f"tables.{name}" if name in paper.tables else f"figures.{name}"
    if isinstance(exhibit, JobCells) and exhibit.job:
        yield f"{at}.job", "job", exhibit.job, paper.jobs
    if isinstance(exhibit, JobCells) and exhibit.along:
        yield f"{at}.along.job", "job", exhibit.along.job, paper.jobs
    for part, label, spec in parts(exhibit):
        if spec.size:
            yield f"{at}.{part}.{label}", "size", spec.size, paper.sizes
        if spec.job:
            yield f"{at}.{part}.{label}.job", "job", spec.job, paper.jobs
        for pair in spec.instead.items():
            yield from ((f"{at}.{part}.{label}.instead", "job", job, paper.jobs) for job in pair)
        yield from ((f"{at}.{part}.{label}.mean_of", "column", c, exhibit.columns) for c in spec.mean_of)
        for size, values in spec.values.items():
            where = f"{at}.{part}.{label}.values"
            yield where, "size", size, paper.sizes
            yield from ((f"{where}.{size}", "value", key, paper.sizes[size].values) for key in values)
    for index, one in enumerate(getattr(exhibit, "predicted", ())):
        yield from ((f"{at}.predicted[{index}]", "row", row, exhibit.rows) for row in one.rows)
        yield from ((f"{at}.predicted[{index}]", "column", column, exhibit.columns) for column in one.columns)
    match exhibit:
        case SettingsTable():
            for label, line in exhibit.lines().items():
                where = f"{at}.rows.{label}" if exhibit.rows else at
                yield f"{where}.job", "job", line.job, paper.jobs
                yield where if exhibit.rows else f"{at}.sizes", "size", line.size, paper.sizes
        case ArithmeticTable():
            yield from ((f"{at}.models", "model", model, paper.models) for model in exhibit.models)
        case MeasurementsTable():
            others = [column.case for column in exhibit.columns.values() if column.case]
            yield from ((f"{at}.cases", "case", case, paper.cases) for case in (*exhibit.cases, *others))
        case FigureSpec() if exhibit.table:
            yield f"{at}.table", "table", exhibit.table, paper.tables


def _check_parents(paper: PaperSpec) -> None:
    """ValueError for a parent of the wrong kind and for a circle."""
    for name, job in paper.jobs.items():
        seen = [name]
        while (like := paper.jobs[seen[-1]].like) and like not in seen:
            seen.append(like)
        if like:
            raise ValueError(f"jobs.{name}.like: goes in a circle: {' -> '.join([*seen, like])}")
        if job.like and paper.jobs[job.like].kind != job.kind:
            other = paper.jobs[job.like].kind
            raise ValueError(f"jobs.{name}.like: {job.like!r} is a {other} job, not a {job.kind} one")
        kinds = parent_kinds(kind_of(job.kind))
        for field, other in job.parents.items():
            if other in paper.jobs and paper.jobs[other].kind not in kinds[field]:
                wanted = " or ".join(kinds[field])
                raise ValueError(
                    f"jobs.{name}.{field}: {other!r} is a {paper.jobs[other].kind} job; it has to be {wanted}"
                )
        if name in (others := _works_on(paper, name)):
            between = ", ".join(one for one in paper.jobs if one in others and one != name)
            raise ValueError(f"jobs.{name}: works on itself, by way of {between or 'nothing'}")


def _works_on(paper: PaperSpec, name: str) -> set[str]:
    """The jobs of the file that a job works on, theirs, and so on; of a circle, each of them."""
    found: set[str] = set()
    waiting = list(paper.jobs[name].parents.values())
    while waiting:
        if (other := waiting.pop()) not in found and other in paper.jobs:
            found.add(other)
            waiting += paper.jobs[other].parents.values()
    return found


def _check_instead(paper: PaperSpec, place: str, one: str, other: str) -> None:
    """ValueError for a job of a kind that nothing which works on the other one can take, and for a circle."""
    kind, wanted = paper.jobs[other].kind, paper.jobs[one].kind
    fields = [
        parent_kinds(kind_of(job.kind))[field]
        for job in paper.jobs.values()
        for field, name in job.parents.items()
        if name == one
    ]
    taken = {name for kinds in fields for name in kinds} | {wanted}
    if kind not in taken:
        kinds = " or ".join(map(repr, sorted(taken)))
        raise ValueError(f"{place}: {other!r} is a job of kind {kind!r}; in place of {one!r} it has to be {kinds}")
    if one in _works_on(paper, other):
        raise ValueError(f"{place}: {other!r} works on {one!r} itself, which it cannot take the place of")


def _check_norms(paper: PaperSpec) -> None:
    """ValueError for a method, option or value that does not exist."""
    for size, spec in paper.sizes.items():
        for method, options in spec.norm.items():
            try:
                known_options(method, options)
            except SpecError as error:
                raise ValueError(f"sizes.{size}.norm: {error}") from None
    for place, norm in _norms(paper):
        try:
            build_method(_filled(paper, norm))
        except SpecError as error:
            raise ValueError(f"{place}: {error}") from None


def _norms(paper: PaperSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every norm method that is named: (place, its description)."""
    for name, job in paper.jobs.items():
        if job.with_.norm:
            yield f"jobs.{name}.with.norm", job.with_.norm
    for name, exhibit in paper.exhibits().items():
        if isinstance(exhibit, SettingsTable):
            yield f"tables.{name}.norm", exhibit.norm
        for part, label, spec in parts(exhibit):
            if spec.norm:
                yield f"{name}.{part}.{label}.norm", spec.norm


def _filled(paper: PaperSpec, norm: dict[str, Any]) -> dict[str, Any]:
    """A description whose options of the size are those of the first size that has them."""
    method = norm.get("name", "")
    filled = dict(norm)
    for option, value in norm.items():
        if isinstance(value, dict) and option == "base":
            filled[option] = _filled(paper, value)
        elif isinstance(value, dict):
            if value != {"of": "size"}:
                raise SpecError(f"{option}: {value}: write {{of: size}} for what the size says, or the value itself")
            known_options(method, [option])
            given = [size.norm[method][option] for size in paper.sizes.values() if option in size.norm.get(method, {})]
            if not given:
                raise SpecError(f"no size says {option}: add sizes.<size>.norm.{method}.{option}")
            filled[option] = given[0].value
    return filled


def _check_claims(paper: PaperSpec) -> None:
    """ValueError for names that claims use twice, or cannot use."""
    names: dict[str, str] = {}
    for exhibit, spec in paper.exhibits().items():
        if (name := spec.claims_name) and not name.isidentifier():
            raise ValueError(f"{exhibit}.claims_name: {name!r}: use letters, digits and _ only, a letter first")
        if name and name in names:
            raise ValueError(f"{exhibit}.claims_name: {name!r} is that of {names[name]} already; rename one")
        names[name] = exhibit
