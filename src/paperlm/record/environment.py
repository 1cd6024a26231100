"""Capture of machine, versions and commit."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from paperlm.record.record import Environment

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "datasets", "trl", "lm_eval",
    "accelerate", "bitsandbytes",
)  # fmt: skip


def capture(device: torch.device) -> Environment:
    """Environment of this process, which computes on `device`."""
    import torch  # records are read without it

    commit, modified = _git()
    on_gpu = device.type == "cuda"
    return Environment(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        commit=commit,
        modified=modified,
        source=source_digest(),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cpu=cpu_name(),
        device=torch.cuda.get_device_name() if on_gpu else "CPU",
        cuda=torch.version.cuda if on_gpu else None,
        threads=torch.get_num_threads(),
        packages={name: version for name in PACKAGES if (version := _version(name))},
    )


@functools.cache
def source_digest() -> str:
    """Digest of every module of both packages: what a commit alone does not say of a copy without history."""
    found = hashlib.sha256()
    for package in ("paperlm", "paperlm_kernels"):
        spec = importlib.util.find_spec(package)
        folder = Path(spec.submodule_search_locations[0]) if spec else None
        for path in sorted(folder.rglob("*.py")) if folder else ():
            found.update(f"{package}/{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def commit_id() -> str | None:
    """The environment variable PAPERLM_COMMIT, for copies of the source without history, else the current commit."""
    return _git()[0]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> tuple[str | None, bool | None]:
    if stated := os.environ.get("PAPERLM_COMMIT"):
        return stated, None
    folder = Path(__file__).parent
    try:
        run = lambda *args: subprocess.run(  # noqa: E731
            ["git", *args], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        return run("rev-parse", "HEAD"), bool(run("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


@functools.cache
def cpu_name() -> str:
    """Model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
