"""Measurements as a Markdown table: `paperlm bench show`. README's table of speed is this output (a test compares)."""

from __future__ import annotations

import json
from pathlib import Path

OURS = "ours"
"Method name of our side; with another than the materialised loss, `ours, <loss>`."


def read_rows(path: Path) -> list[dict]:
    """Rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def throughput_table(path: Path) -> str:
    """A line per case and loss: ours, the peer, their ratio, with the 20th and 80th percentile.

    Later rows replace earlier ones; a loss of ours is compared with the peer of the last run.
    """
    cases: dict[str, dict[str, dict]] = {}
    for row in read_rows(path):
        side = row["method"] if row["method"].startswith(OURS) else "peer"
        cases.setdefault(row["case"], {})[side] = row
    lines = [
        "| size, tokens an update, precision | ours, tokens/s | peer, tokens/s | ratio | device, date |",
        "|---|---|---|---|---|",
    ]
    for case, sides in cases.items():
        peer = sides.pop("peer")
        for method, ours in sides.items():
            place = f"{ours['device']}, torch {ours['versions']['torch']}, {ours['date']}"
            ratio = ours["value"] / peer["value"]
            label = case + method.removeprefix(OURS)
            lines.append(f"| {label} | {_value(ours)} | {_value(peer)} ({peer['method']}) | {ratio:.2f} | {place} |")
    return "\n".join(lines)


def _value(row: dict) -> str:
    return f"{row['value']:,.0f} ({row['low']:,.0f}-{row['high']:,.0f})"
