"""What a sweep recorded, as a table: the product by cuBLAS in bfloat16 and by the tiles that were chosen.

    python -m paperlm_kernels.bench.ops.ternary_linear.swept paper_tables/records/tiles/ternary_linear.jsonl

A line a matrix and number of tokens, of the latest rows of each. Free of torch and Triton, which the sweep needs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paperlm_kernels.bench import report
from paperlm_kernels.bench.ops.ternary_linear.declared import WIDTHS

BF16, CHOSEN = "bf16", "chosen"
"What a sweep calls its two comparisons; `tiles` of other rows are candidates."
SIZES = tuple(reversed(WIDTHS))
"As the table has them: the largest first."


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a sweep. Raises ValueError, with file and line, for what is none, OSError if there is no file."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            size = row["case"].split("_")[0]
            good = (
                size in SIZES and isinstance(row["tokens"], int) and {"tiles", "device", "date", "versions"} <= set(row)
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            good = False
        if not good:
            raise ValueError(f"{path}:{number}: not a row of a sweep; restore the file or delete the line")
        found.append(row)
    return found


def table(rows: Iterable[dict[str, Any]]) -> str:
    """A caption and a Markdown table for each card; by tokens, then by size from the largest."""
    cards: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for row in rows:
        if row["tiles"] in (BF16, CHOSEN):
            cards.setdefault(row["device"], {}).setdefault(row["case"], {})[row["tiles"]] = row
    parts = []
    for device, cases in cards.items():
        both = sorted((found for found in cases.values() if len(found) == 2), key=lambda found: place(found[BF16]))
        shown = [row for found in both for row in found.values()]
        if shown:
            caption = f"**{device}**: microseconds of a product, {', '.join(report.circumstances(shown)[1:])}."
            heads = ["matrix and tokens", "bfloat16 by cuBLAS, us", "ours, us", "ratio"]
            parts += [caption, report.markdown(heads, [_line(found[BF16], found[CHOSEN]) for found in both])]
    return "\n\n".join(parts)


def place(row: dict[str, Any]) -> tuple[int, int, str]:
    """Where a case stands in the table."""
    return row["tokens"], SIZES.index(row["case"].split("_")[0]), row["case"]


def _line(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    return [theirs["case"], f"{theirs['us']:.1f}", f"{ours['us']:.1f}", f"{theirs['us'] / ours['us']:.2f}"]


def main() -> int:
    """Entry point; exit status 2 for a file that is no sweep's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="what the sweep wrote with --out")
    try:
        print(table(read(parser.parse_args().rows)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
