"""What the records say about each cell: one value per seed, and outcomes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paperlm.errors import RecordError
from paperlm.record.record import Record, read_record
from paperlm.spec.project import Cell, Project


@dataclass(frozen=True)
class CellResult:
    """The records of a cell. `missing` are runs without one."""

    cell: Cell
    records: tuple[Record, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """True if a seed has a record; seeds without one are counted in the diff, not waited for."""
        return bool(self.records)

    def values(self, metric: str) -> list[float]:
        """The metric per seed; infinite where a run gave no finite number."""
        found = [r.metrics[metric] for r in self.records]
        return [math.inf if v is None else float(v) for v in found]

    def _alike(self, metric: str) -> list[float]:
        """Values of the seeds that trained, or of all seeds if none did: the two outcomes have no common mean."""
        pairs = list(zip(self.values(metric), self.diverged, strict=True))
        return [v for v, diverged in pairs if not diverged] or [v for v, _ in pairs]

    def mean(self, metric: str) -> float:
        """Mean over the seeds that trained; over all if none did."""
        return statistics.fmean(self._alike(metric))

    def spread(self, metric: str) -> float | None:
        """Sample standard deviation over the same seeds; None with fewer than two, or where a run is not finite."""
        values = self._alike(metric)
        return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None

    def noise(self, metric: str, scale_noise: float) -> float:
        """Relative noise of one run: over seeds from five on, before that at least the scale's measured one.

        Two or three seeds can agree by chance.
        """
        spread = self.spread(metric)
        own = 0.0 if spread is None else spread / self.mean(metric)
        return own if len(self._alike(metric)) >= 5 else max(own, scale_noise)

    @property
    def diverged(self) -> list[bool]:
        """Outcome per seed."""
        return [r.outcome == "diverged" for r in self.records]

    @property
    def out_of_memory(self) -> bool:
        """True if any seed ran out of memory."""
        return any(r.outcome == "out_of_memory" for r in self.records)


@dataclass(frozen=True)
class TableResults:
    """Every cell of a table, by row and column label."""

    table: str
    cells: Mapping[tuple[str, str], CellResult] = field(default_factory=dict)

    def column(self, column: str) -> list[CellResult]:
        """Cells of a column that are runs."""
        return [c for (_, name), c in self.cells.items() if name == column and c.cell.label is None]


def collect(project: Project, table: str, records: Iterable[Path]) -> TableResults:
    """Match records with the table's cells. Raises RecordError for a file that is no valid record, and for one that was
    trained with another loss than its run names where that is what the table compares."""
    by_run = {}
    for path in records:
        record = read_record(path)
        if record.run_id in by_run:
            raise RecordError(f"{path}: a second record of {record.run_id}; keep one")
        if record.run_id in project.compared_by_loss and record.cost.loss not in (None, record.run.loss):
            raise RecordError(
                f"{path}: trained with {record.cost.loss} in place of {record.run.loss}, and {table} compares losses; "
                "delete it and train with --exact-loss torch"
            )
        by_run[record.run_id] = record
    cells = {}
    for cell in project.cells(table):
        ids = [run.run_id for run in cell.runs]
        found = tuple(by_run[i] for i in ids if i in by_run)
        cells[cell.row, cell.column] = CellResult(cell, found, tuple(i for i in ids if i not in by_run))
    return TableResults(table, cells)
