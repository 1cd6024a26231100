"""Cases of which bits alone were measured as one table, a column a case; whatever else was measured, by case."""

from __future__ import annotations

from collections.abc import Iterable

from paperlm_kernels.bench import report
from paperlm_kernels.bench.report import Cells, Place, Row

BITS = ("bits", "")


def tables(found: Iterable[Row]) -> str:
    """The tables by case, and behind them one of bits for each device."""
    rows = list(found)
    together: dict[tuple, dict[Place, dict[str, Cells]]] = {}
    for place, methods in report.latest(rows).items():
        if {key for cells in methods.values() for key in cells if key[0] != "outcome"} == {BITS}:
            _, *which, where = place
            together.setdefault((*which, where._replace(shape="")), {})[place] = methods
    together = {which: cases for which, cases in together.items() if len(cases) > 1}
    apart = {place for cases in together.values() for place in cases}
    others = [row for row in rows if report.place_of(row) not in apart]
    return "\n\n".join(filter(None, [report.tables(others), *(_bits(cases) for cases in together.values())]))


def _bits(cases: dict[Place, dict[str, Cells]]) -> str:
    every = [row for methods in cases.values() for cells in methods.values() for row in cells.values()]
    small = " (small, to try the benchmark)" if every[-1]["scale"] == "small" else ""
    names = [place[0] for place in cases]
    caption = f"**{' and '.join(names)}**{small}: bits per weight, {', '.join(report.circumstances(every))}."
    by_method: dict[str, dict[Place, str]] = {}  # each version of a peer has a line
    for place, methods in cases.items():
        for row in (cells[BITS] for cells in methods.values() if BITS in cells):
            by_method.setdefault(row["method"], {})[place] = report.value_of(row)
    lines = [[method, *(values.get(place, "") for place in cases)] for method, values in by_method.items()]
    lost = [f"{place[0]}: {said}" for place, methods in cases.items() if (said := report.not_measured(methods))]
    return "\n\n".join(filter(None, [caption, report.markdown(["method", *names], lines), *lost]))
