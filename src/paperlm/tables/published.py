"""Printed tables as transcribed under paper_tables/published/."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from paperlm.errors import SpecError


@dataclass(frozen=True)
class PublishedTable:
    """A printed table: corner, column labels, row labels, cells as printed."""

    corner: str
    columns: list[str]
    rows: dict[str, list[str]]

    def cell(self, row: str, column: str) -> str:
        """The cell as printed; empty for a row that the paper does not print."""
        return "" if row not in self.rows else self.rows[row][self.columns.index(column)]


def read_published(path: Path) -> PublishedTable:
    """Read a table whose first column labels its rows; SpecError if the file is ragged."""
    lines = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    header, body = lines[0], lines[1:]
    for line in body:
        if len(line) != len(header):
            raise SpecError(f"{path}: row {line[0]!r} has {len(line)} cells, the header {len(header)}")
    return PublishedTable(header[0], header[1:], {line[0]: line[1:] for line in body})


SUFFIX = {"K": 1e3, "M": 1e6, "B": 1e9, "%": 1e-2}


def number(printed: str) -> float | None:
    """Value of a printed cell: 26.07, 1e-3, 1.1B, 20K, 25%; None for anything else."""
    match = re.fullmatch(r"([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)([KMB%]?)", printed.strip())
    return float(match[1]) * SUFFIX.get(match[2], 1.0) if match else None


def half_a_digit(printed: str) -> float:
    """Half a unit of the last printed digit: two numbers closer than this print alike."""
    match = re.fullmatch(r"[-+]?\d+(?:\.(\d+))?(?:e([-+]?\d+))?([KMB%]?)", printed.strip())
    if not match:
        return 0.0
    return 0.5 * 10.0 ** (int(match[2] or 0) - len(match[1] or "")) * SUFFIX.get(match[3], 1.0)
