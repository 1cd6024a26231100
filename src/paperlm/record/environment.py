"""Capture of machine, versions and commit."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paperlm.files import write_json
from paperlm.record.record import Environment

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "datasets", "trl", "lm_eval",
    "accelerate", "bitsandbytes",
)  # fmt: skip


class Code(NamedTuple):
    """What a job computes with: see `record.Environment`."""

    commit: str | None
    modified: bool | None
    source: str


def code() -> Code:
    """As it is now."""
    return Code(*_git(), source_digest())


CODE = "code.json"
"In a job's folder of work: with what it began."


def has_unfinished(work: Path) -> bool:
    """Whether something is kept there that a job goes on from, beside a model that is made anew."""
    return any(entry.name not in (CODE, "model") for entry in work.iterdir())


def begun_with(work: Path) -> Code:
    """As it is at the start of a job that works in this folder. Modified, if what is there already was made by other
    code: the job goes on from it."""
    now, path = code(), work / CODE
    if has_unfinished(work):
        try:
            before = json.loads(path.read_text(encoding="utf-8"))["source"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):  # damaged: nobody knows
            before = None
        if before == now.source:
            return now
        write_json(path, {"source": None})  # also where the first code comes back: it is of several
        return now._replace(modified=True)
    write_json(path, now._asdict())
    return now


def capture(device: torch.device, begun: Code | None = None) -> Environment:
    """Environment of this process, which computes on `device`. begun: the code at the start of its work; where it has
    changed since, nobody knows what of it was loaded before, and the record says `modified`."""
    import torch  # records are read without it

    now = code()
    commit, modified, source = begun or now
    on_gpu = device.type == "cuda"
    return Environment(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        commit=commit,
        modified=modified if source == now.source else True,
        source=source,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cpu=cpu_name(),
        device=torch.cuda.get_device_name() if on_gpu else "CPU",
        cuda=torch.version.cuda if on_gpu else None,
        threads=torch.get_num_threads(),
        packages={name: version for name in PACKAGES if (version := _version(name))},
    )


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
        # an installed package may lie within a repository of something else, whose commit says nothing about it
        run("ls-files", "--error-unmatch", Path(__file__).name)
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
