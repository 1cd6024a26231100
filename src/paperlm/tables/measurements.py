"""Tables of kind `measurements`: speed, memory and error from rows of paper_tables/records/bench/<op>.jsonl.

Memory is compared with the printed number where a row says `by_value`, within the table's tolerance. Times never are:
the card is another one. They count as ratios inside the table, which is what its claims are about.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paperlm_kernels.bench.operation import Task
from paperlm_kernels.bench.rows import short_commit

from paperlm.cost.loss import gradient_bytes, loss_bytes
from paperlm.cost.memory import MIB
from paperlm.errors import RecordError
from paperlm.plan.measured import Place, places, read_rows
from paperlm.plan.paper import PaperSpec
from paperlm.plan.project import Project
from paperlm.plan.table import MeasuredColumn, MeasurementsTable
from paperlm.tables.claims import CellSamples, PrintedCell
from paperlm.tables.contents import Contents, DiffRow, check_labels, relative, without_print
from paperlm.tables.published import PublishedTable, half_a_digit, number
from paperlm.tables.vocabulary import (
    EARLIER_RULES,
    ENVIRONMENT_BOUND,
    MISPRINT,
    NOT_COMPARABLE,
    NOT_RUN,
    OUT_OF_MEMORY,
    REFERENCE,
)

LOWER_BOUND = "lower_bound"
UNITS = {"peak_memory": "MiB", "memory": "GiB", "time": "ms"}
"Of what a table prints as it was measured."
MEMORY = ("peak_memory", "memory")
"Metrics that are compared by value, and judged on a CPU too."
OF_TIME = ("value", "over_floor", "gb_per_s", "per_second")
"Fields of a time that vary as it does."
DEVIATIONS_BETWEEN_PERCENTILES = 2 * 0.8416
"Standard deviations between the 20th and the 80th percentile of a normal distribution."

Row = dict[str, Any]
Shape = dict[str, Any]
"Sizes of the inputs by name."


@dataclass(frozen=True)
class Measured:
    """What the measurement rows say about a cell: a row per seed, the newest of each; or why there is none."""

    rows: tuple[Row, ...] = ()
    outcome: str = ""
    other: bool = False
    "the method was measured on this case, but has no such quantity"
    computed: float | None = None
    field: str = "value"
    factor: float = 1.0
    shape: Shape = dataclasses.field(default_factory=dict)
    reference: bool = False
    "a method of ours whose kernels did not run: its PyTorch reference did"

    @property
    def values(self) -> tuple[float, ...]:
        """The value per seed."""
        if self.computed is not None:
            return (self.computed,)
        return tuple(self.factor * float(row[self.field]) for row in self.rows)

    @property
    def run(self) -> str:
        """When times were measured, and the commit that measured them: on another day a card and its host differ."""
        timed = [row for row in self.rows if row["metric"] == "time"]
        said = (f"{short_commit(row.get('commit'), 9) or 'no commit'} on {row['date']}" for row in timed)
        return ", ".join(dict.fromkeys(said))

    @property
    def drifted(self) -> tuple[str, ...]:
        """`neuzip 1 -> 2` for each behaviour that the rows name and that is another one today."""
        return tuple(dict.fromkeys(change for row in self.rows for change in _drift(row)))

    @property
    def noise(self) -> float:
        """Relative standard deviation of one repetition, or over seeds where that is larger."""
        spreads = [
            (row["high"] - row["low"]) / DEVIATIONS_BETWEEN_PERCENTILES / row["value"]
            for row in self.rows
            if row["value"] and row["metric"] == "time" and self.field in OF_TIME
        ]
        if len(self.values) > 1 and (mean := statistics.fmean(self.values)):
            spreads.append(statistics.stdev(self.values) / abs(mean))
        return max(spreads, default=0.0)


def contents(project: Project, name: str, published: PublishedTable, records: Iterable[Path]) -> Contents:
    """The table from its measurement rows. Raises RecordError; SpecError where declared and printed labels differ."""
    paper, table = project.table(name)
    if table.published:
        rows, columns = ({k: v.printed for k, v in part.items()} for part in (table.rows, table.columns))
        check_labels(name, rows, columns, published)
    found = Rows(records, paper, table, project.scale.benchmarks)
    diff, samples, proxies = [], {}, {}
    drifted, of_reference = set(), {}
    for place in places(project, name):
        measured, key = found.of(place), (place.row, place.column)
        if measured.values and place.measured != place.case:
            proxies[place.row] = "on a CPU, {tokens} tokens, {vocab} ids, width {width}".format(**measured.shape)
        printed = published.cell(place.row, place.column)
        diff.append(_diff_row(project, name, place, measured, printed))
        if measured.values:
            deviation = measured.noise * abs(statistics.fmean(measured.values))
            samples[key] = CellSamples(
                measured.values,
                # a number that is computed has no row, and is the same for every seed
                seeds=tuple(row["seed"] for row in measured.rows),
                deviation=deviation,
                printed=printed,
                run=measured.run,
            )
            if measured.drifted:
                drifted.add(key)
            # its losses and errors are those of the same arithmetic; what it takes is not what the kernels take
            if measured.reference and place.quantity.metric in (*MEMORY, "time"):
                of_reference[key] = REFERENCE
    untested = ""
    if project.scale.device == "cpu":
        untested = "measured on a CPU at a small shape: of its claims only those on memory alone are judged there"
    return Contents(
        diff,
        samples,
        {key: PrintedCell(v, text=published.cell(*key)) for key, v in published.values.items()},
        one_sample="one set of inputs; noise of a cell: the spread of its repetitions",
        untested=untested,
        judged_columns=frozenset(label for label, c in table.columns.items() if c.metric in MEMORY),
        untested_cells=of_reference,
        drifted_cells=frozenset(drifted),
        proxies=proxies,
        notes=(f"{NOT_COMPARABLE}: measured on other inputs than the paper's, on a CPU",) if proxies else (),
    )


class Rows:
    """Measurement rows of one table's operation and card, ready to be asked for a cell."""

    def __init__(self, paths: Iterable[Path], paper: PaperSpec, table: MeasurementsTable, size: str) -> None:
        rows = [r for path in paths for r in read_rows(path) if r["op"] == table.op and r["case"] in paper.cases]
        rows = [r for r in rows if r["order"] == "natural" and r["scale"] == size]
        devices = list(dict.fromkeys(r["device"] for r in rows))
        device = table.device if table.device in devices else devices[-1] if devices else None
        # stable: of one day, the last in the file is the newest
        rows.sort(key=lambda r: r["date"])
        self._rows = [r for r in rows if r["device"] == device]
        self._elsewhere = [r for r in rows if r["device"] != device]
        self._device = device
        self._paper = paper
        for row in self._rows if size == "full" else ():
            _check_shape(row, paper)

    def of(self, place: Place) -> Measured:
        """What there is about a cell. Raises RecordError for a unit that is not the table's."""
        quantity, method = place.quantity, place.method.method
        if quantity.only not in ("", method):
            return Measured(other=True)
        if not place.measured:
            return Measured(outcome="needs a GPU")
        if method == LOWER_BOUND and quantity.metric == "peak_memory":
            return self._bound(place.measured, quantity.where["measure"])
        mine = [r for r in self._rows if r["case"] == place.measured and r["name"] == method]
        chosen: dict[int, Row] = {}
        for row in mine:
            if _fits(row, quantity):
                chosen[row["seed"]] = row
            elif _failed(row, quantity) and _run_of(chosen.get(row["seed"], row)) != _run_of(row):
                del chosen[row["seed"]]
        for row in chosen.values():
            if quantity.field == "value" and UNITS.get(row["metric"], row["unit"]) != row["unit"]:
                raise RecordError(
                    f"{method}, {row['case']}: {row['metric']} in {row['unit']}, not in {UNITS[row['metric']]}"
                )
        if chosen:
            rows = tuple(chosen[seed] for seed in sorted(chosen))
            reference = any(row.get("settings", {}).get("backend") == "reference" for row in mine)
            return Measured(
                rows, field=quantity.field, factor=quantity.factor, shape=rows[-1]["shape"], reference=reference
            )
        cards = [
            r["device"]
            for r in self._elsewhere
            if (r["case"], r["name"]) == (place.measured, method) and _fits(r, quantity)
        ]
        outcomes = [r["outcome"] for r in mine if _failed(r, quantity)]
        outcomes = outcomes or [r["outcome"] for r in mine if r["metric"] == "outcome"]
        if cards and not outcomes:
            where = ", ".join(dict.fromkeys(cards))
            return Measured(outcome=f"measured on {where} only; this table is of {self._device}")
        measured = any(r["metric"] != "outcome" for r in mine)
        return Measured(outcome=outcomes[-1] if outcomes else "", other=measured and not outcomes)

    def _bound(self, case: str, measure: str) -> Measured:
        """MiB that a measured part of the loss cannot do without: its outputs."""
        shape = next((r["shape"] for r in self._rows if r["case"] == case), self._paper.inputs(case))
        element = self._paper.cases[case].element_bytes
        sizes = (shape[key] for key in ("tokens", "vocab", "width"))
        size = loss_bytes() if measure == "loss" else gradient_bytes(*sizes, element)
        return Measured(computed=size / MIB, shape=shape)


