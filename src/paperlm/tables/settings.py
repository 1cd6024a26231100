"""Tables of kind `settings`: the paper's hyper-parameters beside those of our own job at the `paper` scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

from paperlm.errors import SpecError, unknown
from paperlm.plan.echo import our_settings
from paperlm.plan.exhibit import EchoColumn, Setting, SettingsTable
from paperlm.plan.project import Project
from paperlm.tables.contents import Contents, DiffRow, check_labels
from paperlm.tables.published import PublishedTable, half_a_digit, number

FORMS: dict[str, Callable[[Any], str]] = {
    "plain": str,
    "thousands": lambda value: f"{value / 1e3:.0f}K",
    "billions": lambda value: f"{value / 1e9:.1f}B",
    "scientific": lambda value: f"{value:.0e}".replace("e-0", "e-"),
    "percent": lambda value: f"{float(Fraction(str(value))):.2%}".replace(".00%", "%"),
}
"How a value is printed: 25.6K, 1.1B, 1e-3, 6.25%."


def contents(project: Project, name: str, published: PublishedTable, records: Iterable[Path] = ()) -> Contents:
    """The table at scale paper, whatever scale is configured; no record is read. SpecError for an unknown setting."""
    _, table = project.table(name)
    check_labels(name, dict.fromkeys(table.sizes, True), dict.fromkeys(table.columns, True), published)
    diff = []
    for size in table.sizes:
        settings = our_settings(project, name, size)
        for label, column in table.columns.items():
            value, reason = _value(name, table, column, settings)
            printed = published.cell(size, label)
            a, b = number(printed), number(value)
            if b is not None and a is None and printed.strip():
                raise SpecError(
                    f"{table.published}: row {size!r}, column {label!r}: {printed!r} is no number, and ours is {value}"
                )
            same = printed == value or (a is not None and b is not None and abs(a - b) <= half_a_digit(printed))
            diff.append(
                DiffRow(
                    table=name, row=size, column=label, scale="paper", published=printed, regenerated=value,
                    metric=column.setting, difference="" if a is None or b is None else f"{b - a:+.4g}",
                    verdict="match" if same else "differs", reason="" if same else reason,
                )
            )  # fmt: skip
    return Contents(diff, depends_on_scale=False)


def _value(name: str, table: SettingsTable, column: EchoColumn, settings: dict[str, Setting]) -> tuple[str, str]:
    """Our value as the paper would print it, and where it comes from."""
    for key in (column.setting, *column.times):
        if key not in settings:
            raise SpecError(f"tables.{name}.columns: {unknown('setting', key, settings)}")
    value = settings[column.setting].value
    if column.times:
        value *= math.prod(settings[key].value for key in column.times)
    return FORMS[column.form](value), f"ours: {column.source or settings[column.setting].source}"
