"""What random damage is tried on: folders of files, the command that reads them, and what comes out of it."""

from __future__ import annotations

import contextlib
import csv
import functools
import hashlib
import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import copy_declarations
from support_fuzz import OPEN, Stage, command, in_folder

from paperlm import checks
from paperlm.checks import PUBLISHED
from paperlm.files import SUMS, write_sealed
from paperlm.plan import project as project_module
from paperlm.plan.project import ROOT, Project
from paperlm.plan.workflow import Workflow
from paperlm.record import calibration
from paperlm.record.environment import cpu_name
from paperlm.record.places import BENCH


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- tables and figures --

EXHIBITS = ("mixln_table5", "mixln_table8", "lns_table4", "mixln_figure3cd", "mixln_table1", "mixln_figure5")
"Built from committed records of every kind, in this order: a record is damaged under the first that reads it."


@functools.cache
def inputs_of(project: Project, name: str) -> list[str]:
    """Files that an exhibit is built from where nothing was damaged."""
    return Workflow(project).inputs(name)


def exhibit(folder: Path, project: Project, name: str) -> dict[str, Any]:
    """Build a table or a figure of records at hand, as its rule does. Gives its numbers."""
    asked = inputs_of(project, name)
    in_folder(folder, project)
    inputs = [path for path in asked if project.places.is_file(path)]
    verb, suffix = ("table", "csv") if name in project.tables else ("figure", "svg")
    out = folder / f"out/{name}.{suffix}"
    config = ["--config", f"scale={project.scale.scale}", "--config", "run_missing=no"]
    command(verb, name, "--out", str(out), *config, "--records", *inputs)
    found = {"files": {p.name: digest(p) for p in sorted(out.parent.glob("*.csv"))}}
    diff = out.with_name(f"{name}.diff.csv")
    with diff.open(encoding="utf-8") if diff.is_file() else contextlib.nullcontext([]) as file:
        found["cells"] = [[r["row"], r["column"], r["published"], r["regenerated"]] for r in csv.DictReader(file)]
    return found


def only_not_run(found: Any, expected: Any, damaged: Path, whole: Path) -> str:
    """`not run` where that is all that differs from the cells that were expected."""
    same = len(found["cells"]) == len(expected["cells"])
    pairs = list(zip(found["cells"], expected["cells"], strict=True)) if same else []
    told = [one[:3] == other[:3] and (one[3] == other[3] or one[3] in ("not run", "")) for one, other in pairs]
    return "not run" if told and all(told) else ""


def rows_left(found: Any, expected: Any, damaged: Path, whole: Path) -> str:
    """`rows left` where every line of the damaged file is one of those that were measured."""
    if damaged.is_file() and {*damaged.read_bytes().splitlines()} <= {*whole.read_bytes().splitlines(), b""}:
        return "rows left"
    return only_not_run(found, expected, damaged, whole)


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
    for name in EXHIBITS:
        for path in inputs_of(project, name):
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


def measurements(base: Path) -> Iterator[Stage]:
    """Committed rows of measurements: the tables and figures of them, or what `bench show` prints."""
    root = clone(base / "measurements")
    project = OPEN({"scale": "gpu", "run_missing": "no"}, root)
    built = {"cross_entropy": "cce_table1", "neuzip": "neuzip_throughput", "descent": "neuzip_table1_full"}
    names = [f"paper_tables/records/bench/{path.name}" for path in sorted((ROOT / BENCH).glob("*.jsonl"))]

    def run(folder: Path, name: str) -> Any:
        if (made := built.get(Path(name).stem)) is not None:
            return exhibit(folder, project, made)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            command("bench", "show", name)
        return {"cells": [], "shown": said.getvalue()}

    def other(name: str) -> Path:
        """What is shown is what a file says, of whatever operation; a table asks for its own."""
        return root / (names[(names.index(name) + 1) % len(names)] if Path(name).stem in built else name)

    yield Stage("measurements", root, names, run, other, 1.0, allowed=rows_left, reader=str)


