"""What a figure's `options` may hold: each kind declares them as a class `Options`, and says what they name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

from paperlm.errors import SpecError, unknown
from paperlm.frozen import Frozen
from paperlm.load import parse
from paperlm.plan.project import Project

Columns = Mapping[str, tuple[str, ...]]
"Series of a record -> columns of it."


class FigureOptions(Frozen):
    """Options of a kind of figure; a kind without a class `Options` has none. What is named has to exist."""

    drawn_from: ClassVar[str] = "jobs"
    "jobs: its own; another word: a table of this kind; empty: its options alone"

    def reads(self) -> Columns:
        """Series of each record that it reads, and which columns of them."""
        return {}

    def reads_metrics(self) -> tuple[str, ...]:
        """Metrics that it reads of each record."""
        return ()

    def names_rows(self) -> Mapping[str, str]:
        """Option -> the row that it names, of the figure or of the table that it is drawn from."""
        return {}

    def names_columns(self) -> Mapping[str, str]:
        """Option -> the column that it names, of the table."""
        return {}

    def statistics(self) -> tuple[str, ...]:
        """What its claims can read, as columns; empty: not said."""
        return ()


def options_class(kind: str) -> type[FigureOptions]:
    """The class of a kind's options."""
    return getattr(importlib.import_module(f"paperlm.figures.{kind}"), "Options", FigureOptions)


def options_of(project: Project, name: str) -> dict[str, Any]:
    """The options of a figure, those at their default too. SpecError for unknown, missing and impossible ones."""
    return _options(project, name).model_dump()


def _options(project: Project, name: str) -> FigureOptions:
    _, spec = project.figure(name)
    return parse(spec.options, options_class(spec.draw), f"figures.{name}.options")


def check_options(project: Project, name: str) -> None:
    """SpecError for options that are impossible or name what does not exist, and for a figure drawn from nothing."""
    _, spec = project.figure(name)
    options = _options(project, name)
    table = project.tables.get(spec.table, (None, None))[1]
    found = table.kind if table else "jobs" if spec.job else ""
    if options.drawn_from and found != options.drawn_from:
        wanted = (
            "jobs: give it `job` and `rows`" if options.drawn_from == "jobs" else f"a table of {options.drawn_from}"
        )
        raise SpecError(f"figures.{name}: draw: {spec.draw} draws {wanted}; it is given {found or 'nothing'}")
    source = table or spec
    rows = getattr(source, "models", None) or getattr(source, "sizes", None) or source.rows
    for kind, named, known in (
        ("row", options.names_rows(), rows),
        ("column", options.names_columns(), source.columns),
    ):
        for option, label in named.items():
            if label not in known:
                raise SpecError(f"figures.{name}.options.{option}: {unknown(kind, label, known)}")
    for job in dict.fromkeys(job for cell in project.cells(name) for job in cell.jobs):
        _check_record(f"figures.{name}.options: a job of kind {job.kind}", options, job.series(), job.metrics())
    for statistic in spec.in_words:
        if (known := options.statistics()) and statistic not in known:
            raise SpecError(f"figures.{name}.in_words: {unknown('statistic', statistic, known)}")


def _check_record(where: str, options: FigureOptions, series: Columns | None, metrics: tuple[str, ...] | None) -> None:
    """SpecError for what a figure reads and a record will not have; a kind that does not say what it has passes."""
    for one, columns in options.reads().items() if series is not None else ():
        if one not in series:
            raise SpecError(f"{where}: {unknown('series', one, series)}")
        for column in columns:
            if column not in series[one]:
                raise SpecError(f"{where}, series {one}: {unknown('column', column, series[one])}")
    for metric in options.reads_metrics() if metrics is not None else ():
        if metric not in metrics:
            raise SpecError(f"{where}: {unknown('metric', metric, metrics)}")
