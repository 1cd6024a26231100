"""Helpers of the tests of Cut Cross-Entropy's training figures: made-up records, and the verdicts on them."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np

from paperlm.figures.draw import write_figure
from paperlm.record.record import Cost, Environment, Record, write_record
from paperlm.spec.project import Project
from paperlm.spec.run import RunConfig

CONTROL = "CCE (No Grad. Filter)"
ROWS = ("torch.compile", "CCE", "CCE-Kahan-FullC", CONTROL)
ENVIRONMENT = Environment(
    date="2030-01-01", commit=None, modified=None, python="3", platform="x", cpu="x", device="A CARD", driver=None,
    threads=1, packages={},
)  # fmt: skip
COST = Cost(
    wall_seconds=1, train_seconds=1, tokens_per_second=1, flops=1, peak_memory_mib=1, micro_batch=1, compiled=False,
    world_size=1,
)  # fmt: skip


def made_up(run: RunConfig, losses: np.ndarray, final: float, final_sequences: float = 0.0) -> Record:
    """A record of these losses whose last perplexities are these."""
    train = [[i + 1, 64 * i, float(loss)] for i, loss in enumerate(losses)]
    last = [final, final_sequences or 1.1 * final]
    metrics = {"ppl_true": last[0], "ppl_sequences": last[1], "tokens_nonpad": 1, "unigram_perplexity": 2e3}
    evaluations = [[run.steps // 2, 1, 2 * last[0], 2 * last[1]], [run.steps, 2, *last]]
    return Record(
        run_id=run.run_id, behaviour=1, run=run, outcome="trained", metrics=metrics,
        curve={"train": train, "eval": evaluations}, data={}, cost=COST, environment=ENVIRONMENT,
    )  # fmt: skip


def records(folder: Path, above: dict[str, list[float]], between: float = 0.02, wobble: float = 0.0) -> list[Path]:
    """Records at scale gpu. above: row -> nats above torch.compile, one a seed; between: nats between seeds."""
    paths = []
    folder.mkdir(parents=True, exist_ok=True)
    for cell in Project({"scale": "gpu"}).cells("cce_pretraining"):
        for run, nats in zip(cell.runs, above.get(cell.row, []), strict=False):
            noise = np.random.default_rng(run.seed).normal(0, 0.01, run.steps)
            offset = between * (run.seed - 1) + nats
            wave = wobble * np.sin(np.arange(run.steps) / 60) * (cell.row != "torch.compile")
            losses = 3 + 8 * np.exp(-np.arange(run.steps) / 200) + offset + noise + wave
            path = folder / f"{run.run_id}.json"
            write_record(path, made_up(run, losses, 20 * math.exp(offset)))
            paths.append(path)
    return paths


def verdicts(folder: Path, figure: str, files: list[Path], scale: str = "gpu") -> dict[str, dict[str, str]]:
    write_figure(Project({"scale": scale}), figure, files, folder / f"{figure}.svg")
    rows = csv.DictReader((folder / f"{figure}.claims.csv").read_text().splitlines())
    return {row["claim"]: row for row in rows}
