"""Times as a table for each card, a line for each case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paperlm_kernels.bench import report
from paperlm_kernels.bench.cards import BANDWIDTH, bandwidth_of
from paperlm_kernels.bench.report import Cells, Place, Row, Where
from paperlm_kernels.bench.rows import short_commit

Shape = dict[str, Any]
Floor = Callable[[str, Shape, float, Row | None], str]
"(case, its shape, bytes a second, the row of ours) -> what a cell says of the floor"


def tables(
    found: Iterable[Row], timed: Mapping[str, str], heads: list[str], cells: Callable[[Shape], list[str]], floor: Floor
) -> str:
    """A table for each card and timed measure, then the tables of all other measures.

    Args:
        timed: measure -> what it is, in a caption.
        heads: of the columns that `cells` fills from a case's shape, and of the floor's.
    """
    rows = list(found)
    cards: dict[tuple, dict[Place, dict[str, Cells]]] = {}
    for place, methods in report.latest(rows).items():
        _, *which, where = place
        cards.setdefault((*which, where._replace(shape="")), {})[place] = methods
    parts = []
    for which, cases in cards.items():
        parts += [_times(cases, *which, ("time", name), about, heads, cells, floor) for name, about in timed.items()]
        parts += [f"{place[0]}: {said}" for place, methods in cases.items() if (said := report.not_measured(methods))]
    shown = {("time", measure) for measure in timed}
    others = [row for row in rows if row["metric"] != "outcome" and (row["metric"], row.get("measure")) not in shown]
    return "\n\n".join(filter(None, [*parts, report.tables(others)]))


def _times(
    cases: dict[Place, dict[str, Cells]],
    order: str,
    scale: str,
    where: Where,
    key: tuple[str, str],
    about: str,
    heads: list[str],
    cells: Callable[[Shape], list[str]],
    floor: Floor,
) -> str:
    """One card's: microseconds of each method, what the floor says where the card's bandwidth is known, and PyTorch's
    time in those of ours."""
    bandwidth = bandwidth_of(where.device, BANDWIDTH)
    found = {
        place: {each[key]["method"]: each[key] for each in methods.values() if key in each}
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
                case, *cells(shape),
                *([floor(case, shape, bandwidth, ours)] if bandwidth else []),
                *(report.value_of(times[method]) if method in times else "" for method in methods),
                f"{theirs['value'] / ours['value']:.2f}" if ours and theirs else "",
                " ".join(dict.fromkeys(short_commit(row.get("commit")) for row in times.values())),
            ]
        )  # fmt: skip
    small = " (small, to try the benchmark)" if scale == "small" else ""
    caption = f"**{where.device}**{small}: microseconds of {about}, {', '.join(report.circumstances(shown)[1:])}."
    commits = [line.pop() for line in lines]
    if len(set(commits)) > 1:  # one that all have stands above
        lines = [[*line, commit] for line, commit in zip(lines, commits, strict=True)]
    *of_shape, of_floor = heads
    names = ["case", *of_shape, *([of_floor] if bandwidth else []), *methods, "torch / ours", "commit"]
    return "\n\n".join([caption, report.markdown(names[: len(lines[0])], lines)])
