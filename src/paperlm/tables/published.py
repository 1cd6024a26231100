"""Printed tables as transcribed under paper_tables/published/."""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paperlm.errors import SpecError, unknown
from paperlm.files import SUMS, listed_sums, sha256_of


@dataclass(frozen=True)
class PublishedTable:
    """A printed table. Labels that take several columns, or heads that take several lines, are joined by `, `."""

    corners: tuple[str, ...]
    "heads of the label columns"
    columns: list[str]
    rows: dict[str, list[str]]
    heads: tuple[tuple[str, ...], ...] = ()
    "lines of heads above the columns, as printed; the label columns are left out"
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    "row -> its label cells as printed"
    other_editions: frozenset[str] = frozenset()
    "rows that other editions of the paper print"

    def cell(self, row: str, column: str) -> str:
        """The cell as printed; empty where nothing is, and for rows and columns that the paper does not print."""
        if row not in self.rows or column not in self.columns:
            return ""
        return self.rows[row][self.columns.index(column)]

    def without(self, left_out: Sequence[str]) -> PublishedTable:
        """The table without some of its columns. Raises SpecError for a column that it does not have."""
        if strangers := [column for column in left_out if column not in self.columns]:
            raise SpecError(f"left_out: {unknown('column', strangers[0], self.columns)}")
        kept = [index for index, column in enumerate(self.columns) if column not in left_out]
        return replace(
            self,
            columns=[self.columns[index] for index in kept],
            rows={row: [cells[index] for index in kept] for row, cells in self.rows.items()},
            heads=tuple(tuple(line[index] for index in kept) for line in self.heads),
        )

    @property
    def values(self) -> dict[tuple[str, str], float]:
        """The printed numbers by row and column."""
        cells = {(row, column): number(self.cell(row, column)) for row in self.rows for column in self.columns}
        return {key: value for key, value in cells.items() if value is not None}


NOTHING = PublishedTable(("",), [], {}, ((),), {})
"A table that the paper does not print, or of which no cell was found."


def read_published(path: Path, edition: str = "", label_columns: int = 1, header_lines: int = 1) -> PublishedTable:
    """Read a table whose first columns label its rows and whose first lines head its columns.

    A table of one row may have no label column: its row is called "". With a first column `Edition` only the rows of
    one are kept. Raises SpecError for what `read_cells` refuses, if there is no such edition or no number, and for a
    row or column that is named twice.
    """
    lines = read_cells(path)
    if len(lines) <= header_lines:
        raise SpecError(f"{path}: has {len(lines)} lines, of which {header_lines} are heads: there is no row")
    header, body = lines[:header_lines], lines[header_lines:]
    others: frozenset[str] = frozenset()
    if header[0][0] == "Edition":
        editions = {line[0] for line in body}
        if edition not in editions:
            raise SpecError(f"{path}: {unknown('edition', edition, editions)}")
        others = frozenset(_joined(line[1 : 1 + label_columns]) for line in body if line[0] != edition)
        header, body = [line[1:] for line in header], [line[1:] for line in body if line[0] == edition]
    if len(header[0]) <= label_columns:
        raise SpecError(
            f"{path}: has {len(header[0])} columns, of which {label_columns} are labels: there is no number"
        )
    heads = tuple(tuple(line[label_columns:]) for line in header)
    columns = [_joined(parts) for parts in zip(*heads, strict=True)]
    labels = [tuple(line[:label_columns]) for line in body]
    rows = [_joined(cells) for cells in labels]
    for kind, names in (("row", rows), ("column", columns)):
        for name in names:
            if names.count(name) > 1:
                more = "label_columns" if kind == "row" else "header_lines"
                raise SpecError(f"{path}: {kind} {name!r} stands twice; give the table more `{more}`, or mend the file")
    return PublishedTable(
        tuple(header[0][:label_columns]),
        columns,
        {row: line[label_columns:] for row, line in zip(rows, body, strict=True)},
        heads,
        dict(zip(rows, labels, strict=True)),
        others,
    )


def read_cells(path: Path) -> list[list[str]]:
    """Lines of a CSV file in UTF-8, a line of cells each, all equally long.

    Raises SpecError naming file and line for a file that cannot be read, is no such CSV, or has an empty or a ragged
    line, and for one that is not as the list of checksums beside it says, if that has it.
    """
    listed = listed_sums(path.parent / SUMS, SpecError).get(path.name)
    lines = []
    try:
        if listed is not None and sha256_of(path) != listed:
            raise SpecError(
                f"{path}: altered: {SUMS} beside it has another checksum; restore it with git or, where it was mended "
                f"by the print, list it anew (sha256sum *.csv > {SUMS})"
            )
        # Spreadsheets put a byte order mark in front.
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            for line in reader:
                if not any(cell.strip() for cell in line):
                    raise SpecError(f"{path}:{reader.line_num}: an empty line; delete it")
                lines.append(line)
                if len(line) != len(lines[0]):
                    raise SpecError(f"{path}:{reader.line_num}: has {len(line)} cells, the first line {len(lines[0])}")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from None
    except csv.Error as error:
        raise SpecError(f"{path}:{reader.line_num}: no line of CSV ({error}); a quote may not be closed") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    return lines


WORDS = ("", "-", "OOM")
"What stands where a number could: nothing, not measured, out of memory. A number after ~ is told in words elsewhere."


def check_numbers(path: Path, table: PublishedTable) -> None:
    """SpecError for a cell that is neither a number nor one of the words for none."""
    for row in table.rows:
        for column in table.columns:
            cell = table.cell(row, column).strip()
            if number(cell.removeprefix("~")) is None and cell not in WORDS:
                raise SpecError(
                    f"{path}: row {row!r}, column {column!r}: {cell!r} is no number; write it as printed (26.07, 1.1B, "
                    "25%), or leave the cell empty"
                )


def _joined(parts: object) -> str:
    return ", ".join(filter(None, (str(part).strip() for part in parts)))


SUFFIX = {"K": 1e3, "M": 1e6, "B": 1e9, "%": 1e-2, "x": 1.0}


@functools.lru_cache(10_000)  # claims ask for each cell again and again
def number(printed: str) -> float | None:
    """Value of a printed cell: 26.07, 1e-3, 1.1B, 20K, 25%, 11.9x; None for anything else."""
    match = re.fullmatch(r"([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)([KMB%x]?)", printed.strip())
    return float(match[1]) * SUFFIX.get(match[2], 1.0) if match else None


@functools.lru_cache(10_000)
def half_a_digit(printed: str) -> float:
    """Half a unit of the last printed digit: two numbers closer than this print alike."""
    match = re.fullmatch(r"[-+]?\d+(?:\.(\d+))?(?:e([-+]?\d+))?([KMB%x]?)", printed.strip())
    if not match:
        return 0.0
    return 0.5 * 10.0 ** (int(match[2] or 0) - len(match[1] or "")) * SUFFIX.get(match[3], 1.0)
