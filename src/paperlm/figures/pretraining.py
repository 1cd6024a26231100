"""Figures 4 and 5 of Cut Cross-Entropy: training loss and validation perplexity with each loss, over seeds.

Both are drawn from the runs of one table with one column; its rows are the losses. Option `reference` names the row
that the others are compared with.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paperlm.figures.draw import Drawing, row_styles
from paperlm.figures.paired import band, p_equivalent, p_greater, relative_spread, smoothed
from paperlm.models.sizes import parameter_count
from paperlm.record.record import Record
from paperlm.spec.project import Project
from paperlm.tables.claims import CellSamples
from paperlm.tables.compare import format_count
from paperlm.tables.contents import Key
from paperlm.tables.results import collect

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = Mapping[str, Mapping[int, Record]]
"Row -> seed -> record of a run whose every loss is a number."

DIFFERENCE = "Mean Absolute Difference"
DEVIATION = "Between-Seed Deviation"
EQUIVALENCE, BEYOND = "p of Equivalence", "p of Difference"
RATIOS = {"ppl_true": "Perplexity Ratio", "ppl_sequences": "Perplexity Ratio (Sequences)"}
WORSE, NOT_WORSE = "p of Being Worse Than", "p of Not Being Worse Than"
DEFINITIONS = {
    "ppl_true": "validation perplexity\nexp(mean over tokens)",
    "ppl_sequences": "validation perplexity\nmean over sequences of exp(their mean)",
}


def training_loss(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """Smoothed training loss of each row, and its difference to the reference row's; options: window, margin, last."""
    import pandas as pd

    _, spec = project.figure(name)
    options = spec.options
    runs, every = _runs(project, spec.table, records)
    window, reference = options["window"], options["reference"]
    rows = [
        [row, seed, int(update), int(tokens), loss, value]
        for row, by_seed in runs.items()
        for seed, record in by_seed.items()
        for (update, tokens, loss), value in zip(record.curve["train"], _padded(record, window), strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["row", "seed", "update", "tokens", "loss", "smoothed"])
    figure, (left, right) = _panels()
    styles = row_styles(every)
    for row, by_seed in runs.items():
        curves = np.array([smoothed(_losses(r), window) for r in by_seed.values()])
        _line(left, _updates(next(iter(by_seed.values())), curves[0]), curves, styles[row], row)
        paired = _shared(runs, row, reference) if row != reference else []
        if paired:
            pairs = [(runs[row][seed], runs[reference][seed]) for seed in paired]
            gaps = np.array([np.subtract(*(smoothed(_losses(r), window) for r in pair)) for pair in pairs])
            _line(right, _updates(pairs[0][0], gaps[0]), gaps, styles[row], row)
    for edge in (-options["margin"], options["margin"]):
        right.axhline(edge, color="0.4", linestyle=":", linewidth=1)
    right.axhline(0, color="0.4", linewidth=0.8)
    left.set(xlabel="update", ylabel=f"training loss (nats),\nmean of {window} updates")
    right.set(xlabel="update", ylabel=f"the same minus that of\n{reference} with the same seed")
    _finish(project, name, figure, left, runs, every)
    return Drawing(figure, frame, loss_samples(runs, **options), _untested(runs, every))


def loss_samples(runs: Runs, reference: str, window: int, margin: float, last: float) -> dict[Key, CellSamples]:
    """What the claims of Figure 4 read, for rows and reference with at least two seeds in common.

    Mean absolute difference of the smoothed curves over the last half of the updates, a value for each seed; deviation
    of the reference's smoothed curves between seeds, as root mean square over the same updates; p of two one-sided
    tests that the mean loss of the last updates (`last`: their share) differs by less than `margin` nats, and p of the
    tests that it differs by more, doubled because there are two sides.
    """
    samples: dict[Key, CellSamples] = {}
    references = runs.get(reference, {})
    if len(references) > 1:
        half = np.array([_last_half(record, window) for record in references.values()])
        deviation = float(np.sqrt(half.var(0, ddof=1).mean()))
        # The sampling error of a standard deviation; windows that do not overlap count as one draw each.
        draws = (len(half) - 1) * max(1, half.shape[1] // window)
        samples[reference, DEVIATION] = CellSamples(
            (deviation,) * len(half), (False,) * len(half), float((2 * draws) ** -0.5)
        )
    for row in runs:
        seeds = _shared(runs, row, reference) if row != reference else []
        if len(seeds) < 2:
            continue
        pairs = [(runs[row][seed], references[seed]) for seed in seeds]
        gaps = [float(np.abs(_last_half(a, window) - _last_half(b, window)).mean()) for a, b in pairs]
        ends = [_end(a, last) - _end(b, last) for a, b in pairs]
        samples[row, DIFFERENCE] = _samples(gaps)
        beyond = min(p_greater(ends, margin), p_greater([-d for d in ends], margin))
        samples[row, EQUIVALENCE] = _of_all_seeds(p_equivalent(ends, margin), len(seeds))
        samples[row, BEYOND] = _of_all_seeds(min(1.0, 2 * beyond), len(seeds))
    return samples


def validation_perplexity(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """Validation perplexity of each row over the updates, in both definitions; option `exact`: the unfiltered row."""
    import pandas as pd

    _, spec = project.figure(name)
    runs, every = _runs(project, spec.table, records)
    rows = [
        [row, seed, int(update), int(tokens), *values]
        for row, by_seed in runs.items()
        for seed, record in by_seed.items()
        for update, tokens, *values in record.curve["eval"]
    ]
    frame = pd.DataFrame(rows, columns=["row", "seed", "update", "tokens", *DEFINITIONS])
    figure, axes = _panels()
    styles = row_styles(every)
    for axis, (definition, label) in zip(axes, DEFINITIONS.items(), strict=True):
        for row in runs:
            here = frame[frame["row"] == row].pivot(index="update", columns="seed", values=definition)
            _line(axis, here.index.to_numpy(), here.to_numpy().T, styles[row], row, marker="o")
        axis.set(xlabel="update", ylabel=label, yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="y", which="minor", labelsize=7)
    _finish(project, name, figure, axes[0], runs, every)
    samples = perplexity_samples(runs, spec.options["reference"], spec.options["exact"])
    return Drawing(figure, frame, samples, _untested(runs, every))


def perplexity_samples(runs: Runs, reference: str, exact: str) -> dict[Key, CellSamples]:
    """What the claims of Figure 5 read, for pairs of rows with at least two seeds in common.

    Ratio of the last perplexity to the reference row's, a value for each seed, in both definitions; for rows other than
    these two, p of the one-sided tests that their loss (log perplexity) is above that of the row `exact`, and below.
    """
    samples: dict[Key, CellSamples] = {}
    for row in runs:
        seeds = _shared(runs, row, reference) if row != reference else []
        for metric, column in RATIOS.items() if len(seeds) > 1 else ():
            ratios = [_metric(runs[row][s], metric) / _metric(runs[reference][s], metric) for s in seeds]
            samples[row, column] = _samples(ratios)
        seeds = _shared(runs, row, exact) if row not in (reference, exact) else []
        if len(seeds) > 1:
            above = [
                float(np.log(_metric(runs[row][s], "ppl_true") / _metric(runs[exact][s], "ppl_true"))) for s in seeds
            ]
            samples[row, f"{WORSE} {exact}"] = _of_all_seeds(p_greater(above), len(seeds))
            samples[row, f"{NOT_WORSE} {exact}"] = _of_all_seeds(p_greater([-a for a in above]), len(seeds))
    return samples


# -- numbers ----


def _runs(project: Project, table: str, records: Iterable[Path]) -> tuple[Runs, list[str]]:
    """Records of the table's only column, and every row of the table."""
    results = collect(project, table, records)
    found = {row: {r.run.seed: r for r in cell.records if _whole(r)} for (row, _), cell in results.cells.items()}
    return {row: by_seed for row, by_seed in found.items() if by_seed}, list(found)


def _whole(record: Record) -> bool:
    """Whether a run reached its end with finite losses; one on the unigram plateau did."""
    train = record.curve["train"]
    return len(train) == record.run.steps and all(loss is not None for *_, loss in train)


def _losses(record: Record) -> list[float]:
    return [loss for *_, loss in record.curve["train"]]


def _padded(record: Record, window: int) -> list[float | None]:
    values = smoothed(_losses(record), window)
    return [None] * (len(record.curve["train"]) - len(values)) + values.tolist()


def _updates(record: Record, values: np.ndarray) -> np.ndarray:
    return np.array([update for update, *_ in record.curve["train"]])[-len(values) :]


def _last_half(record: Record, window: int) -> np.ndarray:
    values = smoothed(_losses(record), window)
    return values[_updates(record, values) > record.run.steps / 2]


def _end(record: Record, share: float) -> float:
    losses = _losses(record)
    return statistics.fmean(losses[-max(1, round(share * len(losses))) :])


def _metric(record: Record, metric: str) -> float:
    return float(record.metrics[metric])


def _shared(runs: Runs, first: str, second: str) -> list[int]:
    return sorted(set(runs.get(first, {})) & set(runs.get(second, {})))


def _samples(values: list[float]) -> CellSamples:
    return CellSamples(tuple(values), (False,) * len(values), relative_spread(values))


def _of_all_seeds(value: float, seeds: int) -> CellSamples:
    return CellSamples((value,) * seeds, (False,) * seeds, 0.0)


def _untested(runs: Runs, every: list[str]) -> str:
    """Why no claim can be judged; empty if two rows have two seeds: a claim about another row names its cell."""
    few = [row for row in every if len(runs.get(row, {})) < 2]
    return f"fewer than two seeds have a record: {', '.join(few)}" if len(every) - len(few) < 2 else ""


# -- drawing ----


def _panels() -> tuple[Figure, Any]:
    import matplotlib.pyplot as plt

    return plt.subplots(1, 2, figsize=(9.6, 4.0))


def _line(axis: Axes, x: np.ndarray, curves: np.ndarray, style: dict[str, Any], label: str, marker: str = "") -> None:
    mean, half = band(curves)
    axis.plot(x, mean, **style, linewidth=1.4, label=label, marker=marker, markersize=3)
    if len(curves) > 1:
        axis.fill_between(x, mean - half, mean + half, color=style["color"], alpha=0.15, linewidth=0)


def _finish(project: Project, name: str, figure: Figure, first: Axes, runs: Runs, every: list[str]) -> None:
    _, spec = project.figure(name)
    about = ""
    if runs:
        records = [record for by_seed in runs.values() for record in by_seed.values()]
        run = records[0].run
        size = parameter_count(run.hidden_size, run.intermediate_size, run.n_layers, run.vocab_size)
        cards = ", ".join(dict.fromkeys(record.environment.device for record in records))
        counts = {len(by_seed) for by_seed in runs.values()}
        seeds = "-".join(map(str, sorted({min(counts), max(counts)})))
        about = f"\n{format_count(size)} parameters, {run.vocab_size:,} ids, {seeds} seeds, {cards}"
        missing = [row for row in every if row not in runs]
        about += f"; not run to the end: {', '.join(missing)}" if missing else ""
        handles, labels = first.get_legend_handles_labels()
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.03), "ncols": len(labels), "frameon": False}
        figure.legend(handles, labels, **place)
    else:
        first.text(0.5, 0.5, "no run has a record yet", ha="center", va="center", transform=first.transAxes)
    figure.suptitle(f"{spec.number}: {spec.title}, scale {project.scale.scale}{about}", fontsize=10)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
