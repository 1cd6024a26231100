"""Rows as Markdown: `python -m paperlm_kernels.bench show rows.jsonl`. READMEs quote it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from paperlm_kernels.bench.rows import short_commit

Row = dict[str, Any]
Cells = dict[tuple[str, str], Row]
"(metric, part) -> row"


class Where(NamedTuple):
    """The card or processor of rows, and on which data: rows that differ in one of these stand in tables apart."""

    device: str
    seed: int
    source: str
    shape: str
    "as JSON"


Place = tuple[str, str, str, Where]
"(case, order, scale, where)"
SYNTHETIC = "synthetic"
NO_PART = "absent: has no such part"
"The outcome of a part that a method does not have; tables have a dash for it."


def by_measure(row: Row) -> str:
    """The part of the method that a row is about; empty: the whole."""
    return row.get("measure", "")


def latest(rows: Iterable[Row], part: Callable[[Row], str] = by_measure) -> dict[Place, dict[str, Cells]]:
    """Rows by (case, order, scale, Where), then by method, then by (metric, part); later rows replace earlier ones.

    A number replaces the outcomes of its part and of the whole method. A failure replaces what another run gave of its
    part, or where it has none of the whole method: numbers of the same run stay beside it. What was absent
    was not tried: where there are numbers, they say more.
    """
    cases: dict[Place, dict[str, Cells]] = {}
    for row in rows:
        cells = cases.setdefault(place_of(row), {}).setdefault(row["name"], {})
        if row["metric"] != "outcome":
            cells.pop(("outcome", part(row)), None)
            cells.pop(("outcome", ""), None)
        elif row["outcome"].startswith("absent"):
            if any(key[0] != "outcome" and part(row) in ("", key[1]) for key in cells):
                continue
        else:
            for key, kept in list(cells.items()):
                if part(row) in ("", key[1]) and _run(kept) != _run(row):
                    del cells[key]
        cells[row["metric"], part(row)] = row
    return cases


def place_of(row: Row) -> Place:
    """Where a row stands among those of `latest`."""
    where = Where(row["device"], seed_of(row), source_of(row), json.dumps(row["shape"], sort_keys=True))
    return row["case"], row["order"], row["scale"], where


def _run(row: Row) -> tuple[str, str | None]:
    return row["date"], row.get("commit")


def seed_of(row: Row) -> int:
    """Of the data."""
    return row.get("seed", 0)


def source_of(row: Row) -> str:
    """What the data are: random numbers, unless the row says otherwise."""
    return row.get("source", SYNTHETIC)


def labels(places: Iterable[Place]) -> dict[Place, str]:
    """A case with what tells it apart in one table with others: its device where there are several, another seed."""
    places = list(places)
    several = len({where.device for *_, where in places}) > 1
    return {
        place: case
        + (" (small)" if scale == "small" else "")
        + (f", {where.device}" if several else "")
        + (f", seed {where.seed}" if where.seed else "")
        for place in places
        for case, _, scale, where in [place]
    }


def tables(rows: Iterable[Row]) -> str:
    """For each case a line about it, a table with a column for each metric, and what was not measured."""
    return "\n\n".join(_case(case, methods) for case, methods in latest(rows).items())


def _case(case: Place, methods: dict[str, Cells]) -> str:
    every = [row for cells in methods.values() for row in cells.values()]
    name, order, scale, _ = case
    facts = [f"{key} {value}" for key, value in every[-1].get("shape", {}).items() if value is not None]
    facts += [f"{order} order"] if order != "natural" else []
    small = " (small, to try the benchmark)" if scale == "small" else ""
    caption = f"**{name}**{small}: {', '.join([*facts, *circumstances(every)])}."
    columns = {key: row["unit"] for cells in methods.values() for key, row in cells.items() if key[0] != "outcome"}
    heads = [
        ", ".join(filter(None, (f"{metric.replace('_', ' ')} ({part})" if part else metric.replace("_", " "), unit)))
        for (metric, part), unit in columns.items()
    ]
    several = len({row.get("commit") for row in every}) > 1
    lines = []
    for cells in methods.values():
        lost = {
            part: "-" if row["outcome"] == NO_PART else row["outcome"]
            for (metric, part), row in cells.items()
            if metric == "outcome"
        }
        values = [value_of(cells[key]) if key in cells else lost.get(key[1], "") for key in columns]
        if any(values):
            lines.append(
                [title(cells), *values, commits(cells[key] for key in columns if key in cells) if several else ""]
            )
    heads = ["method", *heads, "commit"]
    return "\n\n".join(filter(None, [caption, markdown(heads, lines), not_measured(methods)]))


def circumstances(rows: list[Row]) -> list[str]:
    """Device, data that are not synthetic or of seed 0, versions of torch and triton, dates and commits of a case's
    rows."""
    data = [f"data {source}" for source in dict.fromkeys(map(source_of, rows)) if source != SYNTHETIC]
    data += [f"seed {seed}" for seed in sorted(set(map(seed_of, rows))) if seed]
    versions = []
    for name in ("torch", "triton"):
        found = dict.fromkeys(row["versions"][name] for row in rows if name in row["versions"])
        versions += [f"{name} {' and '.join(found)}"] if found else []
    dates = " and ".join(sorted({row["date"] for row in rows}))
    found = commits(sorted(rows, key=lambda row: row.get("commit") or ""))
    return [rows[-1]["device"], *data, *versions, dates, *([f"commit {found}"] if found else [])]


def commits(rows: Iterable[Row]) -> str:
    """Of these rows, in their order, each once."""
    return " and ".join(dict.fromkeys(short_commit(row["commit"]) for row in rows if row.get("commit")))


def not_measured(methods: dict[str, Cells]) -> str:
    """A sentence on the methods that gave nothing on a device, by reason."""
    reasons: dict[str, list[str]] = {}
    device = ""
    for cells in methods.values():
        if ("outcome", "") in cells:
            row = cells["outcome", ""]
            device = row["device"]
            reasons.setdefault(row["outcome"], []).append(title(cells))
    notes = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
    return f"Not measured on {device}: {'; '.join(notes)}." if notes else ""


def title(cells: Cells) -> str:
    """A method as its rows call it: with each version that gave one of them."""
    return " and ".join(dict.fromkeys(row["method"] for row in cells.values()))


def markdown(heads: list[str], lines: list[list[str]]) -> str:
    """A Markdown table without its empty columns; nothing without lines."""
    if not lines:
        return ""
    kept = [index for index in range(len(heads)) if any(line[index] for line in lines)]
    form = lambda values: "| " + " | ".join(values[index] for index in kept) + " |"  # noqa: E731
    return "\n".join([form(heads), "|" + "---|" * len(kept), *map(form, lines)])


def value_of(row: Row) -> str:
    """A median, and behind it the 20th and 80th percentile; a count or a hash with all its digits."""
    if row.get("n") == 1 and row["value"] == int(row["value"]):
        return str(int(row["value"]))
    spread = f" ({row['low']:.4g}-{row['high']:.4g})" if row["low"] != row["high"] else ""
    return f"{row['value']:.4g}{spread}"
