"""Shared fixtures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from support import job_environment, smoke_run

from paperlm.data.prepare import prepare


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared tokens of the smoke scale."""
    return prepare(smoke_run().data_settings(), tmp_path_factory.mktemp("data"))


@pytest.fixture
def paperlm() -> Callable[..., subprocess.CompletedProcess]:
    """Run `python -m paperlm ...` as a job would."""

    def call(*arguments: object, **options: object) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "paperlm", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=job_environment(), timeout=300, **options)

    return call
