"""A table for each case, and below it how near each time is to that of reading the cache alone."""

from __future__ import annotations

from collections.abc import Iterable

from paperlm_kernels.bench import report
from paperlm_kernels.bench.report import Row


def tables(found: Iterable[Row]) -> str:
    """The usual tables, each with a line on floors where its rows have some."""
    rows = list(found)
    parts = []
    for place in report.latest(rows):
        here = [row for row in rows if report.place_of(row) == place]
        parts += [report.tables(here), _floors(here)]
    return "\n\n".join(filter(None, parts))


def _floors(rows: list[Row]) -> str:
    """Of decoding, whose floor is that of the bytes of all positions."""
    timed = {row["name"]: row for row in rows if row.get("measure") == "decode" and "over_floor" in row}
    said = [f"{row['method']} {row['floor_us']:.3g} us, {1 / row['over_floor']:.0%}" for row in timed.values()]
    what = "To read the cache alone would take, at the bandwidth of a large copy, and what share of decoding that is"
    return f"{what}: {'; '.join(said)}." if said else ""
