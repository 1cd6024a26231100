"""Strict reading of YAML files into pydantic models, with errors that name file, place and nearest known key."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from paperlm.errors import SpecError, unknown

M = TypeVar("M", bound=BaseModel)


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice: the first value would be lost silently."""


def _mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is written twice", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_LOADER = _UniqueKeyLoader


def read_yaml(path: Path) -> Any:
    """Parsed content of a YAML file; SpecError if it is missing or no YAML."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)  # noqa: S506 - derives from SafeLoader
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{path}: not valid YAML: {error}") from None


def load(path: Path, model: type[M]) -> M:
    """The file as `model`; every problem in it is listed in one SpecError."""
    return parse(read_yaml(path), model, str(path))


def parse(value: Any, model: type[M], where: str) -> M:
    """`value` as `model`; `where` starts each line of the SpecError."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise SpecError("\n".join(_explain(e, model, where) for e in error.errors())) from None


def _explain(error: Any, model: type[BaseModel], where: str) -> str:
    location = [part for part in error["loc"] if not str(part).startswith(("function-", "tagged-"))]
    place = ".".join(str(part) for part in location)
    if error["type"] == "extra_forbidden":
        owner = _model_at(model, location[:-1])
        known = owner.model_fields if owner else ()
        parent = ".".join(str(part) for part in location[:-1])
        return f"{where}: {parent + ': ' if parent else ''}{unknown('key', str(location[-1]), known)}"
    if error["type"] == "missing":
        return f"{where}: {place} is missing: add it"
    message = error["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(error["input"], dict | list | BaseModel) else f", got {error['input']!r}"
    return f"{where}: {place + ': ' if place else ''}{message}{shown}"


def _model_at(model: type[BaseModel], location: list[Any]) -> type[BaseModel] | None:
    """The pydantic model that a validation error's location points into."""
    here: Any = model
    for part in location:
        if isinstance(here, type) and issubclass(here, BaseModel):
            field = here.model_fields.get(str(part))
            here = _plain(field.annotation) if field else None
        else:
            arguments = typing.get_args(here)
            here = _plain(arguments[-1]) if arguments else None
    here = _plain(here)
    return here if isinstance(here, type) and issubclass(here, BaseModel) else None


def _plain(annotation: Any) -> Any:
    """Strip Optional and Annotated."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        models = [a for a in typing.get_args(annotation) if a is not type(None)]
        return next((m for m in models if isinstance(m, type) and issubclass(m, BaseModel)), models[0])
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation
