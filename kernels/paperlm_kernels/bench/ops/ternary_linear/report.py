"""Times of products and of layers as a table each a card, a line a matrix and number of tokens; what else was measured,
by case."""

from __future__ import annotations

from collections.abc import Iterable

from paperlm_kernels.bench import by_case
from paperlm_kernels.bench.ops.ternary_linear.declared import Case
from paperlm_kernels.bench.report import Row

TIMED = {"product": "a product", "layer": "a layer, which is RMSNorm, quantizer and product"}
HEADS = ["tokens", "matrix", "floor in 2 bits, what sets it, share of ours"]


def tables(found: Iterable[Row]) -> str:
    """Of products and of layers a table for each card, then the tables of all other measures."""
    return by_case.tables(found, TIMED, HEADS, _cells, _floor)


def _cells(shape: by_case.Shape) -> list[str]:
    return [str(shape["tokens"]), f"{shape['rows']} x {shape['columns']}"]


def _floor(case: str, shape: by_case.Shape, bandwidth: float, ours: Row | None) -> str:
    """The floor of a product with two bits a weight, whether bytes or operations set it, and its share of our time."""
    limits = Case(case, "", **shape).limits(2, bandwidth)
    what = max(limits, key=limits.__getitem__)
    share = f", {limits[what] / ours['value']:.0%}" if ours else ""
    return f"{limits[what]:.3g}, {what}{share}"
