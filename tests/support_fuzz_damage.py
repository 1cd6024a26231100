"""Random damage to a file, and random edits that leave JSON and YAML valid, each drawn from a seed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

PAGE = 4096
"Bytes that a disk loses at a time."

Harm = Callable[[random.Random, Path, Path], None]
"Of a file, and of the file of the same place of another job (itself, where there is no other)."


def flip_bits(rng: random.Random, path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 2, 8, 64)) if content else 0):
        bit = rng.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def change_digit(rng: random.Random, path: Path, other: Path) -> None:
    """One digit is another one: what a bit does to a text without making it less of one."""
    content = bytearray(path.read_bytes())
    if places := [index for index, byte in enumerate(content) if chr(byte).isdecimal() and byte < 128]:
        place = rng.choice(places)
        content[place] = ord(rng.choice("0123456789".replace(chr(content[place]), "")))
    path.write_bytes(content)


def truncate(rng: random.Random, path: Path, other: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content) or 1)])


def zero_page(rng: random.Random, path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content) // PAGE + 1) * PAGE
    if rng.random() < 0.5 and content:
        start = rng.randrange(len(content))
    end = min(start + PAGE, len(content))
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


def _lines(change: Callable[[random.Random, list[bytes]], None]) -> Harm:
    def harm(rng: random.Random, path: Path, other: Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True) or [b""]
        change(rng, lines)
        path.write_bytes(b"".join(lines))

    return harm


@_lines
def duplicate_line(rng: random.Random, lines: list[bytes]) -> None:
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))


@_lines
def drop_line(rng: random.Random, lines: list[bytes]) -> None:
    del lines[rng.randrange(len(lines))]


@_lines
def swap_lines(rng: random.Random, lines: list[bytes]) -> None:
    one, two = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[two] = lines[two], lines[one]


GARBAGE = (b"\0", b"\xff\xfe\x00", b"}", b"\n\n\n", b'{"a": 1}\n', b"0", b" ", b"cos\nsystem\n(S'true'\ntR.")


def append_garbage(rng: random.Random, path: Path, other: Path) -> None:
    more = rng.choice((*GARBAGE, rng.randbytes(rng.randrange(1, 200))))
    path.write_bytes(path.read_bytes() + more)


def of_another(rng: random.Random, path: Path, other: Path) -> None:
    shutil.copyfile(other, path)


def empty(rng: random.Random, path: Path, other: Path) -> None:
    path.write_bytes(b"")


def remove(rng: random.Random, path: Path, other: Path) -> None:
    path.unlink()


def a_folder(rng: random.Random, path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()
    if rng.random() < 0.5:
        (path / "file").write_text("a")


def a_link(rng: random.Random, path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(rng.choice((str(other), "nowhere", path.name)))


def pickled(rng: random.Random, path: Path, other: Path) -> None:
    """What `pickle.load` would run; a reader that does makes a file beside it."""
    path.write_bytes(b"cos\nsystem\n(S'touch \"" + f"{path}.executed".encode() + b"\"'\ntR.")


# -- edits that leave a value of JSON or YAML --

Value = Any


def places_in(value: Value) -> Iterator[tuple[Any, Any]]:
    """(dict or list, key) of everything in a value."""
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(item, dict | list):
            yield from places_in(item)


ODD: tuple[Value, ...] = (
    0, -1, 1e308, -1e308, float("inf"), float("nan"), 10**400, 2**63, True, False, None, "", "0", "1e3", "x" * 5000,
    "../../etc", "a\0b", "\ud800", [], {}, [[]], {"": None}, [None], 0.1, 1e-320, "nan", "end", "init", [1, 2],
)  # fmt: skip
"Numbers that no setting or measurement is, values of other types, words that are none."


def another(rng: random.Random, value: Value) -> Value:
    """What a hand could put in the place of a value."""
    if isinstance(value, bool):
        return rng.choice((not value, *ODD))
    if isinstance(value, int | float) and rng.random() < 0.6:
        return rng.choice((value + 1, -value, value * 10, value * 2, value / 3, str(value), [value]))
    if isinstance(value, str) and value and rng.random() < 0.6:
        at = rng.randrange(len(value))
        return rng.choice((value[:at] + value[at + 1 :], value[:at] + "x" + value[at:], value.upper(), [value]))
    if isinstance(value, dict | list) and rng.random() < 0.4:
        return rng.choice((list(value), str(value)[:50], len(value), {"a": value}, [value]))
    return rng.choice(ODD)


def edit(rng: random.Random, value: Value) -> Value:
    """The value with one edit: a key lost, misspelt or invented, an item lost, twice or elsewhere, another value."""
    places = list(places_in(value)) if isinstance(value, dict | list) else []
    if not places:
        return another(rng, value)
    holder, key = rng.choice(places)
    how = rng.choice(("another", "another", "another", "lose", "rename", "add", "swap", "nest"))
    if how == "another":
        holder[key] = another(rng, holder[key])
    elif how == "lose":
        del holder[key]
    elif how == "rename" and isinstance(holder, dict):
        moved = holder.pop(key)
        holder[str(key)[:-1] or "x" if rng.random() < 0.5 else f"{key}x"] = moved
    elif how == "add":
        if isinstance(holder, dict):
            holder[rng.choice(("x", f"{key}_", "seed", "value", ""))] = rng.choice((*ODD, holder[key]))
        else:
            holder.insert(key, holder[key])
    elif how == "swap":
        there, name = rng.choice(places)
        if name in there if isinstance(there, dict) else name < len(there):
            one, two = holder[key], there[name]
            holder[key], there[name] = two if two is not holder else 0, one if one is not there else 0
    else:
        deep = holder[key]
        for _ in range(rng.choice((1, 3, 60, 5000))):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        holder[key] = deep
    return value


def nested(value: Value, brackets: str = "[]") -> str:
    """JSON of a value of any depth, which the library's own writer refuses."""
    try:
        return json.dumps(value)
    except RecursionError:
        return f"{brackets[0] * 100_000}{brackets[1] * 100_000}"
    except ValueError:  # it holds itself
        return "null"


