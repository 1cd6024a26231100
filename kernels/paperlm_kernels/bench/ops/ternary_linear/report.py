"""Times of products as one table a card, a line a matrix and number of tokens; whatever else was measured, by case."""

from __future__ import annotations

from collections.abc import Iterable

from paperlm_kernels.bench import report
from paperlm_kernels.bench.cards import bandwidth_of
from paperlm_kernels.bench.ops.ternary_linear.declared import BANDWIDTH, Case
from paperlm_kernels.bench.report import Cells, Row

PRODUCT = ("time", "product")


def tables(found: Iterable[Row]) -> str:
    """Of products a table for each card, then the tables of all other measures."""
    rows = list(found)
    cards: dict[tuple, dict[str, dict[str, Cells]]] = {}
    for (case, *which), methods in report.latest(rows).items():
        cards.setdefault(tuple(which), {})[case] = methods
    parts = [_products(cases, *which) for which, cases in cards.items()]
    others = [row for row in rows if row["metric"] != "outcome" and (row["metric"], row.get("measure")) != PRODUCT]
    return "\n\n".join(filter(None, [*parts, report.tables(others)]))


def _products(cases: dict[str, dict[str, Cells]], order: str, scale: str, device: str) -> str:
    """One card's: microseconds of each method, the floor of two bits a weight, and the ratio to bfloat16 by cuBLAS."""
    methods = list(dict.fromkeys(report.title(cells) for found in cases.values() for cells in found.values()))
    lines, shown, bandwidth = [], [], bandwidth_of(device, BANDWIDTH)
    for case, found in cases.items():
        times = {report.title(cells): cells[PRODUCT] for cells in found.values() if PRODUCT in cells}
        if not times:
            continue
        shown += times.values()
        ours, theirs = times.get("ours"), times.get("torch")
        shape = next(iter(times.values()))["shape"]
        lines.append(
            [
                case, str(shape["tokens"]), f"{shape['rows']} x {shape['columns']}",
                f"{Case(case, '', **shape).floor(2, bandwidth):.3g}" if bandwidth else "",
                *(report.value_of(times[method]) if method in times else "" for method in methods),
                f"{theirs['value'] / ours['value']:.2f}" if ours and theirs else "",
                " ".join(dict.fromkeys(row.get("commit", "")[:7] for row in times.values())),
            ]
        )  # fmt: skip
    lost = [f"{case}: {said}" for case, found in cases.items() if (said := report.not_measured(found))]
    if not lines:
        return "\n\n".join(lost)
    small = " (small, to try the benchmark)" if scale == "small" else ""
    caption = f"**{device}**{small}: microseconds of a product, {', '.join(report.circumstances(shown)[1:])}."
    commits = [line.pop() for line in lines]
    if len(set(commits)) > 1:  # one that all have stands above
        lines = [[*line, commit] for line, commit in zip(lines, commits, strict=True)]
    heads = ["case", "tokens", "matrix", "floor in 2 bits", *methods, "torch / ours", "commit"][: len(lines[0])]
    return "\n\n".join([caption, report.markdown(heads, lines), *lost])