def printed(base: Path) -> Iterator[Stage]:
    """Transcribed tables and the list of their checksums: the check of every declaration, and a table."""
    root = clone(base / "printed")
    shutil.copy(ROOT / PUBLISHED / SUMS, root / PUBLISHED)
    project = OPEN({"scale": "gpu", "run_missing": "no"}, root)
    reader = {
        table.published: name for name, (_, table) in project.tables.items() if table.kind in ("jobs", "measurements")
    }
    names = sorted(path for path in reader if path)

    def run(folder: Path, name: str) -> Any:
        return exhibit(folder, project, reader.get(name, "mixln_table1"))

    def other(name: str) -> Path:
        return root / (names[(names.index(name) + 1) % len(names)] if name in names else "config.yaml")

    sums = f"{PUBLISHED}/{SUMS}"
    yield Stage("printed", root, [*names, sums, sums], run, other, 0.7, reader=lambda name: reader.get(name, ""))


def estimates(base: Path) -> Iterator[Stage]:
    """Costs of the reference and the speed of this machine: how long a plan says that it takes."""
    root = clone(base / "estimates")
    costs, speed = "docs/reference/tiny/costs.json", "results/calibration.json"
    (root / costs).parent.mkdir(parents=True)
    shutil.copy(ROOT / costs, root / costs)
    machine = json.loads((ROOT / costs).read_text())["machine"] | {"cpu": cpu_name()}
    write_sealed(root / speed, calibration.WHAT, machine)
    project = OPEN({"scale": "tiny"}, root)

    def run(folder: Path, name: str) -> Any:
        in_folder(folder, project)
        calibration.step_seconds = lambda: machine["step_seconds"]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            command("plan")
        return said.getvalue()

    def allowed(found: str, expected: str, damaged: Path, whole: Path) -> str:
        """Without the reference's costs nothing says how long a job takes, and no time is named."""
        silent = "no record says" in found and not re.search(r"[\d.]+ minutes|\d\.\d", found)
        return "not run" if silent and not damaged.exists() else ""

    yield Stage("estimates", root, [costs, speed], run, lambda name: root / "config.yaml", 0.3, allowed=allowed)


def packed(base: Path) -> Iterator[Stage]:
    """A safetensors file, the same packed, and a checkpoint with packed weights: unpacked and read."""
    import torch
    from paperlm_kernels.neuzip import files
    from paperlm_kernels.stored import convert
    from paperlm_kernels.stored.files import read_packed, save_packed
    from paperlm_kernels.stored.stores import PackedStore
    from safetensors.torch import save_file

    root = base / "packed"
    root.mkdir()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)).bfloat16()
    save_file(dict(model.state_dict()), root / "model.safetensors")
    files.pack_file(root / "model.safetensors", root / "model.nzm")
    convert(model, PackedStore)
    save_packed(model, root / "packed.safetensors")

    def run(folder: Path, name: str) -> Any:
        from paperlm_kernels.neuzip.__main__ import main

        if name == "packed.safetensors":
            try:
                return {
                    key: hashlib.sha256(t.view(torch.uint8).numpy()).hexdigest()
                    for key, t in read_packed(folder / name)
                }
            except (ValueError, OSError) as error:  # what the function promises
                print(f"error: {error}", file=sys.stderr)
                raise SystemExit(2) from None
        if status := main(["unpack", name, "-o", "again.safetensors"]):
            raise SystemExit(status)
        return digest(folder / "again.safetensors")

    yield Stage("packed", root, ["model.nzm", "packed.safetensors"], run, lambda name: root / name, 0.7, reader=str)


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


def jobs(base: Path) -> Iterator[Stage]:
    """Jobs that were stopped, and jobs on models."""
    from support_fuzz_jobs import jobs

    return jobs(base)


def local(base: Path) -> Iterator[Stage]:
    """Files of a local folder."""
    from support_fuzz_jobs import local

    return local(base)


def kinds(base: Path) -> Iterator[Stage]:
    """Small jobs of other kinds."""
    from support_fuzz_jobs import kinds

    return kinds(base)


STAGES = {
    "records": (records, 14), "measurements": (measurements, 14), "printed": (printed, 13), "estimates": (estimates, 4),
    "declarations": (declarations, 14), "packed": (packed, 12), "local": (local, 11), "jobs": (jobs, 15),
    "kinds": (kinds, 3),
}  # fmt: skip
"Group -> how its stages are laid out, and how often it is drawn."
