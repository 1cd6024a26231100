"""Files that are written beside their place, and take it when they are complete."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system: nobody can tell there whether a part is still written
    fcntl = None  # type: ignore[assignment]

LEFT = 600.0
"Seconds since a part was written to, from which on it can be one that was left: some file systems lock for one host."


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new, empty file to be written, which takes the place of `path`, or of what a link there leads to, at the end;
    an exception removes it, and what is at `path` stays. What a process that was killed left of an earlier one is
    removed first. Raises ValueError where `path` is there and no file."""
    try:
        path = path.resolve()
    except RuntimeError:  # before Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file, and stays: give the name of one")
    _remove_left(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.part-")
    held = _locks(handle)
    if not held:
        os.close(handle)  # some systems move no file that is open
    try:
        yield Path(name)
        os.chmod(name, 0o666 & ~_umask())  # noqa: PTH101
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        if held:
            os.close(handle)


def _locks(handle: int) -> bool:
    """Whether this process holds the file from now on, until it ends or closes it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody else does, or the file system knows no locks
        return False
    return True


def _remove_left(path: Path) -> None:
    """Parts of this file that no process writes."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.part-*"):
        with contextlib.suppress(OSError):  # another process was faster, or it is somebody else's
            handle = os.open(part, os.O_RDWR)
            try:
                if time.time() - os.fstat(handle).st_mtime > LEFT and _locks(handle):
                    part.unlink()
            finally:
                os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
