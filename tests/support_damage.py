"""Damage to files, of every kind, and jobs that are begun, finished or stopped in folders that can be damaged."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Damage = Callable[[Path, Path], None]
"Of a file, and of the file of the same name of another job."


def cut(share: float) -> Damage:
    def damage(path: Path, other: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: min(int(share * len(content)), len(content) - 1)])

    return damage


def flip(seed: int) -> Damage:
    """One bit, drawn by the seed and the name, so that every file is hit elsewhere."""

    def damage(path: Path, other: Path) -> None:
        content = bytearray(path.read_bytes())
        bit = random.Random(f"{seed} {path.name}").randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)

    return damage


def whole(text: str) -> Damage:
    return lambda path, other: path.write_text(text)


def edit_numbers(change: Callable[[Any], Any]) -> Damage:
    """Valid JSON, or lines of it, with the number in its middle changed; another file gets a byte more."""

    def damage(path: Path, other: Path) -> None:
        try:
            values = [json.loads(line) for line in path.read_text().splitlines()]
        except ValueError:
            try:
                values = [json.loads(path.read_text())]
            except ValueError:
                path.write_bytes(path.read_bytes() + b"\0")
                return
        places = [place for value in values for place in numbers_in(value)]
        if not places:
            path.write_bytes(path.read_bytes() + b" {}")
            return
        holder, key = places[len(places) // 2]
        holder[key] = change(holder[key])
        path.write_text("".join(json.dumps(value) + "\n" for value in values))

    return damage


def numbers_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Where numbers stand in a JSON value: (dict or list, key)."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict | list):
            yield from numbers_in(item)
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield value, key


def remove(path: Path, other: Path) -> None:
    path.unlink()


def of_another_job(path: Path, other: Path) -> None:
    shutil.copyfile(other, path)


def link_to_another_job(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(other)


def dangling_link(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def folder(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


def pickled(path: Path, other: Path) -> None:
    """What `pickle.load` would run; a reader that does makes a file beside it."""
    touched = f"{path}.executed"
    path.write_bytes(b"cos\nsystem\n(S'touch \"" + touched.encode() + b"\"'\ntR.")


DAMAGES: dict[str, Damage] = {
    "emptied": whole(""),
    "cut to a third": cut(1 / 3),
    "cut by a byte": cut(1.0),
    **{f"bit {seed} flipped": flip(seed) for seed in range(4)},
    "a list": whole("[]\n"),
    "a number": whole("5\n"),
    "null": whole("null\n"),
    "an empty object": whole("{}\n"),
    "nested too deeply": whole("[" * 100_000),
    "not UTF-8": lambda path, other: path.write_bytes(b'{"a": "\xff"}'),
    "a number changed": edit_numbers(lambda value: value + 1),
    "NaN for a number": edit_numbers(lambda value: float("nan")),
    "a word for a number": edit_numbers(lambda value: "many"),
    "removed": remove,
    "of another job": of_another_job,
    "a link to another job's": link_to_another_job,
    "a link to nothing": dangling_link,
    "a folder": folder,
    "a pickle": pickled,
}
