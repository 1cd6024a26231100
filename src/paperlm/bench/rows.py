"""One measurement is one JSON line."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paperlm.record.environment import PACKAGES, commit_id


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    ordered = sorted(values)
    at = lambda q: ordered[min(len(ordered) - 1, max(0, round(q * (len(ordered) - 1))))]  # noqa: E731
    return statistics.median(ordered), at(0.2), at(0.8)


def row(
    op: str, case: str, method: str, metric: str, unit: str, values: Sequence[float], device: str, **extra: Any
) -> dict:
    """A measurement in the project's format; `extra` (e.g. settings) is appended."""
    import importlib.metadata

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    value, low, high = percentiles(values)
    return {
        "op": op, "case": case, "method": method, "metric": metric, "unit": unit,
        "value": round(value, 4), "low": round(low, 4), "high": round(high, 4), "n": len(values),
        "device": device, "versions": versions, "commit": commit_id(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"), **extra,
    }  # fmt: skip


def append(path: Path, rows: list[dict]) -> None:
    """Add rows to a JSON lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(r) + "\n" for r in rows)
