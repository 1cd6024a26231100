"""A series of the records over its first column, one line a row: rewards, training losses, validation perplexities.

Bands: 95 % interval over seeds; of a single seed, of what one point is the mean of, where the records say how far that
spreads.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from paperlm.errors import SpecError
from paperlm.figures.base import Drawing, headline, labels_of
from paperlm.figures.divergence import Rise
from paperlm.figures.fall import Change, Fall
from paperlm.figures.options import Columns, FigureOptions, options_of
from paperlm.figures.paired import band, smoothed
from paperlm.figures.style import COLUMN, legend_below, row_styles
from paperlm.jobs.base import Job
from paperlm.plan.project import Project
from paperlm.record.record import Record
from paperlm.result import UNIGRAM
from paperlm.tables.claims import CellSamples
from paperlm.tables.contents import Key, one_seed
from paperlm.tables.results import collect, seed_of
from paperlm.train.schedule import rate_and_decay

LETTERS = 24
"Letters of the vertical label that the panel has room for on a line."
FEW = 40
"Points of a curve up to which each is marked."
END, LATER_MEAN, HIGHEST_GAP = "End", "Mean of the Later Part", "Largest Gap to the Reference"
SAME = "Share of Points as in the Reference"
FALL = "Fall behind the Change"


class Options(FigureOptions):
    """Which curve, and what is compared: with `reference` there are statistics for claims."""

    series: str
    "of the records"
    x: str
    y: str
    "columns of the series"
    label: str
    "of the axis"
    window: int = Field(gt=0)
    "so many points are averaged"
    spread: str = ""
    "column with the deviation among the samples that one point is the mean of"
    samples: str = ""
    "setting of the job that counts them"
    log: bool = False
    "the axis is logarithmic"
    reference: str = ""
    "row that the others are compared with"
    since: str = Field("0", pattern=r"^(0|\d+/[1-9]\d*)$")
    "share of the run from which they are"
    noise: Literal["relative", "log"] = "relative"
    """how the scale's seed noise of perplexity becomes that of y; relative: y is a perplexity, log: its logarithm"""
    diverged: Rise | None = None
    "of series that count updates: when a run whose numbers stayed finite counts as diverged in claims"
    change: Change | None = None
    "how far y falls where something of the training changes is a statistic too"
    bits: bool = False
    "y is in nats, of trainings: a second axis has bits, and the numbers have update, rate, decay and divergence"
    tokens: str = ""
    "column that counts the tokens behind each update, which is x: a second axis has them, and so have the numbers"

    @model_validator(mode="after")
    def tokens_stand_above_updates(self) -> Options:
        if self.tokens and self.x != "update":
            raise ValueError(f"tokens: the axis of tokens stands above one of updates; x is {self.x}")
        return self

    @model_validator(mode="after")
    def a_fall_is_for_claims(self) -> Options:
        if self.change and not self.reference:
            raise ValueError("change: how far curves fall there is a statistic for claims, which need a reference row")
        return self

    def reads(self) -> Columns:
        further = (*(("update",) if self.diverged or self.bits else ()), *(c for c in (self.spread, self.tokens) if c))
        return {self.series: (self.x, self.y, *further)}

    def names_rows(self) -> dict[str, str]:
        return {"reference": self.reference} if self.reference else {}


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """Smoothed means over seeds; the numbers are those of each seed, not smoothed, where there are bits with the
    update, its rate and weight decay, and whether the run diverged."""
    import matplotlib.pyplot as plt
    import pandas as pd
    from matplotlib.ticker import EngFormatter

    options, records = options_of(project, name), list(records)
    results = collect(project, name, records)
    found = {row: cell.usable for (row, _), cell in results.cells.items() if cell.usable}
    columns = [options[key] for key in ("x", "tokens", "y") if options[key]]
    rows = [
        [row, seed_of(record.job), *point]
        for row, seeds in found.items()
        for record in seeds
        for point in zip(*map(record.series[options["series"]].column, columns), strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["row", "seed", *columns])
    if options["bits"]:
        jobs = {job.job_id: job for cell in results.cells.values() for job in cell.cell.jobs}
        runs = [run for row, seeds in found.items() for record in seeds for run in training(record, jobs, options)]
        frame[["update", "bits", "learning_rate", "weight_decay", "diverged"]] = pd.DataFrame(
            runs, index=frame.index, columns=range(5)
        )
    figure, axis = plt.subplots(figsize=COLUMN)
    for row, style in row_styles(project, name).items():
        here = frame[frame["row"] == row].pivot(index=options["x"], columns="seed", values=options["y"]).dropna()
        if here.empty:
            continue
        curves = np.array([smoothed(here[seed].to_list(), options["window"]) for seed in here])
        x = here.index.to_numpy()[-curves.shape[1] :]
        mean, half = band(curves)
        if len(curves) == 1 and options["spread"]:
            half = sampling(found[row][0], options)
        marker = "o" if len(x) <= FEW else ""
        axis.plot(x, mean, linewidth=1.4, label=row, **{"marker": marker, "markersize": 3, **style})
        if len(curves) > 1 or options["spread"]:
            axis.fill_between(x, mean - half, mean + half, color=style["color"], alpha=0.15, linewidth=0)
    of_axis = "\n".join(textwrap.wrap(options["label"], LETTERS))
    axis.set(xlabel=options["x"], ylabel=of_axis, yscale="log" if options["log"] else "linear")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    low, high = axis.get_ylim()
    inside = [height for height in plateaus(found, options["y"]) if low < height < high]  # no reason to widen the axis
    for index, height in enumerate(inside):
        label = "" if index else "unigram plateau"
        axis.axhline(height, color="0.4", linestyle=":", linewidth=1, label=label)
    if options["bits"]:
        bits = axis.secondary_yaxis("right", functions=(lambda nats: nats / math.log(2), lambda b: b * math.log(2)))
        bits.set_ylabel("bits")
    if options["tokens"] and rows:
        each = tokens_of_an_update(name, found, options)
        tokens = axis.secondary_xaxis("top", functions=(lambda update: update * each, lambda count: count / each))
        tokens.set_xlabel(options["tokens"])
        tokens.xaxis.set_major_formatter(EngFormatter(sep=""))
    if options["log"]:
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="y", which="minor", labelsize=7.5)
    headline(figure, project, name, results)
    if found:
        legend_below(figure, *axis.get_legend_handles_labels(), grow=True)
    else:
        axis.text(0.5, 0.5, "no job has a record yet", ha="center", va="center", transform=axis.transAxes)
        axis.set(yscale="linear", xticks=[], yticks=[])
    untested = "" if found else "no job has a record"
    noise = project.seed_noise(name)
    samples = curve_samples(found, options, noise.value) if options["reference"] else {}
    labels = (*labels_of(project, name, records), *_rises(found, options))
    one = one_seed(noise) + (f"; of {FALL!r}, how far one run's falls differ elsewhere" if options["change"] else "")
    return Drawing(figure, frame, samples, untested, labels=labels, one_sample=one)


