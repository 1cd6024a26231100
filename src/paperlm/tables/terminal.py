"""What the main job shows at its end: the diff, the verdicts, and where the files are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paperlm.errors import RecordError
from paperlm.tables.contents import read_built
from paperlm.tables.vocabulary import painted, why


def print_summary(table_csv: Path) -> None:
    """Print a built table beside the published numbers, or a figure's statistics, and the verdicts. Raises RecordError
    if it was not built."""
    if not table_csv.is_file():
        raise RecordError(f"{table_csv}: not built yet; run snakemake {table_csv} --cores 2")
    console = Console(width=None if Console().is_terminal else 150)
    beside = {kind: table_csv.with_name(f"{table_csv.stem}.{kind}.csv") for kind in ("diff", "claims")}
    files = {kind: path for kind, path in beside.items() if path.is_file()}
    diff = read_built(files["diff"]) if "diff" in files else []
    if diff:
        _print_cells(console, table_csv, diff)
    claims = read_built(files["claims"]) if "claims" in files else []
    if claims:
        table = Table(title=f"claims of {table_csv.stem}, scale {claims[0]['scale']}", title_justify="left")
        for name in ("claim", "says", "verdict", "why"):
            table.add_column(name)
        for c in claims:
            says = f"  {c['part']}" if c["part"] else c["says"]
            table.add_row("" if c["part"] else c["claim"], escape(says), painted(c["verdict"]), escape(why(c)))
        console.print(table)
    if (said := table_csv.with_name(f"{table_csv.stem}.notes.txt")).is_file():
        files["notes"] = said
        labels = {label for d in diff for label in d["labels"].split("; ")}  # are printed above
        for line in said.read_text(encoding="utf-8").splitlines():
            if line not in labels:
                console.print(f"- {escape(line)}")
    console.print("files: " + "  ".join(str(p) for p in (table_csv, *files.values())), soft_wrap=True)


def _print_cells(console: Console, table_csv: Path, diff: list[dict[str, str]]) -> None:
    """The table as a grid, and how many cells have which verdict."""
    rows, columns = (list(dict.fromkeys(d[key] for d in diff)) for key in ("row", "column"))
    cells = {(d["row"], d["column"]): d for d in diff}
    grid = Table(title=f"{table_csv.stem}, scale {diff[0]['scale']}: regenerated (published)", title_justify="left")
    grid.add_column("")
    columns = [c for c in columns if any(_said(cells[row, c]) for row in rows if (row, c) in cells)]
    for column in columns:
        grid.add_column(escape(column), justify="right")
    makers = {d["row"]: d["made_by"] for d in diff if d.get("made_by")}
    for row in rows:
        label = escape(row) + (f"\n[dim]{escape(makers[row])}[/]" if row in makers else "")
        grid.add_row(label, *(_cell(cells[row, column]) if (row, column) in cells else "" for column in columns))
    console.print(grid)
    counts: dict[str, int] = {}
    for d in diff:
        counts[d["verdict"]] = counts.get(d["verdict"], 0) + 1
    labels = Counter(label for d in diff for label in d["labels"].split("; ") if label)
    for scale in dict.fromkeys(row.get("scale", "") for row in read_built(table_csv)):
        _, _, proxies = scale.partition(": ")
        if proxies and not {*proxies.split("; ")} <= {*labels}:  # of jobs the labels say it
            console.print(f"a proxy at scale {scale}")
    for label, count in labels.items():
        console.print(escape(label) + (f" ({count} cells)" if count > 1 else ""))
    console.print("cells: " + ", ".join(f"{n} {painted(v)}" for v, n in counts.items()))


def _said(cell: dict[str, str]) -> bool:
    """Whether a cell has a number, here or in print."""
    return bool(cell["published"]) or cell["regenerated"] not in ("", "not run")


def _cell(cell: dict[str, str]) -> str:
    published = f" ({cell['published']})" if cell["published"] else ""
    return painted(cell["verdict"], cell["regenerated"]) + published
