"""`paperlm documents`: the generated parts of the documents, each between `<!-- mark -->` and `<!-- end -->`.

A mark says where its part comes from:

    gpu: mixln_table1                                    the reference of an exhibit at a scale (docs/reference/)
    measured: python -m paperlm bench show rows.jsonl    what that command prints; `# first table`: of it that alone
    registry: bundled and local                          data that needs no hub

docs/results.md is generated as a whole.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from paperlm.bench import with_ours
from paperlm.data.registry import About, registry
from paperlm.errors import RecordError, SpecError, unknown
from paperlm.files import write_atomic
from paperlm.plan.project import Project
from paperlm.record.places import REFERENCE
from paperlm.results_page import page, reference_part

RESULTS, PLACES = "docs/results.md", ("README.md", "docs/*.md", "kernels/*.md")
MARK = re.compile(r"<!-- (\w+: .+) -->")
END = "<!-- end -->"
SHOW = (["python", "-m", "paperlm", "bench", "show"], ["python", "-m", "paperlm_kernels.bench", "show"])
SWEPT = ["python", "-m", "paperlm_kernels.bench.ops.ternary_linear.swept"]
"Commands whose output can be quoted: rows of the benchmark, and of the sweep of tiles."


def generated(project: Project) -> dict[Path, str]:
    """File -> its text as it should be, for every document with a generated part. Raises SpecError for a mark that says
    nothing known or has no end, RecordError for a source that is missing or damaged."""
    scales = tuple(sorted(path.name for path in (project.root / REFERENCE).iterdir() if path.is_dir()))
    found = {project.root / RESULTS: page(project, scales)}
    for path in sorted(path for place in PLACES for path in project.root.glob(place)):
        text = path.read_text(encoding="utf-8")
        if path not in found and MARK.search(text):
            found[path] = fill(text, lambda mark: part(project, mark), path)
    return found


def fill(text: str, make: Callable[[str], str], path: Path) -> str:
    """The text with every generated part made anew. SpecError for a part without an end."""
    lines = iter(text.splitlines())
    found = []
    for line in lines:
        found.append(line)
        if mark := MARK.fullmatch(line):
            if END not in lines:  # reads on behind it
                raise SpecError(f"{path}: no {END} behind {line}: write it where the generated part ends")
            found += ["", make(mark[1]), "", END]
    return "\n".join(found) + "\n"


def part(project: Project, mark: str) -> str:
    """What belongs behind a mark."""
    source, _, what = mark.partition(": ")
    if source == "measured":
        return _measured(project.root, what)
    if source == "registry":
        return _data_table()
    if source not in project.scales:
        raise SpecError(f"<!-- {mark} -->: " + unknown("source", source, ["measured", "registry", *project.scales]))
    return reference_part(project, source, what)


def _measured(root: Path, command: str) -> str:
    from paperlm_kernels.bench import rows
    from paperlm_kernels.bench.command import shown
    from paperlm_kernels.bench.ops.ternary_linear import swept

    *words, path = shlex.split(command, comments=True)
    if words not in (known := [*SHOW, SWEPT]):
        raise SpecError(f"<!-- measured: {command} -->: quote {' or '.join(map(' '.join, known))} and a file of rows")
    with_ours()
    try:
        whole = swept.table(swept.read(root / path)) if words == SWEPT else shown(rows.read(root / path))
    except (ValueError, OSError) as error:
        raise RecordError(f"<!-- measured: {command} -->: {error}") from None
    if not command.endswith("# first table"):
        return whole
    return re.search(r"(?:^\|.*\n)+", whole, re.MULTILINE)[0].rstrip()


def _data_table() -> str:
    """Every set in the repository or in a local folder, and the tokenizers: what their entries say of each."""
    known = registry()
    named: dict[str, About] = {
        f"`{entry.source}:{name}`": entry
        for name, entry in [*known.datasets.items(), *known.models.items()]
        if entry.source != "hub"
    }
    named |= {f"tokenizer `{name}`": entry for name, entry in known.tokenizers.items()}
    lines = ["| name | what | licence | revision | citation |", "|---|---|---|---|---|"]
    lines += [f"| {name} | {e.summary} | {e.licence} | {e.revision} | {e.citation} |" for name, e in named.items()]
    return "\n".join(lines)


def stale(project: Project) -> list[Path]:
    """Documents with a part that is not what its source says."""
    return [
        path
        for path, text in generated(project).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def check_documents(project: Project) -> None:
    """RecordError that names them if there are some."""
    if found := stale(project):
        names = ", ".join(str(path.relative_to(project.root)) for path in found)
        raise RecordError(f"{names}: a generated part is not what its source says; python -m paperlm documents --write")


def write_documents(project: Project) -> None:
    """Write every generated part anew."""
    texts = generated(project)
    for path in stale(project):
        write_atomic(path, lambda file, text=texts[path]: file.write(text.encode()))
        print(path.relative_to(project.root))
