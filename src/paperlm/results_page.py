"""`paperlm results`: docs/results.md from built tables, diffs and claims, so that no document says more than a verdict.

Two sources: exhibits that the committed records give (the GPU scales), and the reference of the `tiny` scale, a copy of
the CSV files that one named machine made (docs/reference/tiny). The reference is for reading and for comparing a new
run with; no table is ever built from it.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paperlm.errors import RecordError
from paperlm.files import write_json
from paperlm.plan.costs import write_costs
from paperlm.plan.exhibit import ClaimSpec
from paperlm.plan.project import Project
from paperlm.plan.state import State
from paperlm.plan.table import JobsTable
from paperlm.record.places import REFERENCE
from paperlm.record.record import read_record
from paperlm.tables.contents import read_built
from paperlm.tables.jobs import proxies
from paperlm.tables.vocabulary import why

KINDS = ("diff", "claims")
ORDER = ("fails", "undecided", "holds", "not tested")
"What failed stands as visibly as what held: first."
CHANGED = " with uncommitted changes"
"Behind the commit of records that a changed tree made."


def take_reference(project: Project) -> list[str]:
    """Copy diffs and claims of every exhibit that is built at this scale into the reference, and what its jobs cost on
    this machine; returns the exhibits' names. Of what is not built the reference stays, unless it is declared no more.

    Raises RecordError if nothing has been built at the scale, and for a reference that does not say where it was made.
    """
    folder = project.root / REFERENCE / project.scale.scale
    taken, state = {}, State(project)
    for name in project.exhibits:
        paths = {kind: project.root / f"paper_tables/{name}.{kind}.csv" for kind in KINDS}
        if all(path.is_file() for path in paths.values()) and _has_numbers(paths["diff"], project.scale.scale):
            taken[name] = _places(project, state, name)
    if not taken:
        raise RecordError(f"no exhibit of scale {project.scale.scale} has been built; run snakemake first")
    before = _made(folder / "made.json") if folder.is_dir() and any(folder.glob("*.csv")) else {}
    made = {name: found for name in project.exhibits if (found := taken.get(name) or before.get(name))}
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.csv"):
        if path.name.partition(".")[0] not in project.exhibits:
            path.unlink()
    for name in taken:
        for kind in KINDS:
            shutil.copyfile(project.root / f"paper_tables/{name}.{kind}.csv", folder / f"{name}.{kind}.csv")
    write_json(folder / "made.json", made)
    write_costs(project)
    return [*taken]


def _places(project: Project, state: State, name: str) -> dict[str, list[Any]]:
    """Where and when the records of an exhibit were made, and for which seeds they were asked for.

    Rows of measurements (operation/case/method) say it themselves. Raises RecordError for a table that was built from
    other jobs than it has today, or before a record was there; a figure's files name none.
    """
    diff = project.root / f"paper_tables/{name}.diff.csv"
    named = (row["jobs"].split() for row in read_built(diff) if "/" not in row["jobs"])
    built_from = list(dict.fromkeys(job for ids in named for job in ids))
    jobs = {job.job_id: job for job in project.jobs_of(name)}
    if strangers := [job for job in built_from if job not in jobs]:
        raise RecordError(f"{diff}: was built from {strangers[0]}, which {name} does not ask for now; build it again")
    of_jobs = isinstance(project.exhibit(name)[1], JobsTable)
    asked = {job.job_id: job for cell in project.cells(name) for job in cell.jobs} if of_jobs else {}
    if later := [one for one, job in asked.items() if one not in built_from and state.stored(job)]:
        raise RecordError(f"{diff}: was built without {later[0]}, whose record is there now; build it again")
    stored = filter(None, map(state.stored, jobs.values()))
    found = [read_record(project.root / one.path).environment for one in stored]
    places = {
        "machines": {one.cpu if one.device == "CPU" else one.device for one in found},
        "dates": {one.date for one in found},
        "commits": {str(one.commit)[:7] + CHANGED * bool(one.modified) for one in found},
        "torch": {one.packages["torch"] for one in found},
    }
    return {"seeds": project.config.seeds} | {key: sorted(values) for key, values in places.items()}


def _has_numbers(diff: Path, scale: str) -> bool:
    """Whether an exhibit was built at this scale and has a number of ours."""
    rows = read_built(diff)
    return any(row["scale"] == scale and row["regenerated"] not in ("", "not run") for row in rows)


def page(project: Project, scales: tuple[str, ...] = ("tiny",)) -> str:
    """The whole document, from the reference folders."""
    lines = [
        "# Results",
        "",
        "Generated by `python -m paperlm results`; a test compares. Numbers of different scales are never compared.",
        "A claim `holds` or `fails` at the scale above it alone; `undecided` means that the seeds do not tell.",
        "Gap: left side less right side of the comparison that is hardest to decide; detectable: the smallest gap that",
        "its seeds could have decided.",
        "",
        *_without_numbers(project, scales),
    ]
    for scale in scales:
        lines += _of_scale(Project({"scale": scale}, project.root), scales)
    return "\n".join(lines).rstrip() + "\n"


def _without_numbers(project: Project, scales: tuple[str, ...]) -> Iterator[str]:
    """Which exhibits have no section: those that no scale's reference has."""
    folders = [project.root / REFERENCE / scale for scale in scales]
    names = [n for n in project.exhibits if not any((folder / f"{n}.diff.csv").is_file() for folder in folders)]
    if names:
        yield "Without a section: no run of theirs is committed, they need none, or no number of theirs is printed"
        yield "(`snakemake paper_tables/<name>.csv`, or `.svg` of a figure, makes them; claims in brackets):"
        yield f"{_with_claims(project, names)}."
        yield ""


