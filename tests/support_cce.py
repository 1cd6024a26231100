"""Helpers of the tests of Cut Cross-Entropy's tables: handmade measurement rows, and the verdicts on them."""

from __future__ import annotations

from pathlib import Path

from paperlm_kernels.bench.rows import append

from paperlm.plan.project import Project
from paperlm.tables.build import printed_table
from paperlm.tables.contents import Contents
from paperlm.tables.verdicts import claim_rows

CARD = "NVIDIA H200"
MEASURES = {"Loss": "loss", "Gradient": "gradient", "Loss+Gradient": "both"}


class Bench:
    """Handmade rows of measurements, as paperlm_kernels.bench writes them."""

    def __init__(self, paper, case: str = "gemma2_2b", device: str = CARD) -> None:
        self.paper, self.case, self.device, self.rows = paper, case, device, []

    def add(self, name: str, metric: str, value: float | None, **extra: object) -> Bench:
        tokens, vocab, width = self.paper.shape(self.case)
        shape = {
            "tokens": tokens, "vocab": vocab, "width": width, "counting": self.paper.cases[self.case].counting,
            "softcap": self.paper.softcap(self.case), "dtype": "bfloat16",
        }  # fmt: skip
        unit = {"time": "ms", "peak_memory": "MiB"}.get(metric, "")
        spread = 0.01 * value if metric == "time" else 0.0
        numbers = {"value": value, "low": value and value - spread, "high": value and value + spread, "n": 50}
        self.rows.append(
            {
                "op": "cross_entropy", "case": self.case, "method": name, "name": name, "metric": metric, "unit": unit,
                **numbers, "device": self.device, "versions": {"torch": "2.11.0", "triton": "3.6.0"}, "commit": "0",
                "date": "2026-01-01", "order": "natural", "scale": "full", "source": "synthetic", "seed": 0,
                "shape": shape, **extra,
            }
        )  # fmt: skip
        return self

    def printed(self, project: Project, table: str) -> Bench:
        """What the paper prints, as if it had been measured here."""
        published = printed_table(project, table)
        rows = project.table(table)[1].rows
        for (row, column), value in published.values.items():
            measure, quantity, _ = column.split(" ")
            metric = {"Memory": "peak_memory", "Time": "time"}[quantity]
            self.add(rows[row].method, metric, value, measure=MEASURES[measure])
        return self

    def write(self, folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "rows.jsonl"
        path.unlink(missing_ok=True)
        append(path, self.rows)
        return [path]


def verdicts(project: Project, table: str, contents: Contents) -> dict[str, str]:
    return {row["claim"]: row["verdict"] for row in claim_rows(project, table, contents) if not row["part"]}
