"""Declarations of the repository with one thing changed, as tests of mistakes write them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from paperlm.checks import open_project
from paperlm.errors import SpecError
from paperlm.plan.project import ROOT

CLOADER, CDUMPER = getattr(yaml, "CSafeLoader", yaml.SafeLoader), getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@functools.cache
def declared(path: str) -> dict:
    return yaml.load((ROOT / path).read_text(encoding="utf-8"), Loader=CLOADER)  # noqa: S506


def write(root: Path, path: str, content: object) -> None:
    text = content if isinstance(content, str) else yaml.dump(content, Dumper=CDUMPER, sort_keys=False)
    (root / path).write_text(text, encoding="utf-8")


def edit(root: Path, path: str, change: Callable[[dict], object]) -> None:
    content = copy.deepcopy(declared(path))
    change(content)
    write(root, path, content)


def refused(root: Path, message: str, scale: str = "tiny") -> None:
    with pytest.raises(SpecError, match=message):
        open_project({"scale": scale}, root)


def renamed(mapping: dict, old: str, new: str) -> None:
    """The same mapping with another name for one of its keys, in its place."""
    items = [(new if key == old else key, value) for key, value in mapping.items()]
    mapping.clear()
    mapping.update(items)
