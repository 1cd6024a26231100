"""Peers that may be absent, and how rows call those that are there."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence

from paperlm_kernels.bench.rows import version


class AbsentError(Exception):
    """A method cannot run here; the message says why."""


def label(name: str, package: str | None) -> str:
    """A method's name with the version of its package: `cut-cross-entropy exact` is `cut-cross-entropy 25.1.1 (exact)`.

    `name` begins with the name of the package, if it has one.
    """
    if package is None:
        return name
    variant = name.removeprefix(package).strip()
    return " ".join(filter(None, (package, version(package), variant and f"({variant})")))


def why_absent(
    device: str,
    *,
    package: str | None = None,
    modules: Sequence[str] = (),
    needs_gpu: bool = False,
    compiles: bool = False,
) -> str | None:
    """Why a method cannot run on `cpu` or `cuda`: its package, or one of the modules that it uses besides, is not
    installed, it needs a GPU, or torch.compile, which it uses, has no C++ compiler for a CPU. None if it can."""
    if needs_gpu and device != "cuda":
        return "needs a CUDA GPU"
    if package is not None and version(package) is None:
        return f"{package} is not installed"
    if missing := [module for module in modules if not _found(module)]:
        return f"{package} needs {' and '.join(missing)} besides, which cannot be imported: install it"
    if compiles and device == "cpu" and shutil.which(compiler := os.environ.get("CXX", "g++")) is None:
        return f"torch.compile needs a C++ compiler on a CPU, and there is no {compiler}: install g++, or set CXX"
    return None


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False
