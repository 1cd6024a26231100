"""Writing files so that a kill or a full disk leaves either the old file or the new one, never half of one."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from paperlm.errors import PaperLMError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full_disk(error: BaseException) -> bool:
    """Whether an error says that there is no space left: by its number or, of safetensors and torch, in its words."""
    if isinstance(error, OSError):
        return error.errno in FULL_DISK
    return any(words in str(error) for words in ("No space left", "File too large", "Disk quota exceeded"))


def write_atomic(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Call `write(file)` on a neighbour of `path`, then rename it to `path`. Raises PaperLMError on a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
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
        raise


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON, atomically."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_atomic(path, lambda file: file.write(text.encode()))


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
