"""The training curve: a JSON line per update and per evaluation, and the rows of it that go into the record."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paperlm.errors import CheckpointError
from paperlm.files import write_atomic


class CurveFile:
    """Append-only JSON lines, of which a checkpoint keeps the digest. Reopening after a kill cuts everything beyond the
    checkpoint's update."""

    def __init__(self, path: Path, keep_until: int = 0, expected: str = "") -> None:
        """`expected`: the digest at update `keep_until`; empty: there is no checkpoint, and the curve begins anew.

        Raises CheckpointError if the rows up to there are not those that the checkpoint was written beside.
        """
        self.path = path
        self.rows: list[dict[str, Any]] = list(_rows(path, keep_until)) if expected else []
        lines = [_line(row) for row in self.rows]
        self._sum = hashlib.sha256(b"".join(lines))
        if expected and self.digest() != expected:
            raise CheckpointError(
                f"{path}: truncated or altered; delete {path.parent}: training starts anew, as its curve cannot be "
                "had otherwise"
            )
        write_atomic(path, lambda file: file.writelines(lines))
        self._file = path.open("ab", buffering=0)  # a buffer would be written once more when the process ends
        self._unwritten: list[bytes] = []

    def add(self, **row: Any) -> None:
        """One line; `update` is the number of updates made so far, `counted` the tokens or examples."""
        self.rows.append(row)
        self._unwritten.append(_line(row))
        self._sum.update(self._unwritten[-1])

    def flush(self) -> None:
        """Hand everything to the operating system."""
        lines, self._unwritten = b"".join(self._unwritten), []
        while lines:
            lines = lines[self._file.write(lines) :]

    def digest(self) -> str:
        """SHA-256 of all rows, for a checkpoint."""
        return self._sum.hexdigest()

    def secure(self) -> str:
        """The digest, once the rows are on the disk."""
        self.flush()
        os.fsync(self._file.fileno())
        return self.digest()

    def training(self, points: int | None = None) -> list[list[float | None]]:
        """[update, counted, loss] of every update, or means over bins of equal width, at most `points` of them."""
        train = [r for r in self.rows if "loss" in r]
        width = 1 if points is None else max(1, math.ceil(len(train) / points))
        found: list[list[float | None]] = []
        for start in range(0, len(train), width):
            rows = train[start : start + width]
            losses = [r["loss"] for r in rows]
            mean = None if None in losses else round(sum(losses) / len(losses), 6)
            found.append([rows[-1]["update"], rows[-1]["counted"], mean])
        return found

    def evaluations(self, names: Sequence[str]) -> list[list[float | None]]:
        """[update, counted, the named numbers] of every evaluation."""
        found = [r for r in self.rows if "evaluation" in r]
        return [[r["update"], r["counted"], *(r["evaluation"][name] for name in names)] for r in found]


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(row) + "\n").encode()


def _rows(path: Path, keep_until: int) -> Iterator[dict[str, Any]]:
    """Rows of a curve up to an update; what follows a line that is none is cut, as after a kill."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
            wanted = row["update"] <= keep_until
        except (ValueError, LookupError, TypeError, RecursionError):
            return
        if wanted:
            yield row
