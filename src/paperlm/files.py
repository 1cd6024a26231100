"""The border to the disk: files are written whole or not at all, and read back only as they were written.

A kill or a full disk leaves either the old file or the new one, never half of one. A JSON file that steers a number
says what it is and carries a checksum of itself (`write_sealed`, `read_sealed`), any other file is named with its
checksum in such a one (`check_file`). What was damaged is an error of ours with the file and the remedy.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from paperlm_kernels.seal import SEAL, is_sealed, sealed

from paperlm.errors import PaperLMError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL_DISK_WORDS = ("No space left", "File too large", "Disk quota exceeded")
"What safetensors and a copied folder say of it."
SHORT_FILE = re.compile(
    r"basic_ios::clear: iostream error|PytorchStreamWriter failed writing|unexpected pos \d+ vs \d+"
)
"What torch.save says, which knows no reason: its file took fewer bytes than it wrote."


def is_full_disk(error: BaseException) -> bool:
    """Whether an error, or its cause, says that no space is left: by its number or, of a library that passes
    none on, in words."""
    if error.__cause__ is not None and is_full_disk(error.__cause__):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL_DISK
    if isinstance(error, RuntimeError) and SHORT_FILE.search(str(error)):
        return True
    return any(words in str(error) for words in FULL_DISK_WORDS)


def write_atomic(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Call `write(file)` on a neighbour of `path`, then rename it to `path`.

    Raises PaperLMError on a full disk, and where `path` is a folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if is_full_disk(error):
            raise PaperLMError(
                f"no space left to write {path} ({error.strerror}); free some and start the same command again: "
                "finished work is kept and a training run continues from its last checkpoint"
            ) from error
        if path.is_dir():
            raise PaperLMError(f"{path}: a folder in the place of the file; move it away and start again") from error
        raise


def link_or_copy(source: Path, target: Path) -> None:
    """Put a large file that nobody writes to at another place too: as the same file, or a copy on another disk. What is
    at `target` goes."""
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def temporary_beside(path: Path) -> Path:
    """What `write_atomic` writes before it is renamed to `path`."""
    return path.with_name(f".{path.name}.tmp")


def gone_beside(folder: Path) -> Path:
    """What `discard` renames a folder to before it removes it."""
    return folder.with_name(f".{folder.name}.gone")


def discard(folder: Path) -> None:
    """Remove a folder so that a kill leaves it whole or not there; what then is left beside it goes the next time."""
    gone = gone_beside(folder)
    shutil.rmtree(gone, ignore_errors=True)
    if folder.exists():
        os.replace(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON, atomically."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_atomic(path, lambda file: file.write(text.encode()))


def write_sealed(path: Path, what: str, value: Mapping[str, Any]) -> None:
    """`value` as a sealed JSON object that says what it is, atomically; `read_sealed` reads it."""
    write_json(path, sealed({"what": what, **value}))


def read_sealed(path: Path, what: str, keys: Iterable[str], error: type[PaperLMError], remedy: str) -> dict[str, Any]:
    """The object that `write_sealed` wrote, seal and `what` included.

    Raises `error` with the path and the remedy if it is missing, a link, unreadable,
    altered in any value, of another `what`, or without one of the keys.
    """
    damaged = error(f"{path}: truncated or altered; {remedy}")
    if path.is_symlink():
        raise error(f"{path}: a link in the place of the file; {remedy}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path}: missing; {remedy}") from None
    except (OSError, ValueError, RecursionError):
        raise damaged from None
    if not isinstance(found, dict):
        raise damaged
    if SEAL not in found:
        raise error(f"{path}: has no checksum of itself: altered, or written by an earlier version; {remedy}")
    if not is_sealed(found) or not found.keys() >= {"what", *keys}:
        raise damaged
    if found["what"] != what:
        raise error(f"{path}: says that it is {found['what']}, not {what}; {remedy}")
    return found


def glance(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file that is checked where its numbers are read, for what may err: a plan's minutes, whether
    something is there. None where there is no such object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def glance_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in a file of lines, as `glance` reads one; empty where a line is none."""
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, RecursionError):
        return []
    return found if all(isinstance(row, dict) for row in found) else []


def check_file(path: Path, sha256: str, error: type[PaperLMError], remedy: str) -> None:
    """Raise `error` with the path and the remedy for a file that is missing, a link, or has another SHA-256."""
    if path.is_symlink():
        raise error(f"{path}: a link in the place of the file; {remedy}")
    if not path.is_file() or sha256_of(path) != sha256:
        raise error(f"{path}: missing, truncated or altered; {remedy}")


def write_sums(path: Path, what: str, folder: Path) -> None:
    """The checksums of every file of a folder as a sealed object, for `check_sums`."""
    files = {p.relative_to(folder).as_posix(): sha256_of(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    write_sealed(path, what, {"files": files})


def check_sums(path: Path, what: str, folder: Path, error: type[PaperLMError], remedy: str) -> None:
    """Raise `error` if a file that `write_sums` found in the folder is missing or altered, or another one is there."""
    files = read_sealed(path, what, ["files"], error, remedy)["files"]
    for name, checksum in files.items():
        check_file(folder / name, checksum, error, remedy)
    here = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir() or p.is_symlink()}
    if strangers := sorted(here - files.keys()):
        raise error(f"{folder / strangers[0]}: does not belong there; {remedy}")


SUMS = "SHA256SUMS"
"As `sha256sum` writes it, with paths below its folder: of files without a checksum of their own."


@functools.cache
def listed_sums(path: Path, error: type[PaperLMError]) -> dict[str, str]:
    """Name -> checksum of a list; empty where there is none. Raises `error` for a file that is no such list."""
    damaged = error(f"{path}: no list of checksums, `sha256sum` writes one; restore it with git")
    if path.is_symlink() or path.is_dir():
        raise damaged
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError):
        raise damaged from None
    found = [re.fullmatch(r"([0-9a-f]{64})  (\S.*)", line) for line in lines]
    if not all(found) or len({match[2] for match in found}) < len(found):
        raise damaged
    return {match[2]: match[1] for match in found}


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
