"""Cases of which bits alone were measured as one table, a column a case; whatever else was measured, by case."""

from __future__ import annotations

from collections.abc import Iterable

from paperlm_kernels.bench import report
from paperlm_kernels.bench.report import Cells, Row

BITS = ("bits", "")


def tables(found: Iterable[Row]) -> str:
    """The tables by case, and behind them one of bits for each device."""
    rows = list(found)
    together: dict[tuple, dict[str, dict[str, Cells]]] = {}
    for (case, *which), methods in report.latest(rows).items():
        if {key for cells in methods.values() for key in cells if key[0] != "outcome"} == {BITS}:
            together.setdefault(tuple(which), {})[case] = methods
    together = {which: cases for which, cases in together.items() if len(cases) > 1}
    others = [r for r in rows if r["case"] not in together.get((r["order"], r["scale"], r["device"]), {})]
    return "\n\n".join(filter(None, [report.tables(others), *(_bits(cases) for cases in together.values())]))


def _bits(cases: dict[str, dict[str, Cells]]) -> str:
    every = [row for methods in cases.values() for cells in methods.values() for row in cells.values()]
    small = " (small, to try the benchmark)" if every[-1]["scale"] == "small" else ""
    caption = f"**{' and '.join(cases)}**{small}: bits per weight, {', '.join(report.circumstances(every))}."
    named = {report.title(cells): name for methods in cases.values() for name, cells in methods.items()}
    lines = [
        [
            title,
            *(
                report.value_of(methods[name][BITS]) if BITS in methods.get(name, {}) else ""
                for methods in cases.values()
            ),
        ]
        for title, name in named.items()
        if any(BITS in methods.get(name, {}) for methods in cases.values())
    ]
    lost = [f"{case}: {said}" for case, methods in cases.items() if (said := report.not_measured(methods))]
    return "\n\n".join(filter(None, [caption, report.markdown(["method", *cases], lines), *lost]))
