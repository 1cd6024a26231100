"""Figure 3 of Cut Cross-Entropy: mean softmax probability at each rank, trained and at random weights, log-log.

Drawn from jobs of kind rank_probability, the first seed of each row; a row whose job is `at: init` is grey.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from paperlm.figures.base import Drawing, headline, labels_of
from paperlm.figures.options import Columns, FigureOptions
from paperlm.figures.style import legend_below, row_styles
from paperlm.plan.project import Project
from paperlm.tables.claims import CellSamples
from paperlm.tables.contents import Key
from paperlm.tables.results import collect

COLUMNS = {
    "First Rank Below 2^-12": "first_rank_below",
    "Share Above 2^-12": "share_above",
    "Mass Above 2^-12": "mass_above",
    "Alive Tiles": "alive_tiles",
}
"Column that claims read -> metric of a record."


class Options(FigureOptions):
    """It has none."""

    def reads(self) -> Columns:
        return {"ranks": ("rank", "mean_probability")}

    def reads_metrics(self) -> tuple[str, ...]:
        return (*COLUMNS.values(), "threshold", "tokens")

    def statistics(self) -> tuple[str, ...]:
        return tuple(COLUMNS)


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """A line for each row with a record, and the filter's threshold."""
    import matplotlib.pyplot as plt
    import pandas as pd

    records = list(records)
    results = collect(project, name, records)
    found = {row: cell.usable[0] for (row, _), cell in results.cells.items() if cell.usable}
    rows = [
        [label, record.job["of"]["seed"], rank, value]
        for label, record in found.items()
        for rank, value in record.series["ranks"].rows
    ]
    frame = pd.DataFrame(rows, columns=["row", "seed", "rank", "mean_probability"])
    figure, axis = plt.subplots(figsize=(6.2, 4.6))
    styles, about = row_styles(project, name), ""
    for label, record in found.items():
        m, curve = record.metrics, record.series["ranks"]
        text = f"{label}: {m['share_above']:.2%} of entries, {m['alive_tiles']:.0%} of tiles at 2^-12 or more"
        style = {"color": "0.5"} if record.job.get("at") == "init" else styles[label]
        axis.plot(curve.column("rank"), curve.column("mean_probability"), linewidth=1.3, label=text, **style)
    if found:
        record = next(iter(found.values()))
        axis.axhline(
            record.metrics["threshold"], color="0.2", linestyle=":", linewidth=1, label="threshold of the filter, 2^-12"
        )
        axis.set(xscale="log", yscale="log", xlabel="rank of the id", ylabel="mean probability")
        vocab, tokens = record.job["of"]["vocab_size"], record.metrics["tokens"]
        about = f"{vocab:,} ids, {tokens:,} validation tokens, {record.environment.device}"
    else:
        axis.text(0.5, 0.5, "no model has been probed yet", ha="center", va="center", transform=axis.transAxes)
    headline(figure, project, name, results, about)
    legend_below(figure, *axis.get_legend_handles_labels())
    samples: dict[Key, CellSamples] = {
        (label, column): CellSamples((float(record.metrics[metric]),), measured=False)
        for label, record in found.items()
        for column, metric in COLUMNS.items()
    }
    untested = "" if found else "no model has been probed"
    return Drawing(figure, frame, samples, untested, labels=labels_of(project, name, records))
