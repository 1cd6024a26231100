"""Throughput as a Markdown table. docs/speed.md has this of the committed rows (a test compares)."""

from __future__ import annotations

from collections.abc import Iterable

from paperlm_kernels.bench.ops.pretrain import OURS, PEER
from paperlm_kernels.bench.report import Row, latest, markdown, not_measured

SHORT = {"bfloat16": "bf16", "float32": "fp32"}


def throughput_table(rows: Iterable[Row]) -> str:
    """A line per case and loss: ours, the peer, their ratio, with the 20th and 80th percentile.

    Later rows replace earlier ones; a loss of ours is compared with the peer of the last run. Where that was on another
    day or with another PyTorch, the last column says so.
    """
    heads = ["size, tokens an update, precision", "ours, tokens/s", "peer, tokens/s", "ratio", "device, date"]
    lines, missing = [], []
    for (case, _, scale, _), methods in latest(rows).items():
        missing.append(not_measured(methods))
        found = {name: cells["throughput", ""] for name, cells in methods.items() if ("throughput", "") in cells}
        peer = found.pop(PEER, None)
        for name, row in found.items():
            shape = row["shape"]
            label = f"{case}, {shape['batch']} x {shape['seq_len']}, {SHORT[shape['dtype']]}"
            label += " (small, to try the benchmark)" if scale == "small" else ""
            label += f", {name.removeprefix(f'{OURS}_')}" if name != OURS else ""
            beside = ["", ""]
            if peer is not None:
                beside = [f"{_value(peer)} ({peer['method']})", f"{row['value'] / peer['value']:.2f}"]
            place = f"{row['device']}, {_when(row)}"
            if peer is not None and _when(peer) != _when(row):
                place += f"; the peer: {_when(peer)}"
            lines.append([label, _value(row), *beside, place])
    return "\n\n".join(filter(None, [markdown(heads, lines), *missing]))


def _when(row: Row) -> str:
    return f"torch {row['versions']['torch']}, {row['date']}"


def _value(row: Row) -> str:
    return f"{row['value']:,.0f} ({row['low']:,.0f}-{row['high']:,.0f})"
