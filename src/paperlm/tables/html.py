"""The report's page of a table: regenerated beside published, verdicts, notes and deviations, in one HTML file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from paperlm.files import write_atomic
from paperlm.plan.project import Project
from paperlm.tables.build import notes
from paperlm.tables.contents import Contents, DiffRow
from paperlm.tables.vocabulary import NOT_COMPARABLE, mood, why


def write_page(path: Path, project: Project, name: str, contents: Contents, claims: list[dict[str, Any]]) -> None:
    """Write the page; no script, no outside request. What holds for a whole table stands below it, once."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    paper, table = project.table(name)
    said = list(dict.fromkeys([*contents.notes, *shared_labels(contents)]))
    kinds = {job.kind for job in project.jobs_of(name)} | {
        a.kind for job in project.jobs_of(name) for a in job.ancestors()
    }
    environment = Environment(
        loader=PackageLoader("paperlm.tables"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    text = environment.get_template("page.html.jinja").render(
        name=name,
        paper=paper.paper,
        exhibit=table,
        contents=contents,
        cells=contents.cells,
        scale=project.scale,
        mood=mood,
        why=why,
        said=said,
        said_once=(NOT_COMPARABLE,) if contents.notes else (),
        own_labels=lambda cell: [label for label in _labels(cell) if label not in said],
        methods=table.rows if table.kind == "measurements" else {},
        claims=claims,
        notes=notes(project, name),
        scale_changes={kind: changes for kind, changes in project.scale.jobs.items() if kind in kinds},
    )
    write_atomic(path, lambda file: file.write(text.encode()))


def _labels(cell: DiffRow) -> list[str]:
    return list(filter(None, cell.labels.split("; ")))


def shared_labels(contents: Contents) -> list[str]:
    """Labels that more than one cell has: they are said once, below the table."""
    counts = Counter(label for cell in contents.diff for label in _labels(cell))
    return [label for label, count in counts.items() if count > 1]