def edit_json(rng: random.Random, path: Path, other: Path) -> None:
    """One edit of a JSON file or of one of its lines; of any other file a changed digit."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        value = json.loads(text)
    except ValueError:
        lines = text.splitlines()
        at = rng.randrange(len(lines) or 1)
        try:
            lines[at] = nested(edit(rng, json.loads(lines[at])))
        except (ValueError, IndexError):
            return change_digit(rng, path, other)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", errors="surrogatepass")
        return None
    path.write_text(nested(edit(rng, value)), encoding="utf-8", errors="surrogatepass")
    return None


def edit_yaml(rng: random.Random, path: Path, other: Path) -> None:
    """One to three edits of what a YAML file says."""
    value = yaml.safe_load(path.read_text(encoding="utf-8"))
    text = ""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = edit(rng, value)
        try:
            text = yaml.dump(value, Dumper=NoNames, sort_keys=False, allow_unicode=True)
        except (RecursionError, ValueError):  # too deep, or within itself
            text = nested(value)
            break
    path.write_text(text, encoding="utf-8", errors="surrogatepass")


class NoNames(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):
    """Writes what stands twice twice, as a hand would, in place of a name for it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'x'}]\n" for n in range(12))
HAND: tuple[str, ...] = (
    "x: &x [*x]\n", "x: &x {a: *x}\n", BOMB, "x: " + "[" * 3000 + "]" * 3000 + "\n", "<<: {a: 1}\n", "? [a]\n: 1\n",
    "x: !!python/object/apply:os.system [true]\n", "\tx: 1\n", "x: |\n", "- 1\n", "---\n", "...\n", "x: 1\nx: 2\n",
    "x: 2026-13-45\n", "x: 0x\n", "x: 1:61:61\n", "%YAML 9.9\n", "x: *nobody\n", "{" * 2000 + "\n", "'\n", '"\\x',
    "? " * 3000 + "\n", "- " * 3000 + "\n", "x: !!binary '='\n", "x: !!timestamp x\n", "x: !!float x\n",
    "x: !!int 'a'\n", "x: 2001-02-30\n",
)  # fmt: skip
"Lines that a hand or a page of the web could put into a YAML file."


SIGNS = (":", " ", "#", "x", "'", "&a ", "*a", "[", "}", "-", "!", "0", ".")


def edit_yaml_text(rng: random.Random, path: Path, other: Path) -> None:
    """A line of a YAML file indented, doubled, dropped, moved, misspelt, or one put in that says what it should not."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) or ["\n"]
    at = rng.randrange(len(lines))
    match rng.randrange(8):
        case 0:
            lines[at] = "  " + lines[at]
        case 1:
            lines[at] = lines[at].removeprefix(" " * rng.randrange(1, 5))
        case 2:
            lines.insert(at, lines[at])
        case 3:
            del lines[at]
        case 4:
            lines.append(lines.pop(at))
        case 5:
            place = rng.randrange(len(lines[at]))
            lines[at] = (
                lines[at][:place]
                + rng.choice((":", " ", "#", "x", "'", "&a ", "*a", "[", "}", "-", "!"))
                + lines[at][place:]
            )
        case 6:
            lines.insert(at, rng.choice(HAND))
        case _:
            indent = len(lines[at]) - len(lines[at].lstrip(" "))
            lines.insert(at, " " * indent + rng.choice(HAND))
    path.write_text("".join(lines), encoding="utf-8")


OF_BYTES: dict[str, Harm] = {
    "bits flipped": flip_bits, "digit changed": change_digit, "truncated": truncate, "page zeroed": zero_page,
    "line doubled": duplicate_line, "line dropped": drop_line, "lines swapped": swap_lines,
    "garbage appended": append_garbage, "of another job": of_another, "emptied": empty, "removed": remove,
    "a folder": a_folder, "a link": a_link, "a pickle": pickled,
}  # fmt: skip
OF_JSON: dict[str, Harm] = {"JSON edited": edit_json}
OF_YAML: dict[str, Harm] = {"YAML edited": edit_yaml, "YAML line edited": edit_yaml_text}


def drawn(rng: random.Random, path: Path) -> str:
    """The name of a damage for a file, edits of JSON and YAML as often as all others together."""
    edits = {".json": OF_JSON, ".jsonl": OF_JSON, ".yaml": OF_YAML}.get(path.suffix, {})
    return rng.choice([*edits]) if edits and rng.random() < 0.5 else rng.choice([*OF_BYTES])


HARMS = OF_BYTES | OF_JSON | OF_YAML
