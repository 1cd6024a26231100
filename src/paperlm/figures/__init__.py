"""Figures, each with the CSV of its numbers. A kind of figure is one file here with `draw(project, name, records)`.

Files are found by scanning this folder; a file without `draw` is a helper. Importing them loads no plotting library.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable


@functools.cache
def figure_kinds() -> dict[str, Callable]:
    """Name of a file -> its function draw(project, name, records) -> Drawing."""
    found = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        module = importlib.import_module(f"{__name__}.{info.name}")
        if callable(getattr(module, "draw", None)):
            found[info.name] = module.draw
    return found
