"""Times as a table for each card, a line for each site of a model and number of tokens; what else was measured, by
case."""

from __future__ import annotations

from collections.abc import Iterable

from paperlm_kernels.bench import by_case
from paperlm_kernels.bench.ops.rmsnorm_quantize.declared import Case
from paperlm_kernels.bench.report import Row

HEADS = ["tokens", "width", "floor of the bytes, its share of ours"]


def tables(found: Iterable[Row]) -> str:
    """A table for each card, then the tables of all other measures."""
    return by_case.tables(found, {"quantize": "RMSNorm and quantizer"}, HEADS, _cells, _floor)


def _cells(shape: by_case.Shape) -> list[str]:
    return [str(shape["tokens"]), str(shape["width"])]


def _floor(case: str, shape: by_case.Shape, bandwidth: float, ours: Row | None) -> str:
    least = Case(case, "", **shape).floor(bandwidth)
    return f"{least:.3g}" + (f", {least / ours['value']:.0%}" if ours else "")