def tokens_of_an_update(name: str, found: Mapping[str, tuple[Record, ...]], options: Mapping[str, Any]) -> float:
    """Tokens of an update, on average over the runs. Padding is not counted, so that updates and seeds differ a little;
    SpecError for runs that differ by more than a hundredth, of which one axis cannot count both."""
    ends = {}
    for row, seeds in found.items():
        for record in seeds:
            updates, counts = (record.series[options["series"]].column(c) for c in ("update", options["tokens"]))
            if counts:  # a run may end before its first point
                ends[f"{row}, seed {seed_of(record.job)}"] = counts[-1] / updates[-1]
    low, high = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
    if ends[high] > 1.01 * ends[low]:
        raise SpecError(
            f"figures.{name}.options.tokens: an update has {ends[low]:.0f} tokens in {low} and {ends[high]:.0f} in "
            f"{high}; one axis cannot count both: leave tokens out"
        )
    return statistics.fmean(ends.values())


def sampling(record: Record, options: Mapping[str, Any]) -> np.ndarray:
    """Half the width of the 95 % interval of each smoothed point of one run, whose samples are drawn anew each time."""
    variances = smoothed([s**2 for s in record.series[options["series"]].column(options["spread"])], options["window"])
    points = len(record.series[options["series"]].rows) - len(variances) + 1
    return 1.96 * np.sqrt(variances / (points * record.job[options["samples"]]))


