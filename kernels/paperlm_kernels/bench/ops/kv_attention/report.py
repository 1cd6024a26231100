"""A table for each case, and below it how near each time is to that of reading the cache alone."""

from __future__ import annotations

from collections.abc import Iterable

from paperlm_kernels.bench import report
from paperlm_kernels.bench.report import Cells, Row


def tables(found: Iterable[Row]) -> str:
    """The usual tables, each with a line on floors where its rows have some."""
    rows = list(found)
    parts = []
    for place, methods in report.latest(rows).items():
        here = [row for row in rows if report.place_of(row) == place]
        parts += [report.tables(here), _floors(methods)]
    return "\n\n".join(filter(None, parts))


def _floors(methods: dict[str, Cells]) -> str:
    """Of decoding, whose floor is that of the bytes of all positions."""
    timed = [cells["time", "decode"] for cells in methods.values() if ("time", "decode") in cells]
    said = [f"{r['method']} {r['floor_us']:.3g} us, {1 / r['over_floor']:.0%}" for r in timed if "over_floor" in r]
    what = "To read the cache alone would take, at the bandwidth of a large copy, and what share of decoding that is"
    return f"{what}: {'; '.join(said)}." if said else ""
