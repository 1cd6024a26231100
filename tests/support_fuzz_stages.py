"""What random damage is tried on: folders of files, the command that reads them, and what comes out of it."""

from __future__ import annotations

import contextlib
import csv
import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import test_damage
from support import copy_declarations
from support_fuzz import Stage, command
from test_damage import removal, trained

from paperlm import checks
from paperlm.errors import Interrupted
from paperlm.plan import project as project_module
from paperlm.plan.project import ROOT, Project
from paperlm.plan.workflow import Workflow

OPEN = checks.open_project


def in_folder(folder: Path, project: Project | None = None) -> None:
    """From here on the verbs work in this folder. `project`: opened before, of a folder with the same declarations."""

    def opened(config: Any = None, root: Path = folder) -> Project:
        if project is None:
            return OPEN(config, root)
        project.root = folder
        project.places = type(project.places)(folder, project.scale.scale)
        return project

    project_module.clone = lambda: folder
    checks.open_project = opened


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- tables and figures --

TABLES = {
    "mixln_table1": "gpu", "mixln_table5": "gpu", "mixln_table8": "gpu", "lns_table1": "gpu", "lns_table4": "gpu",
    "mixln_figure5": "gpu", "lns_figure1": "gpu", "mixln_figure3cd": "gpu", "cce_table1": "gpu",
    "neuzip_throughput": "gpu", "cce_tableA3": "gpu",
}  # fmt: skip


def exhibit(folder: Path, project: Project, name: str) -> dict[str, Any]:
    """Build a table or a figure of records at hand, as its rule does. Gives its numbers."""
    in_folder(folder, project)
    inputs = [path for path in Workflow(project).inputs(name) if project.places.is_file(path)]
    verb, suffix = ("table", "csv") if name in project.tables else ("figure", "svg")
    out = folder / f"out/{name}.{suffix}"
    config = ["--config", f"scale={project.scale.scale}", "--config", "run_missing=no"]
    command(verb, name, "--out", str(out), *config, "--records", *inputs)
    found = {"files": {p.name: digest(p) for p in sorted(out.parent.glob("*.csv"))}}
    diff = out.with_name(f"{name}.diff.csv")
    with diff.open(encoding="utf-8") if diff.is_file() else contextlib.nullcontext([]) as file:
        found["cells"] = [[r["row"], r["column"], r["published"], r["regenerated"]] for r in csv.DictReader(file)]
    return found


def only_not_run(found: Any, expected: Any) -> str:
    """`not run` where that is all that differs from the cells that were expected."""
    same = len(found["cells"]) == len(expected["cells"])
    pairs = list(zip(found["cells"], expected["cells"], strict=True)) if same else []
    told = [one[:3] == other[:3] and (one[3] == other[3] or one[3] in ("not run", "")) for one, other in pairs]
    return "not run" if told and all(told) else ""


def clone(base: Path) -> Path:
    """What a clone has that tables are made of."""
    folder = copy_declarations(base)
    for name in ("gpu", "bench"):
        shutil.copytree(ROOT / "paper_tables/records" / name, folder / "paper_tables/records" / name)
    shutil.copy(ROOT / "paper_tables/records/SHA256SUMS", folder / "paper_tables/records")
    return folder


def records(base: Path) -> Iterator[Stage]:
    """Committed records, and the exhibits that are built of them."""
    root = clone(base / "records")
    project = OPEN({"scale": "gpu", "run_missing": "no"}, root)
    reader: dict[str, str] = {}
    for name in TABLES:
        for path in Workflow(project).inputs(name):
            if path.endswith(".json"):
                reader.setdefault(path, name)
    names = sorted(reader)

    def other(name: str) -> Path:
        same = [path for path in names if Path(path).parent == Path(name).parent]
        return root / same[(same.index(name) + 1) % len(same)]

    yield Stage(
        "records", root, names, lambda folder, name: exhibit(folder, project, reader[name]), other, 1.0,
        allowed=only_not_run, reader=reader.__getitem__,
    )  # fmt: skip
    sums = "paper_tables/records/SHA256SUMS"
    yield Stage(
        "list of records", root, [sums], lambda folder, name: exhibit(folder, project, "mixln_table5"),
        lambda name: root / "config.yaml", 0.1,
    )  # fmt: skip


