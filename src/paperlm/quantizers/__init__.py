"""Quantizers of weights, activations and attention heads, one file each, found by scanning this folder.

To add one: a new file here with a frozen dataclass that derives from Quantizer and sets `name`, `source` and `role`. It
is then usable by its name in every model's `quantization`, and the parametrized tests pick it up. What stands where in
a model is scheme.py's, the models of BitNet's papers are presets.py's.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from typing import Any

from paperlm.errors import SpecError, unknown
from paperlm.quantizers.base import Quantizer, Role

__all__ = ["Quantizer", "Role", "build_quantizer", "quantizers"]


@functools.cache
def quantizers() -> dict[str, type[Quantizer]]:
    """Name -> class of every quantizer in this folder (and in folders appended to `paperlm.quantizers.__path__`)."""
    found: dict[str, type[Quantizer]] = {}
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == module.__name__ and issubclass(cls, Quantizer) and "name" in vars(cls):
                if cls.name in found:
                    raise SpecError(f"two quantizers are called {cls.name!r}: rename one of them in quantizers/")
                found[cls.name] = cls
    return found


def build_quantizer(description: object, role: Role, where: str) -> Quantizer:
    """The quantizer that a name, or `{name: ..., option: value, ...}`, describes. `where` begins the errors.

    Raises SpecError for an unknown name or option, an option's value that the quantizer refuses, and a quantizer of
    something else than `role`.
    """
    options = dict(description) if isinstance(description, dict) else {"name": description}
    name = options.pop("name", None)
    known = {key: cls for key, cls in quantizers().items() if cls.role == role}
    if not isinstance(name, str) or name not in known:
        elsewhere = quantizers().get(name) if isinstance(name, str) else None
        other = "" if elsewhere is None else f" ({name!r} quantizes {elsewhere.role})"
        raise SpecError(f"{where}: {unknown(f'quantizer of {role}', name, known)}{other}")
    fields = {field.name: field for field in dataclasses.fields(known[name])}
    for key in options:
        if key not in fields:
            raise SpecError(f"{where}: quantizer {name!r}: {unknown('option', key, fields)}")
    missing = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in options]
    if missing:
        raise SpecError(f"{where}: quantizer {name!r} needs {', '.join(missing)}")
    try:
        made = known[name](**options)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    if role != "heads" and made.zero:
        raise SpecError(f"{where}: quantizer {name!r} has {made.zero} for the code of zero, which products of whole "
                        "numbers cannot have; only quantizers of heads may")  # fmt: skip
    if role != "heads" and (made.limits[0] < -128 or made.limits[1] > 127):
        raise SpecError(f"{where}: quantizer {name!r} has codes from {made.limits[0]} to {made.limits[1]}; they have "
                        "to fit into 8 bits, -128 to 127")  # fmt: skip
    return made


def plain(quantizer: Quantizer | None) -> dict[str, Any] | None:
    """A quantizer as JSON."""
    return None if quantizer is None else quantizer.describe()