def _fits(row: Row, quantity: MeasuredColumn) -> bool:
    return (
        row["metric"] == quantity.metric
        and all(str(row.get(key)) == value for key, value in quantity.where.items())
        and row.get(quantity.field) is not None
    )


def _failed(row: Row, quantity: MeasuredColumn) -> bool:
    """Whether a row says that the method, or the part of it that the quantity is of, was tried and gave no number. One
    that is absent was not tried: what was measured where it is there stands."""
    parts = ("", quantity.metric, *quantity.where.values())
    return row["metric"] == "outcome" and row.get("measure", "") in parts and not row["outcome"].startswith("absent")


def _run_of(row: Row) -> tuple[str, str]:
    return row["date"], row.get("commit") or ""


def _drift(row: Row) -> list[str]:
    """What has changed since a row was measured, of the behaviours that it names."""
    if (then := row.get("behaviour")) is None:
        return []
    from paperlm.bench import with_ours  # stands above the tables, and knows the operations of both packages

    operation = with_ours().operation(row["op"])
    now = operation.identity(Task(row["op"], row["case"], row["name"], ())).get("behaviour")
    then, now = (one if isinstance(one, dict) else {row["op"]: one} for one in (then, now))
    return [f"{name} {number} -> {now.get(name)}" for name, number in then.items() if number != now.get(name)]


