"""One environment: conda, package metadata and the lock name the same versions, and this interpreter runs them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import yaml
from support import job_environment

from paperlm.plan.project import ROOT


def pins(lines: list[str]) -> dict[str, str]:
    found = (re.fullmatch(r"([\w.-]+)==([\w.]+)", line.strip()) for line in lines)
    return {m[1].lower().replace("_", "-"): m[2] for m in found if m}


def test_conda_environment_package_metadata_and_lock_name_the_same_versions():
    lock = pins((ROOT / "requirements.lock").read_text().splitlines())
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = pins(next(d["pip"] for d in conda if isinstance(d, dict)))
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = metadata["optional-dependencies"]
    bounds = dict(re.split(">=", d) for d in [*metadata["dependencies"], *extras["tables"], *extras["dev"]])
    bounds = {name.lower(): tuple(map(int, version.split("."))) for name, version in bounds.items()}
    assert pip.keys() == bounds.keys()
    for name, version in pip.items():
        assert lock[name] == version, f"{name}: environment.yml and requirements.lock differ"
        assert tuple(int(p) for p in re.findall(r"\d+", version)) >= bounds[name], f"{name} is below pyproject's bound"
    card = {"torch", "triton", "snakemake", "datasets", "lm-eval", "trl", "pandas", "seaborn"}
    assert card <= pip.keys()


def test_the_lock_holds_exact_versions_and_nothing_else():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines) and len(lines) > 100


def test_this_interpreter_runs_the_locked_versions():
    import importlib.metadata

    lock = pins((ROOT / "requirements.lock").read_text().splitlines())
    for name in ("torch", "transformers", "snakemake", "datasets", "pydantic", "tokenizers"):
        assert importlib.metadata.version(name).partition("+")[0] == lock[name]


def test_the_folder_of_kernels_is_not_importable_as_a_package_inside_a_job(tmp_path):
    code = (
        "import importlib.util as u; s = u.find_spec('kernels'); print(list(s.submodule_search_locations) if s else [])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=job_environment(), cwd=ROOT, check=True
    )
    assert str(ROOT) not in out.stdout