def _elsewhere(project: Project, scales: tuple[str, ...]) -> Iterator[str]:
    """Which exhibits have a section at another scale alone: without this line nobody would miss their claims here."""
    has = {
        scale: {name for name in project.exhibits if (project.root / REFERENCE / scale / f"{name}.diff.csv").is_file()}
        for scale in scales
    }
    names = [name for name in project.exhibits if name in set().union(*has.values()) - has[project.scale.scale]]
    if names:
        yield "Without a section at this scale, though another has it (in brackets their claims, not counted above):"
        yield f"{_with_claims(project, names)}."
        yield ""


def _with_claims(project: Project, names: list[str]) -> str:
    """Exhibits, each with the claims that stand nowhere where it has no section."""
    claims = {name: ", ".join(claim.id for claim in project.exhibit(name)[1].claims) for name in names}
    return ", ".join(f"`{name}`" + (f" ({ids})" if ids else "") for name, ids in claims.items())


def _of_scale(project: Project, scales: tuple[str, ...]) -> Iterator[str]:
    scale = project.scale.scale
    folder = project.root / REFERENCE / scale
    made = _made(folder / "made.json").values()
    machines, dates, commits, torch = (
        sorted({place for one in made for place in one[key]}) for key in ("machines", "dates", "commits", "torch")
    )
    yield f"## Scale `{scale}`"
    yield ""
    yield project.scale.summary
    yield ""
    if dates:
        yield (
            f"Records of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}, made on {', '.join(machines)} with torch "
            f"{', '.join(torch)}; commits {', '.join(commits)}."
        )
    else:
        yield "No record: what stands here follows from shapes and settings alone."
    yield ""
    yield from _verdicts(project, folder)
    yield from _elsewhere(project, scales)
    for name in project.exhibits:
        if (folder / f"{name}.diff.csv").is_file():
            yield from _exhibit(project, folder, name)


