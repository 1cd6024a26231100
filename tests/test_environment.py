"""One environment: conda, package metadata and the lock name the same versions, and this interpreter runs them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from support import job_environment

from paperlm.plan.project import ROOT
from paperlm.record import environment

LOCKS = ("requirements.lock", "requirements-torch.lock")


def pins(lines: list[str]) -> dict[str, str]:
    found = (re.match(r"([\w.-]+)==([\w.]+)", line) for line in lines)
    return {m[1].lower().replace("_", "-"): m[2] for m in found if m}


def locked() -> dict[str, str]:
    """Versions of both locks."""
    return pins([line for name in LOCKS for line in (ROOT / name).read_text().splitlines()])


def test_conda_environment_package_metadata_and_lock_name_the_same_versions():
    lock = locked()
    pip = pins(next(d["pip"] for d in conda_lines() if isinstance(d, dict)))
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = metadata["optional-dependencies"]
    bounds = dict(re.split(">=", d) for d in [*metadata["dependencies"], *extras["tables"], *extras["dev"]])
    bounds = {name.lower(): Version(version) for name, version in bounds.items()}
    assert pip.keys() == bounds.keys()
    for name, version in pip.items():
        assert lock[name] == version, f"{name}: environment.yml and the lock differ"
        assert Version(version) >= bounds[name], f"{name} is below pyproject's bound"
    card = {"torch", "triton", "snakemake", "datasets", "lm-eval", "trl", "pandas", "seaborn"}
    assert card <= pip.keys()


def test_the_oldest_torch_and_triton_that_the_metadata_allow_are_those_of_the_records_of_scale_gpu():
    """Bounds are versions that were run: these two on a card, which no test of the oldest versions has."""
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = dict(re.split(">=", d) for d in [*metadata["dependencies"], *metadata["optional-dependencies"]["tables"]])
    for name in ("torch", "triton"):
        found = {
            Version(json.loads(path.read_text())["environment"]["packages"][name]).release
            for path in (ROOT / "paper_tables/records/gpu/pretrain").glob("*.json")
        }
        assert min(found)[:2] == Version(bounds[name]).release


def conda_lines() -> list:
    return yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]


RELATION = r"(==?|!=|>=|<=|>|<|~=)"
VERSION = r"[0-9][0-9a-z_.!+]*(\.\*)?"
CONDA = re.compile(
    rf"(?P<name>[a-z0-9_][a-z0-9_.-]*)((\ *{RELATION}\ *|\ +)(?P<version>{VERSION})"
    rf"([,|]{RELATION}{VERSION})*)?(=(?P<build>[a-z0-9_*]+))?"
)
"A match specification of conda in its short form, `name relation version=build`; one `=` is a prefix, 3.11 any 3.11.x."


@pytest.mark.parametrize(
    ("line", "name", "version"),
    [
        ("python=3.11", "python", "3.11"),
        ("make", "make", None),
        ("numpy==2.4.6", "numpy", "2.4.6"),
        ("numpy >=1.8,<2", "numpy", "1.8"),
        ("numpy=1.11.1=py36_0", "numpy", "1.11.1"),
        ("numpy 1.8", "numpy", "1.8"),
        ("python=>3.11", None, None),
        ("python = = 3.11", None, None),
        ("python=", None, None),
    ],
)
def test_a_match_specification_of_conda_is_told_from_what_is_none(line, name, version):
    found = CONDA.fullmatch(line)
    assert (found and found["name"], found and found["version"]) == (name, version)


def test_each_line_of_the_conda_environment_parses():
    lines = conda_lines()
    conda = [line for line in lines if isinstance(line, str)]
    assert {CONDA.fullmatch(line)["name"] for line in conda} == {"python", "pip", "make"}
    (pip,) = [line["pip"] for line in lines if isinstance(line, dict)]
    for line in pip:
        requirement = Requirement(line)
        assert str(requirement.specifier).startswith("==") and not requirement.url


def test_conda_creates_a_python_that_the_metadata_allow():
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    (python,) = [line for line in conda_lines() if isinstance(line, str) and line.startswith("python")]
    assert SpecifierSet(required).contains(CONDA.fullmatch(python)["version"])


def test_all_that_is_locked_but_torch_has_sums_and_nothing_else_stands_there():
    text = (ROOT / "requirements.lock").read_text()
    entries = [re.sub(r" \\\n +", " ", e) for e in re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]]
    assert len(entries) > 100 and len(pins(entries)) == len(entries)
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==[\w.]+( --hash=sha256:[0-9a-f]{64})+", entry.strip()), entry[:80]
    rest = (ROOT / "requirements-torch.lock").read_text().splitlines()
    assert [line for line in rest if not line.startswith("#")] == [f"torch=={locked()['torch']}"]
    assert "torch" not in pins(entries) and not [name for name in pins(entries) if name.startswith("nvidia")]


def test_the_lock_holds_all_that_its_packages_ask_for():
    """Of every package of the lock that is installed here, what it asks for on this machine fits the lock."""
    lock = locked()
    for name in lock:
        for line in importlib.metadata.requires(name) or []:
            asked = Requirement(line)
            if asked.marker and not asked.marker.evaluate({"extra": ""}):
                continue
            other = asked.name.lower().replace("_", "-").replace(".", "-")
            if name == "torch" and other not in lock:
                continue  # its CUDA parts
            assert other in lock, f"{name} asks for {other}, which is not locked"
            assert asked.specifier.contains(lock[other], prereleases=True), f"{name} asks for {line}"


@pytest.mark.parametrize(
    ("tool", "line", "says"),
    [
        (["-m", "pip"], r"python -m pip install (.*) -r requirements.lock$", "DO NOT MATCH THE HASHES"),
        (["-m", "uv", "pip"], r"uv pip install --quiet --python \S+ (.*) -r requirements.lock", "Hash mismatch for"),
    ],
)
def test_a_file_with_another_sum_is_not_installed(tmp_path, tool, line, says):
    """What `make setup` calls, with a wheel made here: the lock's form turns the sums on for all."""
    wheel = tmp_path / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("small.py", "")
        file.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n")
        file.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("small-1.0.dist-info/RECORD", "")
    makefile = (ROOT / "Makefile").read_text()
    options = re.search(line, makefile, re.MULTILINE)[1].split()

    def install(total: str) -> subprocess.CompletedProcess:
        lock = tmp_path / "requirements.lock"
        lock.write_text(f"small==1.0 \\\n    --hash=sha256:{total}\n")
        command = [sys.executable, *tool, "install", *options, "--no-index", "--find-links", str(tmp_path)]
        target = ["--target", str(tmp_path / total), "-r", str(lock)]
        return subprocess.run([*command, *target], capture_output=True, text=True)

    total = hashlib.sha256(wheel.read_bytes()).hexdigest()
    right, wrong = install(total), install("0" * 64)
    assert right.returncode == 0, right.stderr
    assert wrong.returncode and says in wrong.stderr


def test_this_interpreter_runs_the_locked_versions():
    lock = locked()
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


def test_the_commit_of_a_repository_that_does_not_have_the_package_is_not_taken_for_its_own(tmp_path, monkeypatch):
    """An installed package often lies in a virtual environment within somebody's repository."""
    monkeypatch.delenv("PAPERLM_COMMIT", raising=False)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *words], check=True)
    installed = tmp_path / "environment.py"
    installed.touch()
    monkeypatch.setattr(environment, "__file__", str(installed))
    assert environment.code()[:2] == (None, None)
    for words in (["add", "environment.py"], ["commit", "-q", "-m", "it is its own"]):
        subprocess.run([*git, *words], check=True)
    commit, modified, _ = environment.code()
    assert len(commit) == 40 and modified is False
