"""Helpers of the tests of figures: a made-up record of every kind of job that a figure is drawn from."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from support_cce_training import made_up
from support_tables import record_of

from paperlm.figures.base import write_figure
from paperlm.jobs import Job
from paperlm.jobs.normal_entropy import normal_shares
from paperlm.jobs.weight_entropy import of_shares
from paperlm.plan.project import Project
from paperlm.record.record import Record, write_record
from paperlm.result import Result, Series


def _blocks(job: Job, columns: list[str], value: Callable[[int], float] = lambda block: block + 1.0) -> Series:
    """A row for each block; each column is a thousandth of `value` above the one before it."""
    factors = [1 + i / 1000 for i in range(len(columns))]
    rows = [[block, *(value(block) * factor for factor in factors)] for block in range(1, depth_of(job) + 1)]
    return Series(columns=["block", *columns], rows=rows)


def depth_of(job: Job) -> int:
    """Blocks of the model that a job looks into; a model from elsewhere has 30, as the one of the registry."""
    model = job.of.of if job.of.kind == "sft" else job.of
    return getattr(model, "n_layers", 30)


def measured(job: Job) -> Record:
    """A record with what the figures of its kind read."""
    match job.kind:
        case "pretrain":
            return made_up(job, 3 + 5 / np.arange(1, job.steps + 1) + 0.01 * job.seed, 20.0 + job.seed)
        case "rank_probability":
            rows = [[1, 0.1], [10, 1e-3], [job.of.vocab_size, 1e-9]]
            metrics = {"share_above": 1e-4, "mass_above": 0.9, "first_rank_below": 60, "alive_tiles": 0.3, "loss": 3.0}
            series = {"ranks": Series(columns=["rank", "mean_probability"], rows=rows)}
            return record_of(job, metrics | {"threshold": 2.0**-12, "tokens": 9}, series=series)
        case "angular_distance":
            depth = depth_of(job)
            pairs = [(b, n) for b in range(1, depth + 1) for n in range(1, depth + 2 - b)]
            rows = [[b, n, 0.01 * (b + n), 0.5, None] for b, n in pairs]
            columns = ["block", "n", "raw", "scaled", "raw_last"]
            return record_of(job, {}, series={"angular": Series(columns=columns, rows=rows)})
        case "gradient_norms":
            return record_of(job, {}, series={"gradient_norms": _blocks(job, ["norm", "input_norm"])})
        case "output_variance":
            return record_of(job, {}, series={"variance": _blocks(job, ["var_tok", "var_all"])})
        case "block_removal":
            columns = job.series()["removal"]
            others = [0.01, *([0.3, 0.0, 0.01] if "f1" in columns else [20.0])]
            rows = [[b, 0.4 - 0.001001 * b, -0.001001 * b, *others] for b in range(1, depth_of(job) + 1)]
            series, errors = {"removal": Series(columns=columns, rows=rows)}, {"full/accuracy": 0.02}
            return record_of(job, {"full/accuracy": 0.4}, series=series, standard_errors=errors)
        case "activation_distribution":
            names = [("qkv", 0), ("qkv", 2), ("o", 0), ("gate_up", 0), ("down", 0), *((q, 0) for q in job.quantizers)]
            rows = [[n, b, i - 2.0, i - 1.0, 10 - i * i % 7, 0.1 + 0.05 * i] for n, b in names for i in range(4)]
            columns = ["tensor", "block", "left", "right", "count", "density"]
            metrics = {name: 0.1 + i / 100 for i, name in enumerate(job.metrics())}
            series = {"histogram": Series(columns=columns, rows=rows)}
            return record_of(job, metrics, series=series, standard_errors=dict.fromkeys(metrics, 0.001))
        case "rloo":
            rows = [[update, 0.1 * update, 1.0, 0.0, 8.0] for update in range(1, 41)]
            return record_of(job, {}, series={"reward": Series(columns=job.series()["reward"], rows=rows)})
        case "weight_entropy" | "normal_entropy":
            found = fresh_weights()
            return record_of(job, found.metrics, series=found.series, standard_errors=found.standard_errors)
        case "stored_speed":
            return record_of(job, dict.fromkeys(job.metrics(), 1.0))
        case "perturbed_perplexity":
            # The larger of both sizes of noise counts, a relative one half.
            sizes = [(a, r) for a in job.absolute for r in job.relative]
            losses = [1 + max(2.0 ** (-99 if a is None else a), 2.0 ** (-99 if r is None else r - 1)) for a, r in sizes]
            rows = [[a, r, loss, math.exp(loss)] for (a, r), loss in zip(sizes, losses, strict=True)]
            series = {"grid": Series(columns=["absolute", "relative", "loss", "perplexity"], rows=rows)}
            return record_of(job, {"loss": 1.0, "perplexity": math.e}, series=series)
    raise AssertionError(f"no made-up record of kind {job.kind}")


@functools.cache
def fresh_weights() -> Result:
    """Entropies of N(0, 0.02^2)."""
    return of_shares(normal_shares(0.02), 0)


def records_of(project: Project, name: str, folder: Path) -> list[Path]:
    """A record for every job of a figure or table."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for job in project.jobs_of(name):
        paths.append(folder / f"{job.job_id}.json")
        write_record(paths[-1], measured(job))
    return paths


def drawn(monkeypatch, project: Project, name: str, files: list[Path], folder: Path) -> Figure:
    """The figure as `write_figure` left it, its files in `folder`."""
    left = []
    with monkeypatch.context() as patch:
        patch.setattr(plt, "close", left.append)
        write_figure(project, name, files, folder / f"{name}.svg")
    plt.close(left[0])
    FigureCanvasAgg(left[0])  # closed, a figure has no canvas that can tell where things are
    return left[0]


def extent(figure, artist):
    """Left, bottom, right, top in parts of the page."""
    box = artist.get_window_extent(figure.canvas.get_renderer()).transformed(figure.transFigure.inverted())
    return box.x0, box.y0, box.x1, box.y1