def _check_shape(row: Row, paper: PaperSpec) -> None:
    """RecordError if a row was measured on other inputs than its case declares."""
    declared = paper.inputs(row["case"])
    measured = {name: row["shape"].get(name) for name in declared}
    if declared != measured:
        raise RecordError(
            f"case {row['case']}: measured as {_listed(measured)}, declared as {_listed(declared)}: measure it again, "
            "or mend the case in the paper file"
        )


def _listed(sizes: Shape) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())


# -- the diff ---------------------------------------------------------------------------------------------------------


def _diff_row(project: Project, name: str, place: Place, measured: Measured, printed: str) -> DiffRow:
    _, table = project.table(name)
    common = {
        "table": name, "row": place.row, "column": place.column, "scale": project.scale.scale, "published": printed,
        "metric": " ".join([place.quantity.metric, *place.quantity.where.values()]),
        "made_by": project.table(name)[0].made_by.get(place.method.method, ""),
    }  # fmt: skip
    remark = place.method.remarks.get(place.column, "")
    printed_as = (place.method.printed, place.quantity.printed)
    if not measured.values:
        if measured.other or place.method.method == LOWER_BOUND:
            verdict, reason = without_print(*printed_as)
            return DiffRow(**common, regenerated="", verdict=verdict, reason=remark or reason)
        memory = "out of memory" in measured.outcome
        said = "out of memory" if memory else NOT_RUN
        reason = measured.outcome or _why_not_measured(project)
        # a dash stands in the other columns of what did not fit
        verdict = "out of memory as published" if printed in (OUT_OF_MEMORY, "-") else "differs" if printed else NOT_RUN
        return DiffRow(**common, regenerated=said, verdict=verdict if memory else NOT_RUN, reason=reason)
    value, reference = statistics.fmean(measured.values), number(printed)
    shown = {
        "regenerated": _three_digits(value),
        "judged_on": f"{value:.6g}",
        "spread": _spread(measured),
        "seeds": len(measured.values),
        "jobs": f"{table.op}/{place.measured}/{place.method.method}",
        "labels": _circumstances(measured),
    }
    if reference is None:
        verdict, reason = without_print(*printed_as) if not printed else (ENVIRONMENT_BOUND, "")
        return DiffRow(**common, **shown, verdict=verdict, reason=remark or reason or place.method.source)
    if place.measured != place.case:
        reason = f"case {place.measured} on a CPU in place of {place.case} on {table.printed_on}"
        return DiffRow(**common, **shown, verdict=NOT_COMPARABLE, reason=reason)
    if misprint := place.method.misprints.get(place.column):
        return DiffRow(**common, **shown, verdict=MISPRINT, reason=misprint)
    if place.quantity.incomparable:
        return DiffRow(**common, **shown, verdict=NOT_COMPARABLE, reason=place.quantity.incomparable)
    if place.quantity.metric not in MEMORY or not place.method.by_value:
        reason = f"printed on {table.printed_on}; times count as ratios, in the claims"
        if place.quantity.metric in MEMORY:
            reason = place.method.why
        return DiffRow(**common, **shown, verdict=ENVIRONMENT_BOUND, reason=remark or reason)
    shown["regenerated"] = f"{value:.{len(printed.partition('.')[2])}f}"
    difference = value - reference
    shown["difference"], shown["relative_difference"] = f"{difference:+.3g}", relative(difference, reference)
    verdict = "differs"
    if abs(difference) <= half_a_digit(printed):
        verdict = "match"
    elif abs(difference) <= table.tolerance * reference:
        verdict = f"within {table.tolerance:.0%}".replace("%", " %")
    return DiffRow(**common, **shown, verdict=verdict, reason=remark)


