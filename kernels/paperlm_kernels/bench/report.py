"""Rows as Markdown: `python -m paperlm_kernels.bench show rows.jsonl`. READMEs quote it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]
Cells = dict[tuple[str, str], Row]
"(metric, part) -> row"


def by_measure(row: Row) -> str:
    """The part of the method that a row is about; empty: the whole."""
    return row.get("measure", "")


def latest(rows: Iterable[Row], part: Callable[[Row], str] = by_measure) -> dict[tuple, dict[str, Cells]]:
    """Rows by (case, order, scale, device), then by method, then by (metric, part); later rows replace earlier ones."""
    cases: dict[tuple, dict[str, Cells]] = {}
    for row in rows:
        place = (row["case"], row["order"], row["scale"], row["device"])
        cells = cases.setdefault(place, {}).setdefault(row["name"], {})
        if row["metric"] != "outcome":
            cells.pop(("outcome", part(row)), None)
            cells.pop(("outcome", ""), None)
        cells[row["metric"], part(row)] = row
    return cases


def tables(rows: Iterable[Row]) -> str:
    """For each case a line about it, a table with a column for each metric, and what was not measured."""
    return "\n\n".join(_case(case, methods) for case, methods in latest(rows).items())


def _case(case: tuple, methods: dict[str, Cells]) -> str:
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
        lost = {part: row["outcome"] for (metric, part), row in cells.items() if metric == "outcome"}
        values = [value_of(cells[key]) if key in cells else lost.get(key[1], "") for key in columns]
        if any(values):
            lines.append(
                [title(cells), *values, commits(cells[key] for key in columns if key in cells) if several else ""]
            )
    heads = ["method", *heads, "commit"]
    return "\n\n".join(filter(None, [caption, markdown(heads, lines), not_measured(methods)]))


def circumstances(rows: list[Row]) -> list[str]:
    """Device, versions of torch and triton, dates and commits of a case's rows."""
    last = rows[-1]
    versions = [f"{name} {last['versions'][name]}" for name in ("torch", "triton") if name in last["versions"]]
    dates = " and ".join(sorted({row["date"] for row in rows}))
    found = commits(sorted(rows, key=lambda row: row.get("commit") or ""))
    return [last["device"], *versions, dates, *([f"commit {found}"] if found else [])]


def commits(rows: Iterable[Row]) -> str:
    """Of these rows, in their order, each once."""
    return " and ".join(dict.fromkeys(row["commit"][:7] for row in rows if row.get("commit")))


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
    """A method as its latest row calls it."""
    return next(reversed(cells.values()))["method"]


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
