"""Measurements as a Markdown table: `paperlm bench show`. README's table of speed is this output (a test compares)."""

from __future__ import annotations

import json
from pathlib import Path


def read_rows(path: Path) -> list[dict]:
    """Rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def throughput_table(path: Path) -> str:
    """One line per case: ours, the peer, their ratio, with the 20th and 80th percentile. Later rows replace earlier."""
    cases: dict[str, dict[str, dict]] = {}
    for row in read_rows(path):
        side = "ours" if row["method"] == "ours" else "peer"
        cases.setdefault(row["case"], {})[side] = row
    lines = [
        "| size, tokens an update, precision | ours, tokens/s | peer, tokens/s | ratio | device, date |",
        "|---|---|---|---|---|",
    ]
    for case, sides in cases.items():
        ours, peer = sides["ours"], sides["peer"]
        place = f"{ours['device']}, torch {ours['versions']['torch']}, {ours['date']}"
        ratio = ours["value"] / peer["value"]
        lines.append(f"| {case} | {_value(ours)} | {_value(peer)} ({peer['method']}) | {ratio:.2f} | {place} |")
    return "\n".join(lines)


def _value(row: dict) -> str:
    return f"{row['value']:,.0f} ({row['low']:,.0f}-{row['high']:,.0f})"
