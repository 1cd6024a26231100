"""Figure 5 of Cut Cross-Entropy: validation perplexity during training with each loss function, over seeds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from paperlm.figures.base import Drawing
from paperlm.figures.options import Columns, FigureOptions, options_of
from paperlm.figures.paired import p_greater
from paperlm.figures.seed_curves import (
    Runs,
    draw_line,
    drawn,
    finish,
    panels,
    runs_of,
    same_for_all,
    samples_of,
    shared,
)
from paperlm.figures.style import row_styles
from paperlm.plan.project import Project
from paperlm.record.record import Record
from paperlm.tables.claims import CellSamples
from paperlm.tables.contents import Key

RATIOS = {"ppl_true": "Perplexity Ratio", "ppl_sequences": "Perplexity Ratio (Sequences)"}
WORSE, NOT_WORSE = "p of Being Worse Than", "p of Not Being Worse Than"
DEFINITIONS = {
    "ppl_true": "validation perplexity\nexp(mean over tokens)",
    "ppl_sequences": "validation perplexity\nmean over sequences of exp(their mean)",
}


class Options(FigureOptions):
    """What is compared."""

    reference: str
    "row that the others are compared with"
    exact: str
    "row without a filtered head"

    def reads(self) -> Columns:
        return {"eval": ("update", "tokens", *DEFINITIONS)}

    def reads_metrics(self) -> tuple[str, ...]:
        return tuple(RATIOS)

    def names_rows(self) -> dict[str, str]:
        return {"reference": self.reference, "exact": self.exact}

    def statistics(self) -> tuple[str, ...]:
        return (*RATIOS.values(), f"{WORSE} {self.exact}", f"{NOT_WORSE} {self.exact}")


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """Validation perplexity of each row over the updates, in both definitions."""
    import pandas as pd

    runs, every = runs_of(project, name, records)
    rows = [
        [row, seed, int(update), int(tokens), *values]
        for row, by_seed in runs.items()
        for seed, record in by_seed.items()
        for update, tokens, *values in record.series["eval"].rows
    ]
    frame = pd.DataFrame(rows, columns=["row", "seed", "update", "tokens", *DEFINITIONS])
    figure, axes = panels()
    styles = row_styles(project, name)
    for axis, (definition, label) in zip(axes, DEFINITIONS.items(), strict=True):
        for row in runs:
            here = frame[frame["row"] == row].pivot(index="update", columns="seed", values=definition)
            draw_line(axis, here.index.to_numpy(), here.to_numpy().T, styles[row], row, marker="o")
        axis.set(xlabel="update", ylabel=label, yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="y", which="minor", labelsize=7)
    finish(project, name, figure, axes[0], runs, every)
    samples = perplexity_samples(runs, **options_of(project, name))
    return drawn(project, name, figure, frame, samples, records)


def perplexity_samples(runs: Runs, reference: str, exact: str) -> dict[Key, CellSamples]:
    """What the claims of Figure 5 read, for pairs of rows with at least two seeds in common.

    Ratio of the last perplexity to the reference row's, a value for each seed, in both definitions; for rows other than
    these two, p of the one-sided tests that their loss (log perplexity) is above that of the row `exact`, and below.
    """
    samples: dict[Key, CellSamples] = {}
    for row in runs:
        seeds = shared(runs, row, reference) if row != reference else []
        for metric, column in RATIOS.items() if len(seeds) > 1 else ():
            ratios = [_metric(runs[row][s], metric) / _metric(runs[reference][s], metric) for s in seeds]
            samples[row, column] = samples_of(ratios, seeds, column)
        seeds = shared(runs, row, exact) if row not in (reference, exact) else []
        if len(seeds) > 1:
            above = [
                float(np.log(_metric(runs[row][s], "ppl_true") / _metric(runs[exact][s], "ppl_true"))) for s in seeds
            ]
            samples[row, f"{WORSE} {exact}"] = same_for_all(p_greater(above), len(seeds))
            samples[row, f"{NOT_WORSE} {exact}"] = same_for_all(p_greater([-a for a in above]), len(seeds))
    return samples


def _metric(record: Record, metric: str) -> float:
    return float(record.metrics[metric])
