"""The report's page of a table: regenerated beside published, verdicts, notes and deviations, in one HTML file."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from paperlm.files import write_atomic
from paperlm.spec.project import Project
from paperlm.tables.compare import DiffRow
from paperlm.tables.contents import Contents

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.35rem}h2{font-size:1.05rem;margin-top:2rem}table{border-collapse:collapse;margin:.5rem 0}
th,td{padding:.3rem .7rem;border-bottom:1px solid #d9dee3;text-align:left;vertical-align:top}
th{background:#f4f6f8}tr>:first-child{white-space:nowrap}td.n{text-align:right;font-variant-numeric:tabular-nums}
small{color:#5b6570}.good{color:#116329}.bad{color:#a40e26}.open{color:#8a5a00}
"""
GOOD = ("match", "within 1 %", "within seeds", "diverged as published", "holds")
BAD = ("differs", "fails")


def write_page(
    path: Path,
    project: Project,
    name: str,
    contents: Contents,
    claims: list[dict[str, Any]],
) -> None:
    """Write the page; no script, no outside request."""
    paper, table = project.table(name)
    cells = contents.cells
    parts = [
        f"<h1>{_e(paper.paper.title)}, {_e(table.number)}</h1><p>{_e(table.title)}. "
        f"<small>arXiv {_e(paper.paper.arxiv)}</small></p>"
    ]
    scale = contents.scale
    if contents.depends_on_scale:
        parts.append(f"<p>Scale <b>{_e(scale)}</b>: {_e(project.scale.summary)}</p>")
    head = "".join(f"<th>{_e(c)}</th>" for c in ("", *contents.columns))
    one_by_one = table.kind == "runs"  # what a measurement was made with is said once, not in each of its cells
    body = "".join(
        f"<tr><th>{_e(row)}{_proxy(contents, row)}</th>"
        f"{''.join(_cell(cells[row, c], one_by_one) for c in contents.columns)}</tr>"
        for row in contents.rows
    )
    parts.append(f"<h2>Regenerated, and the published number below it</h2><table><tr>{head}</tr>{body}</table>")
    if not one_by_one and (labels := list(dict.fromkeys(d.labels for d in contents.diff if d.labels))):
        parts.append(f"<p><small>{'<br>'.join(_e(label) for label in labels)}</small></p>")
    if table.kind == "measurements":
        lines = "".join(
            f"<tr><td>{_e(label)}</td><td>{_e(row.method)}</td><td>{_e(row.source)}</td></tr>"
            for label, row in table.rows.items()
        )
        parts.append(
            "<h2>What each row is</h2><table><tr><th>row</th><th>method in the measurement rows</th><th></th></tr>"
            f"{lines}</table>"
        )
    if claims:
        lines = "".join(
            f"<tr><td>{_e(c['claim'])}</td><td>{_e(c['says'])}</td><td>{_verdict(c['verdict'])}</td>"
            f"<td class=n>{_e(c['support'])}</td><td><small>{_e(c['reason'])}</small></td></tr>"
            for c in claims
        )
        parts.append(
            "<h2>Claims</h2><p><small>Support: share of redraws of the table, each cell moved by its noise, in "
            "which the statement is true; holds from 0.975, fails up to 0.025.</small></p><table><tr><th>claim</th>"
            f"<th>says</th><th>verdict</th><th>support</th><th>why</th></tr>{lines}</table>"
        )
    notes = [*table.notes, *(f"{d.what}: {d.why}" for d in project.deviations(name))]
    if notes:
        parts.append(f"<h2>Notes and deviations</h2><ul>{''.join(f'<li>{_e(n)}</li>' for n in notes)}</ul>")
    if table.kind == "runs" and (project.scale.settings or project.scale.sizes):
        lines = "".join(
            f"<tr><td>{_e(key)}</td><td>{_e(str(change.value))}</td><td>{_e(change.why)}</td></tr>"
            for key, change in project.scale.settings.items()
        )
        parts.append(
            f"<h2>What scale {_e(scale)} changes</h2><table><tr><th>setting</th><th>value</th><th>why</th></tr>"
            f"{lines}</table>"
        )
    text = f"<!doctype html><html lang=en><meta charset=utf-8><title>{_e(name)}</title><style>{STYLE}</style>"
    write_atomic(path, lambda file: file.write((text + "".join(parts) + "</html>").encode()))


def _e(text: object) -> str:
    return html.escape(str(text))


def _proxy(contents: Contents, row: str) -> str:
    """What a row's numbers are a proxy with, below its name."""
    return f"<br><small>{_e(contents.proxies[row])}</small>" if row in contents.proxies else ""


def _verdict(verdict: str) -> str:
    kind = "good" if verdict in GOOD else "bad" if verdict in BAD else "open"
    return f"<span class={kind}>{_e(verdict)}</span>"


def _cell(cell: DiffRow, with_labels: bool) -> str:
    if not cell.regenerated and not cell.published:
        return "<td></td>"
    labels = f"<br><small>{_e(cell.labels)}</small>" if cell.labels and with_labels else ""
    return (
        f"<td class=n><b>{_e(cell.regenerated)}</b><br><small>{_e(cell.published) or 'not'} published<br>"
        f"{_verdict(cell.verdict)}</small>{labels}</td>"
    )
