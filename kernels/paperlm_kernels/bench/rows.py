"""A measurement is a JSON line. Every operation's rows have these fields, and further ones of its own behind them:

    op, case       what is measured and on which inputs; both by the names of the benchmark
    method         as a reader knows it: a peer's has its version       name: the same as the benchmark calls it
    metric, unit   time in ms, peak_memory in MiB, throughput in tokens/s, error, ...       measure: of which part
    value          the median; low, high: the 20th and 80th percentile; n: of so many repetitions
    device         the card's name, or `cpu (model, threads)`
    versions, commit, date
    order          of the data: natural, unless an option changed it
    scale          full, or small: an eighth of the sizes, to try the benchmark
    seed, shape    of the inputs; shape by name, e.g. {tokens, vocab, width}
    how            of a number that can be had in more than one way: in which
    seal           of the row, written with it (`paperlm_kernels.seal`); a row that is read has none

A method that gave no number has a row with metric "outcome", value null and the reason under `outcome`.
"""

from __future__ import annotations

import contextlib
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

from paperlm_kernels.seal import SEAL, is_sealed, sealed

Row = dict[str, Any]
CHANGED = "+changes"
"Behind a commit: Python files differ from it."
NEEDED: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("op", "case", "method", "name", "metric", "unit", "device", "order", "scale", "date"), str),
    "value": (int, float, type(None)),
    "seed": int,
    "shape": dict,
    "versions": dict,
    "commit": (str, type(None)),
}
"Fields without which no table can be made of a row, and what they hold."


def row(
    op: str,
    case: str,
    method: str,
    metric: str,
    unit: str,
    values: Sequence[float],
    device: str,
    *,
    packages: Sequence[str] = (),
    **extra: Any,
) -> Row:
    """A measurement of today; numbers keep six digits. The versions of torch, triton and `packages` are added where
    they are installed, `extra` is appended."""
    value, low, high = map(short, percentiles(values)) if values else (None, None, None)
    numbers = {"value": value, "low": low, "high": high, "n": len(values)}
    return {
        "op": op, "case": case, "method": method, "metric": metric, "unit": unit, **numbers,
        **circumstances(device, packages), **extra,
    }  # fmt: skip


def circumstances(device: str, packages: Sequence[str] = ()) -> Row:
    """Fields of every row that is written today: device, versions, commit, date."""
    versions = {name: found for name in ("torch", "triton", *packages) if (found := version(name))}
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return {"device": device, "versions": versions, "commit": commit_id(), "date": date}


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)]


def short(value: float) -> float:
    """The number to six digits."""
    return float(f"{value:.6g}")


def read(path: Path) -> list[Row]:
    """Rows of a JSON lines file. Raises ValueError, with file and line, for what is none, OSError if there is none."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: no text, so no rows of JSON; name the file that --out wrote") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
            missing = [name for name in NEEDED if name not in found[-1]]
            wrong = [name for name, kind in NEEDED.items() if not missing and not isinstance(found[-1][name], kind)]
        except (ValueError, TypeError, RecursionError):
            raise ValueError(f"{path}:{number}: not a row of JSON; restore the file or delete the line") from None
        if missing:
            raise ValueError(f"{path}:{number}: the row has no {', '.join(missing)}; measure it again")
        if wrong:
            raise ValueError(f"{path}:{number}: {wrong[0]} is {found[-1][wrong[0]]!r:.60}; measure the row again")
        if not is_sealed(found[-1]):
            what = "is altered: its checksum is another one" if SEAL in found[-1] else "has no checksum of itself"
            raise ValueError(f"{path}:{number}: the row {what}; restore the file or measure the row again")
        del found[-1][SEAL]
    return found


def append(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a JSON lines file, each sealed. A last line that was cut off, and has no end, gets one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # sealed as it is read: JSON makes words of keys that are numbers
    lines = "".join(json.dumps(sealed(json.loads(json.dumps(r)))) + "\n" for r in rows)
    with path.open("a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        file.write((b"" if file.read(1) in (b"", b"\n") else b"\n") + lines.encode())


def version(package: str) -> str | None:
    """Installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def commit_id() -> str | None:
    """The environment variable PAPERLM_COMMIT, for copies of the source without history, else the current commit of
    the repository that this file is of, with CHANGED behind it where one of its Python files differs; None where there
    is neither."""
    if stated := os.environ.get("PAPERLM_COMMIT"):
        return stated
    try:
        # an installed package may lie within a repository of something else, whose commit says nothing about it
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        commit = _git("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # of a large repository it can take too long
        commit += CHANGED if _git("status", "--porcelain", "--untracked-files=no", "--", ":(top)*.py") else ""
    return commit


def short_commit(commit: str | None, digits: int = 7) -> str:
    """What is printed of a row's: so many digits, and CHANGED; nothing of none."""
    commit = commit or ""
    return commit.removesuffix(CHANGED)[:digits] + (CHANGED if commit.endswith(CHANGED) else "")


def _git(*words: str) -> str:
    command, folder = ["git", "--no-optional-locks", *words], Path(__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
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
