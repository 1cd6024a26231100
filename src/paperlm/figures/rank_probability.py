"""Figure 3 of Cut Cross-Entropy: mean softmax probability at each rank, trained and at random weights, log-log.

Drawn from the records of `paperlm probe-ranks`, one for the first seed of each row of a table of runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from paperlm.figures.draw import Drawing, row_styles
from paperlm.record.ranks import RankCurve, RankRecord
from paperlm.record.record import parse_record
from paperlm.spec.project import Project
from paperlm.tables.claims import CellSamples
from paperlm.tables.contents import Key

RANDOM = "random weights"
COLUMNS = {
    "First Rank Below 2^-12": "first_rank_below",
    "Share Above 2^-12": "share_above",
    "Mass Above 2^-12": "mass_above",
    "Alive Tiles": "alive_tiles",
}
"Column that claims read -> field of a curve."


def draw(project: Project, name: str, records: Iterable[Path] = ()) -> Drawing:
    """A line for each row with a record, one for the random weights of the first, and the filter's threshold."""
    import matplotlib.pyplot as plt
    import pandas as pd

    _, spec = project.figure(name)
    found = curves(project, spec.table, [parse_record(path, RankRecord) for path in records])
    rows = [
        [label, record.run.seed, rank, value]
        for label, (record, curve) in found.items()
        for rank, value in zip(curve.ranks, curve.mean_probability, strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["row", "seed", "rank", "mean_probability"])
    figure, axis = plt.subplots(figsize=(6.2, 4.2))
    styles = row_styles([label for label in found if label != RANDOM]) | {RANDOM: {"color": "0.5"}}
    for label, (_, curve) in found.items():
        text = f"{label}: {curve.share_above:.2%} of entries, {curve.alive_tiles:.0%} of tiles at 2^-12 or more"
        axis.plot(curve.ranks, curve.mean_probability, linewidth=1.3, label=text, **styles[label])
    about = ""
    if found:
        record, _ = next(iter(found.values()))
        axis.axhline(record.threshold, color="0.2", linestyle=":", linewidth=1, label="threshold of the filter, 2^-12")
        axis.set(xscale="log", yscale="log", xlabel="rank of the id", ylabel="mean probability")
        axis.legend(frameon=False, fontsize=8)
        about = f"\n{record.run.vocab_size:,} ids, {record.tokens:,} validation tokens, {record.environment.device}"
    else:
        axis.text(0.5, 0.5, "no model has been probed yet", ha="center", va="center", transform=axis.transAxes)
    figure.suptitle(f"{spec.number}: {spec.title}, scale {project.scale.scale}{about}", fontsize=10)
    figure.tight_layout()
    noise = project.scale.seed_noise.value
    samples: dict[Key, CellSamples] = {
        (label, column): CellSamples((float(getattr(curve, field)),), (False,), noise)
        for label, (_, curve) in found.items()
        for column, field in COLUMNS.items()
    }
    return Drawing(figure, frame, samples, "" if found else "no model has been probed")


def curves(project: Project, table: str, records: Sequence[RankRecord]) -> dict[str, tuple[RankRecord, RankCurve]]:
    """Row -> record and curve of its trained model; RANDOM -> those of the first record's random weights."""
    by_run = {record.run_id: record for record in records}
    cells = project.cells(table)
    found = {cell.row: by_run[cell.runs[0].run_id] for cell in cells if cell.runs and cell.runs[0].run_id in by_run}
    lines = {row: (record, record.states["trained"]) for row, record in found.items()}
    if found:
        first = next(iter(found.values()))
        lines[RANDOM] = (first, first.states["initial"])
    return lines
