"""Time over that of a matrix product and memory over that of the gradients, by method and case, in two panels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paperlm_kernels.bench import report
from paperlm_kernels.bench.ops.cross_entropy.report import latest
from paperlm_kernels.bench.report import Row, title

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
TITLES = {
    "over_floor": "time / time of one matrix product",
    "over_bound": "peak memory / size of the two gradients",
    "ms": "time, ms",
}


def points(rows: list[Row]) -> list[dict[str, Any]]:
    """A dict for each method and case: method, case, device, and which of "over_floor", "over_bound", "ms" it has."""
    found = []
    cases = latest(rows)
    labels = report.labels(cases)
    for place, methods in cases.items():
        name = labels[place] + (" (permuted)" if place[1] == "permuted" else "")
        for cells in methods.values():
            time, memory = cells.get(("time", "both"), {}), cells.get(("peak_memory", "both"), {})
            values = {
                "over_floor": time.get("over_floor"),
                "over_bound": memory.get("over_bound"),
                "ms": time.get("value"),
            }
            known = {key: value for key, value in values.items() if value is not None}
            if known:
                method = title(cells)
                found.append({"method": method, "case": name, "device": place[3].device, **known})
    return found


def draw(rows: list[Row], path: Path) -> None:
    """Write the chart of loss plus gradient in the format of the suffix of `path`; needs seaborn.

    The time of one matrix product is known for GPUs; where no row has it the panel shows milliseconds. Raises
    ValueError if there is nothing to draw.
    """
    import matplotlib
    import seaborn

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = points(rows)
    first = "over_floor" if any("over_floor" in p for p in found) else "ms"
    panels = [key for key in (first, "over_bound") if any(key in p for p in found)]
    if not panels:
        raise ValueError("no row has a time or memory of loss and gradient to draw; run `--measure both` first")
    methods = list(dict.fromkeys(p["method"] for p in found))
    cases = list(dict.fromkeys(p["case"] for p in found))
    devices = list(dict.fromkeys(p["device"] for p in found))
    colours = seaborn.color_palette("colorblind", len(cases))
    seaborn.set_theme(style="whitegrid", font_scale=0.9)
    spread = 0.7 if len(cases) > 1 else 0.0
    height = 1.8 + len(methods) * max(0.32, 0.09 * len(cases)) + 0.25 * ((len(cases) + 2) // 3)
    size = (4.6 * len(panels) + 1.8, height)
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, key in zip(axes[0], panels, strict=True):
        for index, case in enumerate(cases):
            here = [p for p in found if p["case"] == case and key in p]
            shift = spread * ((index + 0.5) / len(cases) - 0.5)
            axis.scatter(
                [p[key] for p in here], [methods.index(p["method"]) + shift for p in here], label=case, zorder=3, s=44,
                color=[colours[index]], marker=MARKERS[index % len(MARKERS)], edgecolors="white", linewidths=0.6,
            )  # fmt: skip
        _scale(axis, [p[key] for p in found if key in p], ratio=key != "ms")
        axis.set_xlabel(TITLES[key])
        if len(cases) == 1:
            _write_values(axis, found, key, methods)
    axes[0][0].set_yticks(range(len(methods)), methods)
    axes[0][0].set_ylim(len(methods) - 0.5, -0.5)
    for axis in axes[0]:
        axis.grid(axis="y", visible=len(cases) == 1)
        for edge in range(1, len(methods)) if len(cases) > 1 else ():
            axis.axhline(edge - 0.5, color="0.85", linewidth=0.8)
    heading = f"Loss and gradient{', ' + cases[0] if len(cases) == 1 else ''}\n{'; '.join(devices)}"
    figure.suptitle(heading, fontsize="medium")
    if len(cases) > 1:
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(cases)), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _scale(axis: Any, values: list[float], *, ratio: bool) -> None:
    """A logarithmic axis with room for the written values; ratios show 1 as a line."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = min(values), max(values)
    if ratio:
        low, high = min(low, 1.0), max(high, 2.0)
        axis.axvline(1, color="0.35", linewidth=1.2, zorder=2)
    room = (high / low) ** 0.05
    axis.set_xscale("log", base=2)
    axis.set_xlim(low / room, high * room**3)
    axis.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×" if ratio else f"{value:g}"))


def _write_values(axis: Any, found: list[dict[str, Any]], key: str, methods: list[str]) -> None:
    """The value beside each mark: one mark a line, so that no two labels meet."""
    for point in found:
        if key in point:
            place = (point[key], methods.index(point["method"]))
            axis.annotate(
                f"{point[key]:.2f}" if point[key] < 10 else f"{point[key]:.1f}", place, xytext=(7, 0), va="center",
                textcoords="offset points", fontsize="small",
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "linewidth": 0},
            )  # fmt: skip
