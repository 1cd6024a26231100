"""Tables of kind `settings`: the paper's hyper-parameters beside those of our own job at the `paper` scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

from paperlm.errors import SpecError, unknown
from paperlm.plan.echo import our_settings
from paperlm.plan.exhibit import Setting
from paperlm.plan.project import Project
from paperlm.plan.table import EchoColumn, SettingsTable
from paperlm.tables.claims import CellSamples, PrintedCell
from paperlm.tables.contents import Contents, DiffRow, Key, check_labels
from paperlm.tables.published import PublishedTable, half_a_digit, number
from paperlm.tables.vocabulary import NOT_PRINTED, NOT_RUN


def _plain(value: Any) -> str:
    """A number without needless digits, several in brackets, a word as it is."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_plain, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)


FORMS: dict[str, Callable[[Any], str]] = {
    "plain": _plain,
    "thousands": lambda value: f"{value / 1e3:.0f}K",
    "millions": lambda value: f"{value / 1e6:.0f}M",
    "billions": lambda value: f"{value / 1e9:.1f}B",
    "scientific": lambda value: f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-"),
    "percent": lambda value: f"{float(Fraction(str(value))):.2%}".replace(".00%", "%"),
}
"How a value is printed: 0.1 or (0.9, 0.95), 26K, 1M, 1.1B, 1.5e-3, 6.25%."
ARROW = " → "
"Between the two values of a setting that changes during training."


def contents(project: Project, name: str, published: PublishedTable, records: Iterable[Path] = ()) -> Contents:
    """The table at scale paper, whatever scale is configured; no record is read. Claims read the cells that are
    numbers. SpecError for an unknown setting."""
    _, table = project.table(name)
    columns = {label: column.in_print for label, column in table.columns.items()}
    check_labels(name, dict.fromkeys(table.lines(), True), columns, published)
    diff: list[DiffRow] = []
    samples: dict[Key, CellSamples] = {}
    for row in table.lines():
        settings = our_settings(project, name, row)
        for label, column in table.columns.items():
            common = {"table": name, "row": row, "column": label, "scale": "paper"}
            printed = published.cell(row, label)
            if column.not_run:
                common |= {"published": printed, "regenerated": NOT_RUN}
                diff.append(DiffRow(**common, verdict=NOT_RUN, reason=column.not_run))
                continue
            value, reason = _value(name, table, column, settings)
            common |= {"published": printed, "regenerated": value, "metric": column.setting}
            if (ours := number(value)) is not None:
                samples[row, label] = CellSamples((ours,))
            if not column.in_print:
                diff.append(DiffRow(**common, verdict=NOT_PRINTED, reason=reason))
                continue
            a, b = number(printed), ours
            if b is not None and a is None and printed.strip() and ARROW.strip() not in printed:
                raise SpecError(
                    f"{table.published}: row {row!r}, column {label!r}: {printed!r} is no number, and ours is {value}"
                )
            same = printed == value or (a is not None and b is not None and abs(a - b) <= half_a_digit(printed))
            difference = "" if a is None or b is None else f"{b - a:+.4g}"
            verdict = "match" if same else "differs"
            diff.append(DiffRow(**common, difference=difference, verdict=verdict, reason="" if same else reason))
    cells = {key: PrintedCell(value, text=published.cell(*key)) for key, value in published.values.items()}
    return Contents(diff, samples, printed=cells, depends_on_scale=False)


def _value(name: str, table: SettingsTable, column: EchoColumn, settings: dict[str, Setting]) -> tuple[str, str]:
    """Our value as the paper would print it, and where it comes from."""
    for key in filter(None, (column.setting, column.then, *column.times)):
        if key not in settings:
            raise SpecError(f"tables.{name}.columns: {unknown('setting', key, settings)}")
    form = FORMS[column.form]
    value, second = settings[column.setting].value, settings[column.then].value if column.then else None
    if column.times:
        value *= math.prod(settings[key].value for key in column.times)
    text = form(value) if second in (None, value) else f"{form(value)}{ARROW}{form(second)}"
    return text, f"ours: {column.source or settings[column.setting].source}"
