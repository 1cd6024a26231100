"""Strict reading of YAML files into pydantic models, with errors that name file, place and nearest known key."""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from paperlm.errors import SpecError, unknown

M = TypeVar("M", bound=BaseModel)


MERGE = "tag:yaml.org,2002:merge"
"What `<<` as a key means to a YAML parser."
DEEPEST = 40
"Levels of nesting. Declarations have 9; a parser in C dies of some thousand."
LARGEST = 300_000
"Values with every alias (`*name`) written out: ten times what all declarations together have."
ALIKE = 3
"Lines of an error for one mistake in many places."


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """SafeLoader, in C where PyYAML has it, that refuses a key written twice, whose first value would be lost, and says
    where a value stands that is none of its type."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError):
            kind = node.tag.rpartition(":")[2]
            raise _refused(f"{str(node.value)[:60]!r} is no {kind}: put a word in quotes", node) from None


def _refused(what: str, place: yaml.Node | yaml.Event) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, what, place.start_mark)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == MERGE:
            what = "merge keys (<<:) are not read: write the keys out, or for a job of a paper `like: <another job>`"
            raise _refused(what, key_node)
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, list | dict | set):
            raise _refused("a list or a mapping is no key: write a word or a number", key_node)
        if key in seen:
            raise _refused(f"key {key!r} is written twice", key_node)
        seen.add(key)
    return yaml.constructor.SafeConstructor.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _check_size(text: str) -> None:
    """YAMLError for a text that is nested too deeply, or too large once its aliases are written out."""
    open_, sizes, anchors = [], [0], {}
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in open_:
                raise _refused(f"*{event.anchor} stands within itself: write out what is meant", event)
            sizes[-1] += anchors.get(event.anchor, 0)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_.append(event.anchor)
            sizes.append(1)
            if len(open_) > DEEPEST:
                raise _refused(f"nested more than {DEEPEST} deep", event)
        elif isinstance(event, yaml.CollectionEndEvent):
            size = sizes.pop()
            anchors[open_.pop()] = size
            sizes[-1] += size
        elif isinstance(event, yaml.ScalarEvent):
            anchors[event.anchor] = 1
            sizes[-1] += 1
        if sizes[-1] > LARGEST:
            raise _refused(f"more than {LARGEST:,} values, aliases written out: shorten it", event)


def parse_yaml(text: str) -> Any:
    """What a text in YAML says. ValueError in one line for what is none, and for what no hand wrote: nested thousands
    deep, or within itself."""
    try:
        _check_size(text)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - derives from SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from None


def read_yaml(path: Path) -> Any:
    """Parsed content of a YAML file; SpecError if it cannot be read, is not UTF-8 or no YAML."""
    return _parsed(_read(path), str(path))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise SpecError(f"{where}: {error}") from None


def load(path: Path, model: type[M]) -> M:
    """The file as `model`, which is frozen: the same object for the same content. Every problem in it is listed in one
    SpecError."""
    return _loaded(_read(path), model, str(path))


@functools.lru_cache(64)  # a process that tries other seeds, or all scales, reads the same files again
def _loaded(text: str, model: type[M], where: str) -> M:
    return parse(_parsed(text, where), model, where)


def parse(value: Any, model: type[M], where: str) -> M:
    """`value` as `model`; `where` starts each line of the SpecError.

    yes, no, true and false are refused where a number stands, which pydantic would read as 1 and 0.
    """
    try:
        found = model.model_validate(value)
    except ValidationError as error:
        raise SpecError(explained(error, model, where)) from None
    if places := list(_truth_values_as_numbers(value, found)):
        raise SpecError("\n".join(f"{where}: {place} is a truth value; give a number" for place in places))
    return found


def parse_part(value: Mapping[str, Any], model: type[BaseModel]) -> None:
    """ValueError for a key that `model` does not have and for a value that its field refuses.

    Fields that are left out are not missed, and what fields say together is not looked at.
    """
    try:
        model.model_validate(value)
    except ValidationError as error:
        found = [e for e in error.errors() if e["loc"] and e["loc"][0] in value]
        if found:
            raise ValueError("; ".join(_explain(e, model, "").removeprefix(": ") for e in found)) from None


def explained(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """Every problem that pydantic found, a line each: file, place, nearest known name.

    Of one that recurs, in every row or by a YAML anchor, the first few and how many more there are.
    """
    # A misspelt key first: it is also why another one is missing.
    found = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    alike: dict[Any, list[str]] = {}
    for one in found:
        *above, last = [part for part in one["loc"] if not str(part).startswith("function-")] or [""]
        owner, _ = _walk(model, above)  # None of a mapping or a list, all of whose values mean the same
        named = owner is not None or one["type"] in ("extra_forbidden", "missing")
        kind = one["type"], one["msg"], repr(one["input"]), (owner, last) if named else None
        alike.setdefault(kind, []).append(_explain(one, model, where))
    lines = []
    for said in alike.values():
        lines += said[:ALIKE]
        if more := said[ALIKE:]:
            lines.append(f"{where}: {len(more)} more like the last, to {more[-1].removeprefix(f'{where}: ')}")
    return "\n".join(lines)


def _truth_values_as_numbers(given: Any, found: Any, place: str = "") -> Iterator[str]:
    """Places where a number was made of True or False."""
    if isinstance(given, bool):
        if isinstance(found, int | float) and not isinstance(found, bool):
            yield place
    elif isinstance(given, dict):
        for key, value in given.items():
            if isinstance(value, (bool, dict, list, tuple)):  # by far the most are neither
                one = found.get(key) if isinstance(found, dict) else getattr(found, str(key), None)
                yield from _truth_values_as_numbers(value, one, f"{place}.{key}" if place else str(key))
    elif isinstance(given, list | tuple) and isinstance(found, list | tuple):
        for index, pair in enumerate(zip(given, found, strict=False)):
            yield from _truth_values_as_numbers(*pair, f"{place}.{index}")


def _explain(error: Any, model: type[BaseModel], where: str) -> str:
    location = [part for part in error["loc"] if not str(part).startswith("function-")]
    _, path = _walk(model, location)
    place = ".".join(path)
    if error["type"] == "extra_forbidden":
        owner, parents = _walk(model, location[:-1])
        known = owner.model_fields if owner else ()
        prefix = f"{'.'.join(parents)}: " if parents else ""
        return f"{where}: {prefix}{unknown('key', str(location[-1]), known)}"
    if error["type"] == "missing":
        return f"{where}: {place} is missing: add it"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type") and not place:
        return f"{where}: has to be a mapping, `key: value` on each line; it is {error['input']!r:.60}"
    if error["type"] == "union_tag_not_found":
        return f"{where}: {place}.kind is missing: add it"
    if error["type"] == "union_tag_invalid":
        known = [tag.strip("' ") for tag in error["ctx"]["expected_tags"].split(",")]
        return f"{where}: {place}.kind: {unknown('kind', error['ctx']['tag'], known)}"
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return f"{where}: {unknown(place, error['input'], choices)}"
    message = error["msg"].removeprefix("Value error, ")
    given = error["input"]
    shown = "" if isinstance(given, dict | list | BaseModel) or repr(given) in message else f", got {given!r:.80}"
    return f"{where}: {place + ': ' if place else ''}{message}{shown}"


def _walk(model: type[BaseModel], location: list[Any]) -> tuple[type[BaseModel] | None, list[str]]:
    """The pydantic model that a validation error's location points into, and the keys of the file that lead there.

    Inside a union of kinds pydantic puts the kind into the location, which is no key of the file.
    """
    here: Any = model
    path = []
    for part in location:
        here = _plain(here)
        kinds = _kinds(here)
        if part in kinds:
            here = kinds[part]
            continue
        if (
            here is not None
            and not typing.get_args(here)
            and not (isinstance(here, type) and issubclass(here, BaseModel))
        ):
            continue  # the branch of a union, such as int or literal['init']
        path.append(str(part))
        if isinstance(here, type) and issubclass(here, BaseModel):
            field = here.model_fields.get(str(part))
            here = field.annotation if field else None
        else:
            arguments = typing.get_args(here)
            here = arguments[-1] if arguments else None
    here = _plain(here)
    return (here if isinstance(here, type) and issubclass(here, BaseModel) else None), path


def _plain(annotation: Any) -> Any:
    """Strip Optional and Annotated."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain(typing.get_args(annotation)[0])
    if _is_union(annotation) and not _kinds(annotation):
        models = [a for a in typing.get_args(annotation) if a is not type(None)]
        return _plain(next((m for m in models if isinstance(m, type) and issubclass(m, BaseModel)), models[0]))
    return annotation


def _is_union(annotation: Any) -> bool:
    return isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union


def _kinds(annotation: Any) -> dict[str, type[BaseModel]]:
    """Members of a union of models by their `kind`; empty for anything else."""
    if not _is_union(annotation):
        return {}
    models = [m for m in typing.get_args(annotation) if isinstance(m, type) and issubclass(m, BaseModel)]
    return {typing.get_args(m.model_fields["kind"].annotation)[0]: m for m in models if "kind" in m.model_fields}
