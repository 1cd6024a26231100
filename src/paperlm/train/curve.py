"""The training curve: a JSON line per update and per evaluation, and the rows of it that go into the record."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class CurveFile:
    """Append-only JSON lines. Reopening after a kill cuts everything beyond the checkpoint's update."""

    def __init__(self, path: Path, keep_until: int) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        if keep_until and path.is_file():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # the line that was being written when the job was killed
                    break
                if row["update"] <= keep_until:
                    self.rows.append(row)
        self._file = path.open("w")
        self._file.writelines(json.dumps(row) + "\n" for row in self.rows)
        self._file.flush()

    def add(self, **row: Any) -> None:
        """One line; `update` is the number of updates made so far, `counted` the tokens or examples."""
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.flush()

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
