"""The rows of linear cross-entropy as tables of memory and time, accuracy, kernels and tiles."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from paperlm_kernels.bench import report
from paperlm_kernels.bench.report import Cells, Place, Row, by_measure, circumstances, markdown, not_measured, title
from paperlm_kernels.bench.report import latest as latest_by

PARTS = {"loss": "loss", "gradient": "gradient", "both": "loss+gradient"}
ERRORS = {
    "dE": "dE, relative error",
    "dC": "dC, relative error",
    "nll": "nll, largest error",
    "lse": "LSE, largest error",
}
NORMS = {"dE": "norm of dE / exact", "dC": "norm of dC / exact"}


def latest(rows: Iterable[Row]) -> dict[Place, dict[str, Cells]]:
    """`paperlm_kernels.bench.report.latest`, where rows about tiles have these for their part."""
    return latest_by(rows, lambda row: by_measure(row) or row.get("tiles", ""))


def tables(rows: Iterable[Row]) -> str:
    """For each case its sizes and data, a table of memory and time, one of accuracy, one of kernels, and what was not
    measured; then the shares of tiles alive in all of them."""
    cases = latest(rows)
    return "\n\n".join(filter(None, [*(_case(methods) for methods in cases.values()), _alive(cases)]))


def _case(methods: dict[str, Cells]) -> str:
    blocks = [_caption(methods), _speed(methods), _accuracy(methods), _kernels(methods), not_measured(methods)]
    return "\n\n".join(filter(None, blocks))


def _caption(methods: dict[str, Cells]) -> str:
    every = [row for cells in methods.values() for row in cells.values()]
    last = every[-1]
    shape = last["shape"]
    counting = f", {shape['counting']:.0%} of them counting" if shape["counting"] < 1 else ""
    cap = f"softcap {shape['softcap']:g}" if shape["softcap"] else "no softcap"
    small = " (small, to try the benchmark)" if last["scale"] == "small" else ""
    size = (
        f"**{last['case']}**{small}: {shape['tokens']} tokens{counting}, {shape['vocab']} ids, width {shape['width']}"
    )
    size += f", {cap}"
    data = f"{shape['dtype']}, {last['source']} data with ids in {last['order']} order"
    facts = {(r["metric"], r.get("tiles")): r["value"] for r in every}
    if (share := facts.get(("alive_share", "128x128"))) is not None:
        data += f", {share:.0%} of the 128 x 128 tiles alive"
    sentences = [f"{size}, {data}.", f"Both gradients take {_memory(last['lower_bound_mib'])} MiB"]
    timed = [row for row in every if row["metric"] == "time"]
    if floors := [row["floor_ms"] for row in timed if "floor_ms" in row]:
        # a median a method, for the methods of a case may be of several cards
        rates = [round(rate) for rate in map(_rate, methods.values()) if rate is not None]
        beside = "-".join(map(str, sorted({min(rates), max(rates)})))
        sentences[-1] += f", one matrix product {floors[-1]:.2f} ms at 790 TFLOP/s (measured beside: {beside} TFLOP/s)"
    sentences[-1] += "."
    if products := [f"{row['measure']} {row['value']:.{_digits(row)}f}" for row in every if row["metric"] == "product"]:
        sentences.append(f"The products of these data by cuBLAS alone, ms: {', '.join(products)}.")
    if timed:
        numbers = sorted({row["n"] for row in timed})
        count = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
        sentences.append(f"Times: median (20th-80th percentile) of {count} repetitions.")
    if watched := [row for row in timed if "sm_clock_mhz" in row]:
        clocks, watts = ([row[key][-1] for row in watched] for key in ("sm_clock_mhz", "power_w"))
        sentences.append(
            f"Clock at their end {min(clocks):.0f}-{max(clocks):.0f} MHz, power {min(watts):.0f}-{max(watts):.0f} W."
        )
    sentences.append(f"{', '.join(circumstances(every))}.")
    return " ".join(sentences)


def _rate(cells: Cells) -> float | None:
    """Rate of a large matrix product beside a method's times, TFLOP/s; None if there is none."""
    rates = [row["matmul_tflops"] for row in cells.values() if "matmul_tflops" in row]
    return statistics.median(rates) if rates else None