def _why_not_measured(project: Project) -> str:
    if project.scale.device == "cpu":
        return "not measured on a CPU"
    return "no measurement row; needs a GPU (snakemake measures what is missing, see run_missing in config.yaml)"


def _three_digits(value: float) -> str:
    """Three significant digits, and every digit before the point."""
    if value and abs(value) < 0.01:
        return f"{value:.2e}"
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def _spread(measured: Measured) -> str:
    """20th to 80th percentile of the repetitions, or the standard deviation over seeds."""
    if len(measured.values) > 1:
        return f"{statistics.stdev(measured.values):.3g}"
    row = measured.rows[0] if measured.rows else None
    if row is None or measured.field != "value" or row["low"] == row["high"]:
        return ""
    return f"{row['low']:.4g} to {row['high']:.4g}"


def _circumstances(measured: Measured) -> str:
    """Card, versions, commit and date of a measurement, and the shape it was made at."""
    if "weights" in measured.shape:
        sizes = f"{measured.shape['weights']} weights"
    elif "seq_len" in measured.shape:
        sizes = "{batch} x {seq_len} tokens an update".format(**measured.shape)
    else:
        sizes = "N={tokens}, V={vocab}, D={width}".format(**measured.shape)
    if not measured.rows:
        return f"computed; {sizes}"
    rows = measured.rows
    versions = [
        f"{package} {_joined(row['versions'].get(package) for row in rows)}"
        for package in ("torch", "triton")
        if any(package in row["versions"] for row in rows)
    ]
    data = f"{_joined(row.get('source') for row in rows)} data".strip()
    commits = _joined(short_commit(row.get("commit")) for row in rows)
    where = [_joined(row["device"] for row in rows), *versions, _joined(row["date"] for row in rows), data, sizes]
    said = [", ".join([*where, *([f"commit {commits}"] if commits else [])])]
    said += [REFERENCE] if measured.reference else []
    said += [f"{EARLIER_RULES}: {', '.join(measured.drifted)}"] if measured.drifted else []
    return "; ".join(said)


def _joined(values: Iterable[str | None]) -> str:
    """Each of them once: seeds may have been measured on several days."""
    return " and ".join(dict.fromkeys(filter(None, values)))
