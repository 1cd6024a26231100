"""The lock that a killed Snakemake leaves behind, so that the same command goes on.

Every Snakemake process of this workflow notes itself beside its locks. A lock is broken only if every process that was
noted, on this host, is gone; one of another host, or without a note, is left to Snakemake's own message. Jobs of the
killed process that still run hold locks of their own (paperlm.run), so nothing is made twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from pathlib import Path

NOTE = "paperlm-processes.json"


def break_stale_lock(folder: Path) -> bool:
    """Note this process in Snakemake's folder, after removing locks that no living process can hold.

    Returns whether a lock was broken. Marks of incomplete outputs go with it: every file of this workflow is written
    whole or not at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{NOTE}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two that start at once must not lose each other's note
        return _note_this_process(folder)


def _note_this_process(folder: Path) -> bool:
    note = folder / NOTE
    try:
        noted = [(host, int(process), start) for host, process, start in json.loads(note.read_text())]
    except (OSError, ValueError, TypeError):
        noted = []
    alive = [entry for entry in noted if _may_live(entry)]
    locks = list((folder / "locks").glob("*"))
    if not locks:
        alive = [entry for entry in alive if entry[0] == socket.gethostname()]
    broken = bool(locks) and bool(noted) and not alive
    if broken:
        for lock in locks:
            lock.unlink(missing_ok=True)
        shutil.rmtree(folder / "incomplete", ignore_errors=True)
    temporary = note.with_name(f".{NOTE}.{os.getpid()}")
    temporary.write_text(json.dumps([*alive, (socket.gethostname(), os.getpid(), _started(os.getpid()))]))
    os.replace(temporary, note)
    return broken


def _may_live(entry: tuple) -> bool:
    """Whether a noted process (host, id, start) may still run; on another host nobody can say."""
    host, process, started = entry
    if host != socket.gethostname():
        return True
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    now = _started(process)
    return now is None or started is None or now == started  # another start: the id was given to another process


def _started(process: int) -> int | None:
    """When a process started, in clock ticks since the system did; None where /proc does not say."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
