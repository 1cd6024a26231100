"""Printed tables as transcribed under paper_tables/published/."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from paperlm.errors import SpecError, unknown


@dataclass(frozen=True)
class PublishedTable:
    """A printed table: corner, column labels, row labels, cells as printed."""

    corner: str
    columns: list[str]
    rows: dict[str, list[str]]
    other_editions: frozenset[str] = frozenset()
    "rows that other editions of the paper print"

    def cell(self, row: str, column: str) -> str:
        """The cell as printed; empty where nothing is, and for rows and columns that the paper does not print."""
        if row not in self.rows or column not in self.columns:
            return ""
        return self.rows[row][self.columns.index(column)]

    @property
    def values(self) -> dict[tuple[str, str], float]:
        """The printed numbers by row and column."""
        cells = {(row, column): number(self.cell(row, column)) for row in self.rows for column in self.columns}
        return {key: value for key, value in cells.items() if value is not None}


def read_published(path: Path, edition: str = "") -> PublishedTable:
    """Read a table whose first column labels its rows, or whose first two are Edition and the label.

    SpecError if the file is ragged, or has no such edition.
    """
    lines = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    header, body = lines[0], lines[1:]
    for line in body:
        if len(line) != len(header):
            raise SpecError(f"{path}: row {line[0]!r} has {len(line)} cells, the header {len(header)}")
    others: frozenset[str] = frozenset()
    if header[0] == "Edition":
        editions = {line[0] for line in body}
        if edition not in editions:
            raise SpecError(f"{path}: {unknown('edition', edition, editions)}")
        others = frozenset(line[1] for line in body if line[0] != edition)
        header, body = header[1:], [line[1:] for line in body if line[0] == edition]
    return PublishedTable(header[0], header[1:], {line[0]: line[1:] for line in body}, others)


SUFFIX = {"K": 1e3, "M": 1e6, "B": 1e9, "%": 1e-2, "x": 1.0}


def number(printed: str) -> float | None:
    """Value of a printed cell: 26.07, 1e-3, 1.1B, 20K, 25%, 11.9x; None for anything else."""
    match = re.fullmatch(r"([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)([KMB%x]?)", printed.strip())
    return float(match[1]) * SUFFIX.get(match[2], 1.0) if match else None


def half_a_digit(printed: str) -> float:
    """Half a unit of the last printed digit: two numbers closer than this print alike."""
    match = re.fullmatch(r"[-+]?\d+(?:\.(\d+))?(?:e([-+]?\d+))?([KMB%x]?)", printed.strip())
    if not match:
        return 0.0
    return 0.5 * 10.0 ** (int(match[2] or 0) - len(match[1] or "")) * SUFFIX.get(match[3], 1.0)
