"""Modules import downwards only, and what is read to plan or to show imports neither torch nor transformers."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import job_environment

from paperlm.plan.project import ROOT

SOURCE = ROOT / "src/paperlm"

# From the bottom. A module imports from lower layers and its own; those of `work` are imported by jobs when they run.
LAYERS = [
    {"errors", "files", "frozen", "kept", "load", "locks", "ranks", "result", "stopping"},
    {"norms", "quantizers", "models.sizes", "data", "cost"},
    {"jobs"},
    {"record"},
    {"work"},
    {"plan"},
    {"tables"},
    {"figures"},
    {"checks", "run", "watch", "results_page", "documents", "evidence", "bench", "tables.show"},
    {"cli", "__main__"},
]
WORK = {"models", "train", "evaluate", "finetune", "probe"}
LIGHT_WORK = {
    "train.gpu_lock",
    "probe.text",
    "evaluate.drawn",
    "evaluate.questions",
    "evaluate.tasks",
    "evaluate.stores",
    "finetune.settings",
    "finetune.examples",
}
"Of those, what kinds are declared with and the plan asks for cards; none of it imports torch, as the last test sees."


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> int:
    top = module.split(".")[0]
    for name in (module, top):
        for index, names in enumerate(LAYERS):
            if name in names:
                return index
    if top in WORK:
        return next(i for i, names in enumerate(LAYERS) if "work" in names)
    raise AssertionError(f"paperlm.{module} stands in no layer: put it into one")


def imported(tree: ast.AST, module: str, lazily: bool) -> Iterator[str]:
    """Modules of paperlm that are imported at the top; with `lazily`, those within functions as well."""
    waiting = list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazily:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "paperlm":
            base = node.module.removeprefix("paperlm").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                yield inner if (SOURCE / Path(*inner.split("."))).with_suffix(".py").is_file() else base or inner
        if isinstance(node, ast.Import):
            yield from (a.name.removeprefix("paperlm.") for a in node.names if a.name.startswith("paperlm."))


FILES = {name_of(path): path for path in sorted(SOURCE.rglob("*.py")) if name_of(path)}


@pytest.mark.parametrize("module", FILES)
def test_no_module_imports_upwards(module):
    tree = ast.parse(FILES[module].read_text())
    own = layer(module)
    for other in imported(tree, module, lazily=False):
        assert layer(other) <= own or other in LIGHT_WORK, (
            f"paperlm.{module} imports paperlm.{other}, which stands above it"
        )


@pytest.mark.parametrize(
    "module", [name for name in FILES if name.split(".")[0] in ("jobs", "plan", "tables", "record")]
)
def test_what_does_the_work_is_imported_when_a_job_runs(module):
    tree = ast.parse(FILES[module].read_text())
    at_the_top = {other for other in imported(tree, module, lazily=False) if other.split(".")[0] in WORK}
    assert at_the_top <= LIGHT_WORK | {"models.sizes"}


HEAVY = ("torch", "transformers", "datasets", "pandas", "matplotlib", "snakemake", "trl", "lm_eval")


@pytest.mark.parametrize(
    "code",
    [
        "from paperlm.checks import open_project; open_project({'scale': 'tiny'}).jobs",
        "from paperlm.plan.workflow import Workflow; from paperlm.plan.project import Project; "
        "w = Workflow(Project({'scale': 'smoke'})); [w.exhibit_digest(n) for n in w.project.exhibits]",
        "from paperlm.checks import open_project; from paperlm.tables.build import write_table; "
        "from pathlib import Path; import tempfile; out = Path(tempfile.mkdtemp()) / 'x.csv'; "
        "write_table(open_project({'scale': 'gpu'}), 'mixln_table7', [], out, out.parent)",
        "from paperlm.jobs import job_kinds; job_kinds()",
        "from paperlm.cli import main; main(['plan', 'mixln_table1', '--config', 'scale=smoke'])",
    ],
    ids=["project", "workflow", "table", "kinds", "verb"],
)
def test_planning_and_tables_load_without_torch_and_transformers(code):
    code = f"{code}\nimport sys; print([m for m in {HEAVY} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=job_environment(), cwd=ROOT)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip().splitlines()[-1] == "[]"
