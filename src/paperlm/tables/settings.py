"""Tables of kind `settings`: the paper's hyper-parameters beside those our own runs use at the `paper` scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path

from paperlm.errors import SpecError, unknown
from paperlm.spec.paper import PaperSpec
from paperlm.spec.project import Project, load_scale, resolve_settings
from paperlm.tables.compare import DiffRow
from paperlm.tables.contents import Contents
from paperlm.tables.published import PublishedTable, half_a_digit, number

REAL_TOKENS_PER_SEQUENCE = 195.5
"Of 256 slots; solved from the denominators of the authors' evaluation log."


def _short(value: float, suffix: str, unit: float, decimals: int) -> str:
    return f"{value / unit:.{decimals}f}{suffix}"


COLUMNS: dict[str, Callable[[dict, Fraction], str]] = {
    "Hidden": lambda s, a: str(s["hidden_size"]),
    "Intermediate": lambda s, a: str(s["intermediate_size"]),
    "Heads": lambda s, a: str(s["n_heads"]),
    "Layers": lambda s, a: str(s["n_layers"]),
    "Steps": lambda s, a: _short(s["steps"], "K", 1e3, 0),
    "Data amount": lambda s, a: _short(s["steps"] * s["global_batch"] * REAL_TOKENS_PER_SEQUENCE, "B", 1e9, 1),
    "LR": lambda s, a: f"{s['peak_lr']:.0e}".replace("e-0", "e-"),
    "Batch Size": lambda s, a: str(s["global_batch"]),
    "α": lambda s, a: f"{float(a):.2%}".replace(".00%", "%"),
}
"Printed column -> our value, from the settings and alpha of a size."


def contents(project: Project, name: str, published: PublishedTable, records: Iterable[Path] = ()) -> Contents:
    """The table at scale paper, whatever scale is configured; no record is read. SpecError for an unknown column."""
    paper, table = project.table(name)
    for column in published.columns:
        if column not in COLUMNS:
            raise SpecError(f"{table.published}: {unknown('column', column, COLUMNS)}")
    diff = []
    for size in table.sizes:
        ours = _values(project, paper, size)
        for column in published.columns:
            printed, value = published.cell(size, column), ours[column]
            a, b = number(printed), number(value)
            same = printed == value or (a is not None and b is not None and abs(a - b) <= half_a_digit(printed))
            reason = "" if same else _source(project, paper, size, column)
            diff.append(
                DiffRow(
                    table=name, row=size, column=column, scale="paper", published=printed, regenerated=value,
                    difference="" if a is None or b is None else f"{b - a:+.4g}",
                    verdict="match" if same else "differs", reason=reason,
                )
            )  # fmt: skip
    return Contents(diff, depends_on_scale=False)


def _values(project: Project, paper: PaperSpec, size: str) -> dict[str, str]:
    scale = load_scale(project.root / "workflow/scales/paper.yaml")
    settings = {k: s.value for k, s in resolve_settings(paper, size, scale).items()}
    alpha = Fraction(str(paper.sizes[size].post_fraction.value))
    return {column: function(settings, alpha) for column, function in COLUMNS.items()}


def _source(project: Project, paper: PaperSpec, size: str, column: str) -> str:
    """Where our differing value comes from."""
    if column == "Data amount":
        return f"ours: {REAL_TOKENS_PER_SEQUENCE} real tokens x batch x updates; the printed tokens are labels"
    keys = {"Hidden": "hidden_size", "Steps": "steps", "LR": "peak_lr"}
    if column not in keys:
        return ""
    scale = load_scale(project.root / "workflow/scales/paper.yaml")
    return f"ours: {resolve_settings(paper, size, scale)[keys[column]].source}"
