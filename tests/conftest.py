"""Shared fixtures."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from support import copy_declarations, job_environment, smoke_run
from support_jobs import write_kinds

from paperlm import jobs
from paperlm.data.prepare import prepare
from paperlm.plan.paper import PaperSpec
from paperlm.plan.project import ROOT, Project
from paperlm.record.places import Places

# On a machine with other work an example may take any time.
hypothesis.settings.register_profile("paperlm", deadline=None)
hypothesis.settings.load_profile("paperlm")


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared tokens of the smoke scale."""
    return prepare(smoke_run().token_data().model_dump(mode="json"), tmp_path_factory.mktemp("data"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root whose declarations can be edited, on which nothing has been made."""
    return copy_declarations(tmp_path)


@pytest.fixture
def prepared(tmp_path: Path, manifest: Path) -> Path:
    """A root with the prepared data of the smoke scale, and what a clone of the repository is known by."""
    shutil.copytree(ROOT / "workflow/scales", tmp_path / "workflow/scales")
    shutil.copytree(manifest.parent, (tmp_path / Places(tmp_path, "smoke").data(smoke_run().token_data())).parent)
    return tmp_path


@pytest.fixture(scope="session")
def project() -> Project:
    """What the repository declares, at the scale of the committed GPU records."""
    return Project({"scale": "gpu"})


@pytest.fixture(scope="module")
def tiny() -> Project:
    """The same at the default scale, a new one for each file."""
    return Project({"scale": "tiny"})


@pytest.fixture(scope="session")
def paper(project: Project) -> PaperSpec:
    """Cut Cross-Entropy as declared in workflow/papers/cce.yaml."""
    return project.papers["cce"]


@pytest.fixture
def toy_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of kinds of jobs beside the project's own."""
    folder = write_kinds(tmp_path / "kinds")
    monkeypatch.setattr(jobs, "__path__", [*jobs.__path__, str(folder)])
    jobs.job_kinds.cache_clear()
    yield folder
    for path in folder.glob("*.py"):
        sys.modules.pop(f"paperlm.jobs.{path.stem}", None)
    jobs.job_kinds.cache_clear()


@pytest.fixture
def paperlm() -> Callable[..., subprocess.CompletedProcess]:
    """Run `python -m paperlm ...` as a job would."""

    def call(*arguments: object, **options: object) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "paperlm", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=job_environment(), timeout=300, **options)

    return call


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allowed-skips", type=Path, help="fail if a test is skipped for a reason that is not in this file"
    )
    parser.addoption("--summary", type=Path, help="write what ran where, and how it ended, to this JSON file")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skip that nobody allowed is a hole: fail the run and name it."""
    path = session.config.getoption("--allowed-skips")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if path is None or reporter is None or hasattr(session.config, "workerinput"):
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    allowed = tuple(line for line in lines if line and not line.startswith("#"))
    for report in reporter.stats.get("skipped", []):
        reason = (
            report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)
        )
        if not reason.startswith(allowed):
            reporter.write_line(f"{report.nodeid}: skipped for a reason that {path} does not allow: {reason}", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, exitstatus: int, config: pytest.Config) -> None:
    path = config.getoption("--summary")
    if path is None or hasattr(config, "workerinput"):  # a worker of pytest-xdist knows its own share only
        return
    import datetime
    import json
    import platform

    import torch
    from paperlm_kernels.bench.rows import commit_id, cpu_name, version

    files: dict[str, Counter] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            # a skip while collecting has no test; setup and teardown have no "passed" here
            files.setdefault(report.nodeid.split("::")[0], Counter())[outcome] += 1
    total = sum(files.values(), Counter())
    record = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit_id(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "triton", "transformers", "pytest")},
        "selected": " and ".join(filter(None, map(config.getoption, ("keyword", "markexpr")))) or "all",
        "exit_status": int(exitstatus),
        "total": dict(total),
        "failures": sorted(report.nodeid for report in terminalreporter.stats.get("failed", [])),
        "files": {name: dict(counts) for name, counts in sorted(files.items())},
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
