"""Types of command-line arguments: what a verb cannot use is refused by the parser, in one sentence."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

Refused = argparse.ArgumentTypeError


def whole(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """A whole number of at least `least`, and at most `most`."""
    bounds = f" of {least} or more" if most is None else f" between {least} and {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise Refused(f"{text!r} is no whole number{bounds}") from None
        if value < least or (most is not None and value > most):
            raise Refused(f"{text!r} is no whole number{bounds}")
        return value

    return parse


def amount(unit: str, above_zero: bool = True) -> Callable[[str], float]:
    """A finite number of a unit, e.g. seconds, above 0 or at least 0."""
    bounds = "above 0" if above_zero else "of 0 or more"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (above_zero and value == 0):
            raise Refused(f"{text!r} is no number of {unit} {bounds}")
        return value

    return parse


def to_write(*endings: str) -> Callable[[str], Path]:
    """A file that can be written: with one of these endings if there are some, no folder, and below no file."""

    def parse(text: str) -> Path:
        path = Path(text)
        if endings and path.suffix not in endings:
            raise Refused(f"{text}: name a file that ends in {' or '.join(endings)}")
        if path.is_dir():
            example = path / f"result{endings[0] if endings else '.jsonl'}"
            raise Refused(f"{text} is a folder; name a file in it, e.g. {example}")
        _refuse_below_a_file(path)
        return path

    return parse


def to_read(text: str) -> Path:
    """A file that is there."""
    path = Path(text)
    if path.is_dir():
        raise Refused(f"{text} is a folder; name a file in it")
    if not path.is_file():
        raise Refused(f"{text}: {'no ordinary file' if path.exists() else 'no such file'}")
    return path


def folder(text: str) -> Path:
    """A folder that is there, or can be made."""
    path = Path(text)
    if path.is_file():
        raise Refused(f"{text} is a file; name a folder")
    _refuse_below_a_file(path)
    return path


def _refuse_below_a_file(path: Path) -> None:
    for parent in path.parents:
        if parent.is_file():
            raise Refused(f"{path}: {parent} is a file; name a folder in its place")


def json_object(text: str) -> dict[str, Any]:
    """An object of JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"not JSON: {error}; give an object as text, {{...}}, not the name of a file") from None
    if not isinstance(value, dict):
        raise Refused(f"no object of JSON ({{...}}): {text:.60}")
    return value
