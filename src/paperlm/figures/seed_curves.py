"""Runs of one figure by row and seed, and how they are drawn: what Figures 4 and 5 of Cut Cross-Entropy share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paperlm.figures.base import Drawing, labels_of
from paperlm.figures.paired import band
from paperlm.figures.style import legend_below, title_and_scale
from paperlm.models.sizes import parameter_count
from paperlm.plan.project import Project
from paperlm.record.record import Record
from paperlm.tables.claims import CellSamples
from paperlm.tables.contents import Key, format_count
from paperlm.tables.results import collect

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = Mapping[str, Mapping[int, Record]]
"Row -> seed -> record of a run whose every loss is a number."


def runs_of(project: Project, name: str, records: Iterable[Path]) -> tuple[Runs, list[str]]:
    """Records of the figure's only column, and every row of the figure."""
    results = collect(project, name, records)
    found = {row: {r.job["seed"]: r for r in cell.records if whole(r)} for (row, _), cell in results.cells.items()}
    return {row: by_seed for row, by_seed in found.items() if by_seed}, list(found)


def whole(record: Record) -> bool:
    """Whether a run reached its end with finite losses; one on the unigram plateau did."""
    train = record.series["train"].rows
    return len(train) == record.job["steps"] and all(loss is not None for *_, loss in train)


def shared(runs: Runs, first: str, second: str) -> list[int]:
    """Seeds that two rows have in common."""
    return sorted(set(runs.get(first, {})) & set(runs.get(second, {})))


def samples_of(values: list[float], seeds: list[int], statistic: str) -> CellSamples:
    """A statistic with one value a seed, as the judge sees it: rows are pooled, for they differ in the loss alone."""
    return CellSamples(tuple(values), seeds=tuple(seeds), pool=statistic)


def same_for_all(value: float, seeds: int) -> CellSamples:
    """A statistic of all seeds together."""
    return CellSamples((value,) * seeds)


def untested(runs: Runs, every: list[str]) -> str:
    """Why no claim can be judged; empty if two rows have two seeds: a claim about another row names its cell."""
    few = [row for row in every if len(runs.get(row, {})) < 2]
    return f"fewer than two seeds have a record: {', '.join(few)}" if len(every) - len(few) < 2 else ""


def panels() -> tuple[Figure, Any]:
    """An empty figure with two panels, and its axes."""
    import matplotlib.pyplot as plt

    return plt.subplots(1, 2, figsize=(9.6, 4.0))


def draw_line(
    axis: Axes, x: np.ndarray, curves: np.ndarray, style: dict[str, Any], label: str, marker: str = ""
) -> None:
    """Mean over seeds with its 95 % band."""
    mean, half = band(curves)
    axis.plot(x, mean, linewidth=1.4, label=label, **{"marker": marker, "markersize": 3, **style})
    if len(curves) > 1:
        axis.fill_between(x, mean - half, mean + half, color=style["color"], alpha=0.15, linewidth=0)


def finish(project: Project, name: str, figure: Figure, first: Axes, runs: Runs, every: list[str]) -> None:
    """Title and legend: what was run, with how many seeds, on what."""
    _, spec = project.figure(name)
    about = ""
    if runs:
        records = [record for by_seed in runs.values() for record in by_seed.values()]
        job = records[0].value()
        model = {"sub_norm": job.sub_norm, "tied": job.tie_word_embeddings}
        size = parameter_count(job.hidden_size, job.intermediate_size, job.n_layers, job.vocab_size, **model)
        cards = ", ".join(dict.fromkeys(record.environment.device for record in records))
        counts = {len(by_seed) for by_seed in runs.values()}
        seeds = "-".join(map(str, sorted({min(counts), max(counts)})))
        about = f"\n{format_count(size)} parameters, {job.vocab_size:,} ids, {seeds} seeds, {cards}"
        missing = [row for row in every if row not in runs]
        about += f"; not run to the end: {', '.join(missing)}" if missing else ""
    else:
        first.text(0.5, 0.5, "no run has a record yet", ha="center", va="center", transform=first.transAxes)
    title_and_scale(figure, f"{spec.number}: {spec.title}{about}", project.scale.scale)
    legend_below(figure, *first.get_legend_handles_labels())


def drawn(
    project: Project, name: str, figure: Figure, frame: Any, samples: Mapping[Key, CellSamples], records: Any
) -> Drawing:
    """The drawing with what has to stand beside its numbers."""
    runs, every = runs_of(project, name, records)
    return Drawing(figure, frame, samples, untested(runs, every), labels=labels_of(project, name, records))
