"""A measurement is a JSON line: op, case, method, metric, unit, value, low, high, n, device, versions, commit, date.

`value` is the median and `low`, `high` the 20th and 80th percentile of `n` repetitions. A method that gave no number
has a row with metric "outcome", value null and the reason under `outcome`.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "liger-kernel", "cut-cross-entropy")


def row(
    op: str, case: str, method: str, metric: str, unit: str, values: Sequence[float], device: str, **extra: Any
) -> dict[str, Any]:
    """A measurement in the project's format; numbers keep six digits, `extra` is appended."""
    value, low, high = map(short, percentiles(values)) if values else (None, None, None)
    numbers = {"value": value, "low": low, "high": high, "n": len(values)}
    return {
        "op": op, "case": case, "method": method, "metric": metric, "unit": unit, **numbers, "device": device,
        "versions": {name: found for name in PACKAGES if (found := version(name))}, "commit": commit_id(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"), **extra,
    }  # fmt: skip


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)]


def short(value: float) -> float:
    """The number to six digits."""
    return float(f"{value:.6g}")


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to a JSON lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(r) + "\n" for r in rows)


def version(package: str) -> str | None:
    """Installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def commit_id() -> str | None:
    """The environment variable PAPERLM_COMMIT, for copies of the source without history, else the current commit."""
    if stated := os.environ.get("PAPERLM_COMMIT"):
        return stated
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@cache
def cpu_name() -> str:
    """Model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
