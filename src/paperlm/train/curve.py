"""The training curve: a JSON line per update and per evaluation, and the thinned form that goes into the record."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

POINTS = 160
"Points of the thinned curve: enough for a figure, a few kB in a record."


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
        """One line; `update` is the number of updates made so far."""
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()

    def every_update(self) -> dict[str, list[list[float | None]]]:
        """Curve of a record that keeps everything: the loss of each update, both perplexities of each evaluation."""
        train = [[r["update"], r["tokens"], _rounded(r["loss"])] for r in self.rows if "loss" in r]
        evaluations = [r for r in self.rows if "ppl_true" in r]
        keys = ("update", "tokens", "ppl_true", "ppl_sequences")
        return {"train": train, "eval": [[r[key] for key in keys] for r in evaluations]}

    def thinned(self) -> dict[str, list[list[float | None]]]:
        """Curve of the record: training loss averaged over bins of equal width, every evaluation."""
        train = [r for r in self.rows if "loss" in r]
        evals = [[r["update"], r["tokens"], r["ppl_true"]] for r in self.rows if "ppl_true" in r]
        width = max(1, math.ceil(len(train) / POINTS))
        points: list[list[float | None]] = []
        for start in range(0, len(train), width):
            rows = train[start : start + width]
            losses = [r["loss"] for r in rows]
            mean = None if None in losses else _rounded(sum(losses) / len(losses))
            points.append([rows[-1]["update"], rows[-1]["tokens"], mean])
        return {"train": points, "eval": evals}


def _rounded(loss: float | None) -> float | None:
    return None if loss is None else round(loss, 6)
