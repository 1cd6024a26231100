"""Tables of kind `arithmetic`: numbers that follow from published constants, compared with the printed digits."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from paperlm import cost
from paperlm.cost.memory import MIB
from paperlm.errors import SpecError, unknown
from paperlm.load import parse
from paperlm.plan.paper import PaperSpec
from paperlm.plan.project import Project
from paperlm.plan.table import ArithmeticTable
from paperlm.tables.claims import CellSamples, PrintedCell
from paperlm.tables.contents import Contents, DiffRow, check_labels, relative, without_print
from paperlm.tables.published import PublishedTable, half_a_digit, number


def contents(project: Project, name: str, published: PublishedTable, records: Iterable[Path] = ()) -> Contents:
    """The table, whatever scale is configured; no record is read. SpecError for an unknown quantity or constant."""
    paper, table = project.table(name)
    columns = {label: column.printed for label, column in table.columns.items()}
    check_labels(name, {model: "not found" for model in table.models}, columns, published)
    formula, setup = formula_of(paper, name), table_setup(paper, name)
    diff, samples = [], {}
    for model in table.models:
        values = formula.quantities(paper.models[model], setup)
        for label, column in table.columns.items():
            if column.quantity not in values:
                where = f"tables.{name}.columns.{label}"
                raise SpecError(f"{where}: {unknown('quantity', column.quantity, formula.QUANTITIES)}")
            value, printed = values[column.quantity], published.cell(model, label)
            diff.append(_diff_row(paper, table, name, model, label, value, printed))
            if value is not None:
                samples[model, label] = CellSamples((value,), printed=printed)
    printed_cells = {key: PrintedCell(v, text=published.cell(*key)) for key, v in published.values.items()}
    return Contents(diff, samples, printed_cells, depends_on_scale=False)


def formula_of(paper: PaperSpec, name: str) -> ModuleType:
    """The module of paperlm.cost that a table's numbers follow from; SpecError for an unknown one."""
    formula = paper.tables[name].formula
    known = [info.name for info in pkgutil.iter_modules(cost.__path__)]
    if formula not in known:
        raise SpecError(f"tables.{name}.formula: {unknown('formula', formula, known)}")
    return importlib.import_module(f"{cost.__name__}.{formula}")


def table_setup(paper: PaperSpec, name: str, **changes: float) -> Any:
    """The constants of a table of arithmetic, with changes; SpecError for a constant that is missing or unknown."""
    constants = {key: setting.value for key, setting in paper.tables[name].constants.items()}
    return parse({**constants, **changes}, formula_of(paper, name).Setup, f"tables.{name}.constants")


def _diff_row(
    paper: PaperSpec, table: ArithmeticTable, name: str, model: str, label: str, value: float | None, printed: str
) -> DiffRow:
    common = {"table": name, "row": model, "column": label, "scale": "paper", "published": printed}
    column = table.columns[label]
    if value is None:
        reason = f"elements not known: {paper.models[model].source}"
        return DiffRow(**common, regenerated="", verdict="not run", reason=reason)
    shown = {"regenerated": FORMS[column.form](value), "metric": column.quantity, "judged_on": f"{value:.8g}"}
    reference = number(printed)
    if reference is None:
        verdict, reason = without_print("not found" if column.printed else column.printed)
        return DiffRow(**common, **shown, verdict=verdict, reason=reason)
    difference = value - reference
    return DiffRow(
        **common, **shown, difference=f"{difference:+.3g}", relative_difference=relative(difference, reference),
        verdict="match" if abs(difference) <= half_a_digit(printed) else "differs",
    )  # fmt: skip


def three_digits(value: float) -> str:
    """A count as the paper prints it: 5.87M, 69.8M, 397K."""
    suffix, unit = next(((s, u) for s, u in (("B", 1e9), ("M", 1e6), ("K", 1e3)) if value >= u), ("", 1.0))
    scaled = value / unit
    return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f}{suffix}"


FORMS = {
    "count": three_digits,
    "mib": lambda value: f"{value / MIB:.0f}",
    "times": lambda value: f"{value:.1f}x",
    "integer": lambda value: f"{value:.0f}",
}