def _speed(methods: dict[str, Cells]) -> str:
    heads = ["method"]
    for part in PARTS.values():
        heads += [f"{part}, MiB", f"{part}, ms"]
    heads += ["with L2 flushed, ms", "memory / gradients", "time / product"]
    lines = []
    for name, cells in methods.items():
        values = []
        for part in PARTS:
            for metric, form in (("peak_memory", _memory_cell), ("time", _time_cell)):
                row = cells.get((metric, part))
                lost = cells.get(("outcome", part), {}).get("outcome", "")
                values.append(form(row) if row else lost)
        values.append(_time_cell(cells.get(("time", "both_cold"))))
        values += [_ratio(cells, "peak_memory", "over_bound"), _ratio(cells, "time", "over_floor")]
        if any(values):
            lines.append([_title(name, cells), *values])
    return markdown(heads, lines)


def _accuracy(methods: dict[str, Cells]) -> str:
    lines = []
    for name, cells in methods.items():
        values = [f"{cells['error', what]['value']:.1e}" if ("error", what) in cells else "" for what in ERRORS]
        values += [f"{cells['norm', what]['value']:.4f}" if ("norm", what) in cells else "" for what in NORMS]
        values.append(_same_bits(cells.get(("determinism", ""))))
        if any(values):
            lines.append([_title(name, cells), *values])
    return markdown(["method", *ERRORS.values(), *NORMS.values(), "same bits in every run"], lines)


def _kernels(methods: dict[str, Cells]) -> str:
    """Milliseconds of each kernel in loss and gradient, in brackets how often it is launched; longest of all first."""
    times = {
        _title(name, cells): {part: row for (metric, part), row in cells.items() if metric == "kernel"}
        for name, cells in methods.items()
    }
    times = {method: kernels for method, kernels in times.items() if kernels}
    longest: dict[str, float] = {}
    for kernels in times.values():
        for kernel, row in kernels.items():
            longest[kernel] = max(row["value"], longest.get(kernel, 0.0))
    cell = lambda row: "" if row is None else f"{row['value']:.2f} ({row['launches']:g})"  # noqa: E731
    lines = [
        [kernel, *(cell(kernels.get(kernel)) for kernels in times.values())]
        for kernel in sorted(longest, key=lambda name: (name == "others", -longest[name]))
    ]
    return markdown(["kernel: ms (launches)", *times], lines)


def _alive(cases: dict[Place, dict[str, Cells]]) -> str:
    """Shares of tiles (tokens x ids) in which some entry of softmax minus target reaches the filter's threshold."""
    shares = {
        place: {part: row["value"] for (metric, part), row in cells.items() if metric == "alive_share"}
        for place, methods in cases.items()
        for cells in methods.values()
        if any(metric == "alive_share" for metric, _ in cells)
    }
    labels = report.labels(shares)
    tiles = list(dict.fromkeys(tile for found in shares.values() for tile in found))
    if len(tiles) < 2:
        return ""
    lines = [
        [labels[place], place[1], *(f"{found[tile]:.1%}" if tile in found else "" for tile in tiles)]
        for place, found in shares.items()
    ]
    return "Share of tiles alive, tokens x ids; sorted: ids by their mean logit.\n\n" + markdown(
        ["case", "order of the ids", *tiles], lines
    )


def _title(name: str, cells: Cells) -> str:
    return "lower bound" if name == "lower_bound" else title(cells)


def _memory_cell(row: Row) -> str:
    return _memory(row["value"])


def _memory(value: float) -> str:
    """MiB: whole numbers from 100 up, else two digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}" if value >= 0.01 else "< 0.01"


def _time_cell(row: Row | None) -> str:
    if row is None:
        return ""
    digits = _digits(row)
    return f"{row['value']:.{digits}f} ({row['low']:.{digits}f}-{row['high']:.{digits}f})"


def _digits(row: Row) -> int:
    return 1 if row["value"] >= 10 else 2


def _ratio(cells: Cells, metric: str, key: str) -> str:
    ratio = cells.get((metric, "both"), {}).get(key)
    return "" if ratio is None else f"{ratio:.2f}"


def _same_bits(row: Row | None) -> str:
    if row is None:
        return ""
    differ = [name for name, equal in row["parts"].items() if not equal]
    return f"not {', '.join(differ)}" if differ else "yes"
