"""Helpers of the tests: runs at the smoke scale, and the environment of a job."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paperlm.files import SUMS
from paperlm.jobs.pretrain import Pretrain
from paperlm.plan.project import ROOT, Project


def smoke_run(**changes: object) -> Pretrain:
    """Mix-LN 71M at the smoke scale, with changes."""
    project = Project({"scale": "smoke"})
    cell = next(c for c in project.cells("mixln_table1") if (c.row, c.column) == ("Mix-LN", "LLaMA-71M"))
    return Pretrain.model_validate({**cell.jobs[0].fields(), **changes})


def job_environment(**extra: str) -> dict[str, str]:
    """Environment of a job: the packages on the path, one thread, no network."""
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'kernels'}",
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        **extra,
    }


def made_with() -> dict[str, Any]:
    """What a survey says of the machine and of the versions that it was made with."""
    import torch

    from paperlm.record.environment import capture

    made = capture(torch.device("cpu"))
    return {name: getattr(made, name) for name in ("date", "source", "python", "platform", "cpu", "packages")}


def torch_of(made: Iterable[Mapping[str, Any]]) -> str:
    """With which PyTorch surveys were made, of what `made_with` said."""
    return f"PyTorch {' and '.join(sorted({one['packages']['torch'] for one in made}))}"


def copy_declarations(folder: Path) -> Path:
    """Paper and scale files, printed tables and the configuration, to be edited."""
    for name in ("workflow", "paper_tables/published"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "config.yaml", folder)
    (folder / "paper_tables/published" / SUMS).unlink()  # of what is edited there
    return folder


def copy_tracked(folder: Path) -> Path:
    """The files that a clone would have, uncommitted ones included."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def is_free(lock: Path) -> bool:
    """Whether no process holds the lock of a file."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
