"""Helpers of the tests: runs at the smoke scale, and the environment of a job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paperlm.spec.project import ROOT, Project
from paperlm.spec.run import RunConfig


def smoke_run(**changes: object) -> RunConfig:
    """Mix-LN 71M at the smoke scale, with changes."""
    project = Project({"scale": "smoke"})
    cell = next(c for c in project.cells("mixln_table1") if (c.row, c.column) == ("Mix-LN", "LLaMA-71M"))
    return RunConfig.model_validate({**cell.runs[0].canonical(), **changes})


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