def _made(path: Path) -> dict[str, dict[str, list[Any]]]:
    """Exhibit -> seeds, machines, dates, commits, torch. Raises RecordError for a file that does not say it."""
    again = (
        f"restore it with git checkout, or delete the folder and make the reference again: python -m paperlm results "
        f"--take --config scale={path.parent.name}"
    )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        _ = [sorted(one[key]) for one in found.values() for key in ("machines", "dates", "commits", "torch")]
        of_records = [one for one in found.values() if any(one[key] for key in ("machines", "commits", "torch"))]
        _ = [one["dates"][0] for one in of_records]
        _ = min(found)  # an exhibit at least
    except FileNotFoundError:
        raise RecordError(f"{path}: no such file; {again}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise RecordError(f"{path}: does not say where the reference was made; {again}") from None
    return found


def _verdicts(project: Project, folder: Path) -> Iterator[str]:
    """How many claims have which verdict, and which fail, as a whole or in a part."""
    files = {name: folder / f"{name}.claims.csv" for name in project.exhibits}
    rows = [(name, row) for name, path in files.items() if path.is_file() for row in read_built(path)]
    wholes = [(name, row) for name, row in rows if not row["part"]]
    counts = Counter(row["verdict"] for _, row in wholes)
    failed = [(name, row) for name, row in wholes if row["verdict"] == "fails"]
    yield "Claims: " + ", ".join(f"{counts[word]} {word}" for word in ORDER if counts[word]) + "."
    yield from ("What fails, and why in the tables below:", "") if failed else ()
    for name, row in failed:
        yield f"- {row['claim']} (`{name}`): {_cell(row['says'])}"
    yield ""
    # A whole whose other parts were not run, or stay open, can hide a part that fails.
    yield from _failed_parts(rows, {(name, row["claim"]) for name, row in failed})


def _failed_parts(rows: list[tuple[str, dict[str, str]]], told: set[tuple[str, str]]) -> Iterator[str]:
    """The failed parts of claims that do not fail as a whole, a line for each claim."""
    failed: dict[tuple[str, str], list[dict[str, str]]] = {}
    for name, row in rows:
        if row["part"] and row["verdict"] == "fails" and (name, row["claim"]) not in told:
            failed.setdefault((name, row["claim"]), []).append(row)
    yield from ("What fails in a part, where other parts are open or were not run:", "") if failed else ()
    for (name, claim), parts in failed.items():
        yield f"- {claim} (`{name}`), {', '.join(part['part'] for part in parts)}: {_cell(parts[0]['says'])}"
    yield from ("",) if failed else ()


def _exhibit(project: Project, folder: Path, name: str) -> Iterator[str]:
    paper, exhibit = project.exhibit(name)
    diff, claims = read_built(folder / f"{name}.diff.csv"), read_built(folder / f"{name}.claims.csv")
    yield f"### {paper.paper.title.split(':')[0]}, {exhibit.number}: {exhibit.title}"
    yield ""
    yield from grid(diff)
    yield ""
    labels = Counter(label for row in diff for label in row["labels"].split("; ") if label)
    for label, count in labels.items():
        # a figure's labels are of the whole picture
        yield f"- {label}" + (f" ({count} cells)" if count > 1 and name not in project.figures else "")
    models = [line for line in proxies(project, name) if line not in labels]
    said = [*models, *exhibit.notes, *(f"{d.what}: {d.why}" for d in project.deviations(name))]
    yield from (f"- {line}" for line in said)
    words = Counter(row["verdict"] for row in diff)
    yield "- cells: " + ", ".join(f"{count} {word}" for word, count in words.items())
    yield ""
    if claims:
        yield "| claim | verdict | why |"
        yield "|---|---|---|"
        wholes = [row for row in claims if not row["part"]]
        seen = {claim.id: _by_eye(claim) for claim in exhibit.claims}
        for row in sorted(wholes, key=lambda row: ORDER.index(row["verdict"])):
            parts = [part for part in claims if part["part"] and part["claim"] == row["claim"]]
            reason = "; ".join(filter(None, (why(row), _parts(parts), seen.get(row["claim"]))))
            yield f"| {row['claim']}: {_cell(row['says'])} | {row['verdict']} | {_cell(reason)} |"
        yield ""


def _parts(parts: list[dict[str, str]]) -> str:
    """`71M holds, 130M undecided`, but for parts that all say the same; and what two models score on the same items,
    which stands with parts alone."""
    same = len({part["verdict"] for part in parts}) < 2
    said = [] if same else [", ".join(f"{part['part']} {part['verdict']}" for part in parts)]
    for part in parts:
        said += [f"{part['part']}: {gap}" for gap in part["reason"].split("; ") if " on the same " in gap]
    return "; ".join(said)


def _by_eye(claim: ClaimSpec) -> str:
    """What a look at the printed picture says of a claim. From the declaration, which every reference has."""
    if not claim.by_eye:
        return ""
    return f"in print, by eye: {'holds' if claim.by_eye.holds else 'fails'} ({claim.by_eye.source})"


def grid(diff: list[dict[str, str]]) -> Iterator[str]:
    """Regenerated numbers in the layout of the exhibit, the published ones in brackets, as a Markdown table. Rows and
    columns without a number of either kind, for which nothing was run, are named in a line behind it."""
    silent = {
        key: [name for name, cells in _by(diff, key).items() if not any(map(_says_something, cells))]
        for key in ("row", "column")
    }
    told = [row for row in diff if row["row"] not in silent["row"] and row["column"] not in silent["column"]]
    columns, makers = _by(told, "column"), {row["row"]: row["made_by"] for row in told if row.get("made_by")}
    if told:
        yield "| | " + " | ".join(map(_cell, columns)) + " |"
        yield "|" + "---|" * (len(columns) + 1)
    for name, cells in _by(told, "row").items():
        of_column = {cell["column"]: cell for cell in cells}
        shown = []
        for column in columns:
            cell = of_column.get(column, {"regenerated": "", "published": ""})
            published = f" ({cell['published']})" if cell["published"] else ""
            shown.append(_cell(cell["regenerated"] + published))
        maker = f" ({makers[name]})" if name in makers else ""
        yield f"| {_cell(name + maker)} | " + " | ".join(shown) + " |"
    if any(silent.values()):
        yield ""
        kinds = (
            f"{key}{'s' * (len(names) > 1)} {', '.join(f'`{name}`' for name in names)}"
            for key, names in silent.items()
            if names
        )
        yield f"Not run, and without a printed number here: {'; '.join(kinds)}."


def _by(diff: list[dict[str, str]], key: str) -> dict[str, list[dict[str, str]]]:
    """Cells by their row or column, in order."""
    found: dict[str, list[dict[str, str]]] = {}
    for cell in diff:
        found.setdefault(cell[key], []).append(cell)
    return found


def _says_something(cell: dict[str, str]) -> bool:
    return bool(cell["published"]) or cell["regenerated"] not in ("", "not run")


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


def reference_part(project: Project, scale: str, name: str) -> str:
    """The reference of an exhibit as a Markdown table, and what its models are. RecordError if there is none."""
    path = project.root / REFERENCE / scale / f"{name}.diff.csv"
    if not path.is_file():
        raise RecordError(f"{path}: no reference of {name}; python -m paperlm results --take --config scale={scale}")
    lines = list(grid(read_built(path)))
    if said := proxies(Project({"scale": scale}, project.root), name):
        lines += ["", *(f"{line[0].upper()}{line[1:]}." for line in said)]
    return "\n".join(lines)