def declarations(base: Path) -> Iterator[Stage]:
    """Paper files, scales and the configuration, edited by hand: the plan of everything."""
    root = copy_declarations(base / "declarations")
    papers = [f"workflow/papers/{path.name}" for path in sorted((root / "workflow/papers").glob("*.yaml"))]
    scales = [f"workflow/scales/{path.name}" for path in sorted((root / "workflow/scales").glob("*.yaml"))]

    def run(folder: Path, name: str) -> Any:
        in_folder(folder)
        command("plan")
        opened = checks.open_project(project_module.configuration(folder, {}))
        return [sorted(opened.jobs), [Workflow(opened).exhibit_digest(name) for name in opened.exhibits]]

    def other(name: str) -> Path:
        same = papers if name in papers else scales
        return root / same[(same.index(name) + 1) % len(same)] if name in same else root / papers[0]

    yield Stage("declarations", root, [*papers * 2, *scales, "config.yaml"], run, other, 1.5, declares=True)


# -- jobs --


def below(root: Path, *patterns: str) -> list[str]:
    found = {str(p.relative_to(root)) for g in patterns for p in root.glob(g) if p.is_file() and p.stat().st_size}
    return sorted(found)


def jobs(base: Path) -> Iterator[Stage]:
    """A training that was stopped, one that is done, and a measurement of its blocks that was killed half way."""
    folders = {}
    for seed, name in enumerate(("run", "other")):
        stopped, done, half = (base / f"jobs/{name}-{state}" for state in ("stopped", "trained", "measuring"))
        with contextlib.suppress(Interrupted):
            test_damage.made(stopped, trained(seed), stop_after=test_damage.STOP)
        shutil.copytree(ROOT / "workflow/scales", stopped / "workflow/scales")
        shutil.copytree(stopped, done)
        test_damage.made(done, trained(seed))
        shutil.copytree(done, half)
        test_damage.leave_half(half, removal(seed))
        folders[name] = {"stopped": stopped, "trained": done, "measuring": half}
    reads: dict[str, tuple[Any, list[str]]] = {
        "stopped": (trained(), ["results/smoke/work/**/*", "results/data/*/*"]),
        "trained": (removal(), ["results/smoke/models/**/*", "results/data/*/*"]),
        "measuring": (removal(), ["results/smoke/work/**/*"]),
    }
    for state, (job, patterns) in reads.items():
        root = folders["run"][state]
        yield Stage(
            f"job {state}", root, below(root, *patterns), functools.partial(made, job=job),
            functools.partial(twin, folders["other"][state], (trained, removal)), 1.0, killed=True,
        )  # fmt: skip


def made(folder: Path, name: str, job: Any) -> Any:
    """`paperlm run` of a job with its parents; gives all that must be the same."""
    in_folder(folder)
    keep = ["--keep", "2"] if job.kind == "pretrain" else []
    machine = ["--device", "cpu", "--checkpoint-updates", "2"]
    command("run", "--job", json.dumps(job.canonical()), "--scale", "smoke", "--with-parents", *machine, *keep)
    return test_damage.outcome(folder, job)


def twin(root: Path, kinds: Sequence[Callable[[int], Any]], name: str) -> Path:
    """The file in the same place of the jobs of the other seed, whose folders have other names."""
    for make in kinds:
        name = name.replace(make(0).job_id, make(1).job_id)
    return root / name


STAGES: dict[str, Callable[[Path], Iterator[Stage]]] = {
    "records": records, "declarations": declarations, "jobs": jobs,
}  # fmt: skip


def staged(base: Path, names: Sequence[str]) -> Iterator[Stage]:
    for name in names:
        yield from STAGES[name](base)
