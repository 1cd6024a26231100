"""Times of products and of layers as a table each a card, a line a matrix and number of tokens; what else was measured,
by case."""

from __future__ import annotations

from collections.abc import Iterable

from paperlm_kernels.bench import report
from paperlm_kernels.bench.cards import bandwidth_of
from paperlm_kernels.bench.ops.ternary_linear.declared import BANDWIDTH, Case
from paperlm_kernels.bench.report import Cells, Place, Row, Where
from paperlm_kernels.bench.rows import short_commit

TIMED = {"product": "a product", "layer": "a layer, which is RMSNorm, quantizer and product"}


def tables(found: Iterable[Row]) -> str:
    """Of products and of layers a table for each card, then the tables of all other measures."""
    rows = list(found)
    cards: dict[tuple, dict[Place, dict[str, Cells]]] = {}
    for place, methods in report.latest(rows).items():
        _, *which, where = place
        cards.setdefault((*which, where._replace(shape="")), {})[place] = methods
    parts = []
    for which, cases in cards.items():
        parts += [_times(cases, *which, measure=measure) for measure in TIMED]
        parts += [f"{place[0]}: {said}" for place, methods in cases.items() if (said := report.not_measured(methods))]
    timed = {("time", measure) for measure in TIMED}
    others = [row for row in rows if row["metric"] != "outcome" and (row["metric"], row.get("measure")) not in timed]
    return "\n\n".join(filter(None, [*parts, report.tables(others)]))


def _times(cases: dict[Place, dict[str, Cells]], order: str, scale: str, where: Where, *, measure: str) -> str:
    """One card's: microseconds of each method, the floor of a product with two bits a weight, whether bytes or
    operations set it, what share of our time it is, and the ratio to bfloat16 by cuBLAS."""
    key, bandwidth = ("time", measure), bandwidth_of(where.device, BANDWIDTH)
    found = {
        place: {cells[key]["method"]: cells[key] for cells in methods.values() if key in cells}
        for place, methods in cases.items()
    }
    found = {place: times for place, times in found.items() if times}
    if not found:
        return ""
    methods = list(dict.fromkeys(method for times in found.values() for method in times))
    lines, shown = [], []
    for (case, *_), times in found.items():
        shown += times.values()
        ours, theirs = times.get("ours"), times.get("torch")
        shape = next(iter(times.values()))["shape"]
        lines.append(
            [
                case, str(shape["tokens"]), f"{shape['rows']} x {shape['columns']}",
                *([_floor(Case(case, "", **shape), bandwidth, ours)] if bandwidth else []),
                *(report.value_of(times[method]) if method in times else "" for method in methods),
                f"{theirs['value'] / ours['value']:.2f}" if ours and theirs else "",
                " ".join(dict.fromkeys(short_commit(row.get("commit")) for row in times.values())),
            ]
        )  # fmt: skip
    small = " (small, to try the benchmark)" if scale == "small" else ""
    caption = (
        f"**{where.device}**{small}: microseconds of {TIMED[measure]}, {', '.join(report.circumstances(shown)[1:])}."
    )
    commits = [line.pop() for line in lines]
    if len(set(commits)) > 1:  # one that all have stands above
        lines = [[*line, commit] for line, commit in zip(lines, commits, strict=True)]
    floor = ["floor in 2 bits, what sets it, share of ours"] if bandwidth else []
    heads = ["case", "tokens", "matrix", *floor, *methods, "torch / ours", "commit"][: len(lines[0])]
    return "\n\n".join([caption, report.markdown(heads, lines)])


def _floor(case: Case, bandwidth: float, ours: Row | None) -> str:
    limits = case.limits(2, bandwidth)
    what = max(limits, key=limits.__getitem__)
    share = f", {limits[what] / ours['value']:.0%}" if ours else ""
    return f"{limits[what]:.3g}, {what}{share}"
