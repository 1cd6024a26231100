"""Normalization methods, one file each, found by scanning this folder.

To add one: a new file here with a frozen dataclass that derives from NormMethod and sets `name` and `source`.
It is then usable as `norm: {name: <name>}` in every paper file, and the parametrized tests pick it up.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any

from paperlm.errors import SpecError, unknown
from paperlm.norms.base import ModelShape, NormMethod, Wiring, WrappedMethod

__all__ = ["ModelShape", "NormMethod", "Wiring", "WrappedMethod", "build_method", "norm_methods"]


@functools.cache
def norm_methods() -> dict[str, type[NormMethod]]:
    """Name -> class of every method in this folder (and in folders appended to `paperlm.norms.__path__`)."""
    found: dict[str, type[NormMethod]] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        if info.name == "base":
            continue
        module = importlib.import_module(f"{__name__}.{info.name}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == module.__name__ and issubclass(cls, NormMethod) and "name" in vars(cls):
                if cls.name in found:
                    raise SpecError(f"two norm methods are called {cls.name!r}: rename one of them in norms/")
                found[cls.name] = cls
    return found


def known_options(method: object, options: Iterable[str]) -> type[NormMethod]:
    """The class of a method, which has these options. Raises SpecError with the nearest name."""
    methods = norm_methods()
    if not isinstance(method, str) or method not in methods:
        raise SpecError(unknown("norm method", method, methods))
    fields = {field.name for field in dataclasses.fields(methods[method])}
    for key in options:
        if key not in fields:
            raise SpecError(f"norm method {method!r}: " + unknown("option", key, fields))
    return methods[method]


def needed_options(method: object, given: Iterable[str]) -> set[str]:
    """Options without a default that are not among those given. Raises SpecError as `known_options`."""
    given = set(given)
    fields = dataclasses.fields(known_options(method, given))
    return {field.name for field in fields if field.default is dataclasses.MISSING} - given


def build_method(description: Mapping[str, Any]) -> NormMethod:
    """The method that `{name: ..., option: value, ...}` describes; `base` may be such a mapping itself.

    Raises SpecError for an unknown method or option and for option values the method refuses.
    """
    if not isinstance(description, Mapping) or "name" not in description:
        raise SpecError(f"a norm is written as {{name: <method>, ...}}, got {description!r}")
    options = {k: v for k, v in description.items() if k != "name"}
    cls = known_options(description["name"], options)
    if needed := needed_options(cls.name, options):
        raise SpecError(f"norm method {cls.name!r} needs {', '.join(sorted(needed))}: add it to the paper file")
    if "base" in options:
        options["base"] = build_method(options["base"])
    return cls(**options)