def training(record: Record, jobs: Mapping[str, Job], options: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Of each point of a training's curve: the update, y in bits, rate and weight decay of that update, and whether the
    run counts as diverged."""
    series, job, ended = record.series[options["series"]], jobs[record.job_id], diverged(record, options)
    job = job.settings() if job.kind == "continue_pretrain" else job
    for update, nats in zip(series.column("update"), series.column(options["y"]), strict=True):
        yield [update, None if nats is None else nats / math.log(2), *rate_and_decay(update - 1, job), ended]


def plateaus(found: Mapping[str, tuple[Record, ...]], y: str) -> list[float]:
    """Where a curve lies of a model that knows nothing but how frequent each token is: of each text that the records
    name. Empty for what is neither a loss in nats nor a perplexity of tokens."""
    form = {"loss": math.log, "ppl_true": float}.get(y)
    known = {record.metrics.get(UNIGRAM) for seeds in found.values() for record in seeds} - {None}
    return sorted(map(form, known)) if form else []


def curve_samples(
    found: Mapping[str, tuple[Record, ...]], options: Mapping[str, Any], noise: float
) -> dict[Key, CellSamples]:
    """`curve_statistics` as the judge sees them. One run varies by at least the scale's seed noise (relative, or in the
    logarithm), a gap between two by the root of two times as much; what is counted varies by nothing, and a
    fall by what its curve says (`fall.Change`)."""
    samples, falls = {}, falls_of(found, options)
    for row, by_seed in curve_statistics(found, options).items():
        ended = {seed_of(record.job): diverged(record, options) for record in found[row]}
        for statistic in dict.fromkeys(name for one in by_seed.values() for name in one):
            values = {seed: one[statistic] for seed, one in by_seed.items() if statistic in one}
            deviation = {HIGHEST_GAP: math.sqrt(2) * noise, SAME: 0.0}.get(statistic, noise)
            if statistic == FALL:  # within a run, where levels, which the seed noise is of, cancel
                deviation = max(falls[row, seed].deviation for seed in values)
            elif options["noise"] == "relative" and statistic not in (HIGHEST_GAP, SAME):
                deviation *= abs(statistics.fmean(values.values()))
            samples[row, statistic] = CellSamples(
                tuple(values.values()), tuple(ended[s] for s in values), tuple(values), deviation
            )
    return samples


def diverged(record: Record, options: Mapping[str, Any]) -> bool:
    """Whether a run ended with a loss that is no number, or its curve rose as the figure's rule says."""
    if record.outcome == "not_finite" or options.get("diverged") is None:
        return record.outcome == "not_finite"
    series = record.series[options["series"]]
    points = [p for p in zip(series.column("update"), series.column(options["y"]), strict=True) if p[1] is not None]
    updates, losses = [update for update, _ in points], [loss for _, loss in points]
    return Rise.model_validate(options["diverged"]).holds(updates, losses, max(updates, default=0))


def _rises(found: Mapping[str, tuple[Record, ...]], options: Mapping[str, Any]) -> list[str]:
    """What has to be said of rows whose curves rose: how many of their seeds diverged."""
    counts = {row: sum(diverged(record, options) for record in seeds) for row, seeds in found.items()}
    return [f"{row}: {n} of {len(found[row])} seeds diverged" for row, n in counts.items() if n]


def curve_statistics(
    found: Mapping[str, tuple[Record, ...]], options: Mapping[str, Any]
) -> dict[str, dict[int, dict[str, float]]]:
    """Row -> seed -> the last point of the smoothed curve, the mean of its later part (from `since` on), and, where the
    reference row has the seed, how far it lies above the reference there at most (as a share of it, if noise is
    relative): below it everywhere is a negative number; and the share of its points that are the reference's to each
    digit of the records; and where something changes, how far it falls there. A curve without a number has none of
    them."""
    curves = {
        row: {seed_of(record.job): _smoothed(record, options) for record in seeds} for row, seeds in found.items()
    }
    reference = curves.get(options["reference"], {})
    relative = options["noise"] == "relative"
    falls = falls_of(found, options)
    found_of: dict[str, dict[int, dict[str, float]]] = {}
    for row, seeds in curves.items():
        for seed, curve in seeds.items():
            if not curve:
                continue
            later = {x: y for x, y in curve.items() if x >= Fraction(options["since"]) * max(curve)}
            one = {END: curve[max(curve)], LATER_MEAN: statistics.fmean(later.values())}
            pairs = [(y, reference[seed][x]) for x, y in later.items() if x in reference.get(seed, {})]
            if row != options["reference"] and pairs:
                one[HIGHEST_GAP] = max(y / r - 1 if relative else y - r for y, r in pairs)
                one[SAME] = sum(y == r for y, r in pairs) / len(pairs)
            if fall := falls.get((row, seed)):
                one[FALL] = fall.size
            found_of.setdefault(row, {})[seed] = one
    return found_of


def falls_of(found: Mapping[str, tuple[Record, ...]], options: Mapping[str, Any]) -> dict[tuple[str, int], Fall]:
    """(row, seed) -> how far a curve falls behind the figure's change. None of a row of which a run broke off: its
    other seeds do not speak for it."""
    falls: dict[tuple[str, int], Fall] = {}
    if options.get("change") is None:
        return falls
    change = Change.model_validate(options["change"])
    for row, seeds in found.items():
        if any(record.outcome == "not_finite" for record in seeds):
            continue
        for record in seeds:
            series = record.series[options["series"]]
            if fall := change.fall(series.column(options["x"]), series.column(options["y"])):
                falls[row, seed_of(record.job)] = fall
    return falls


def _smoothed(record: Record, options: Mapping[str, Any]) -> dict[float, float]:
    """x -> mean of y there and at the points before it, `window` in all; points that are no numbers are left out."""
    series = record.series[options["series"]]
    pairs = [p for p in zip(series.column(options["x"]), series.column(options["y"]), strict=True) if p[1] is not None]
    means = smoothed([y for _, y in pairs], options["window"])
    return dict(zip([x for x, _ in pairs][len(pairs) - len(means) :], means.tolist(), strict=True))
