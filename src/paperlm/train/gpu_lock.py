"""Jobs of one machine never share a GPU by accident.

Each job takes the first free cards of those it may see, one for each of its processes, by file locks that the kernel
drops when the process ends, however it ends. A card is known by its UUID where nvidia-smi tells it: SLURM may show
several jobs, or steps of one, other cards under the same number.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from paperlm import ranks
from paperlm.errors import JobError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """Identifiers of the cards this process may use, without importing torch."""
    listed = os.environ.get(VISIBLE)
    if listed is not None:
        return [card.strip() for card in listed.split(",") if card.strip() and card.strip() != "-1"]
    try:
        out = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    count = sum(line.startswith("GPU ") for line in out.stdout.splitlines())
    return [str(index) for index in range(count)]


@contextlib.contextmanager
def one_gpu(enabled: bool = True, folder: Path | None = None) -> Iterator[str | None]:
    """Hold one card, as `some_gpus` does. Yields its identifier, or None."""
    with some_gpus(1, enabled, folder) as cards:
        yield cards[0] if cards else None


@contextlib.contextmanager
def some_gpus(count: int, enabled: bool = True, folder: Path | None = None) -> Iterator[list[str] | None]:
    """Hold so many cards, waiting until they are free, and show only them to this process. Yields their identifiers, or
    None where nothing is locked. Has to be entered before CUDA is initialized.

    Of several jobs that take more than one card one collects at a time, and keeps what it has while it waits for the
    rest; a job that takes one waits with none in hand. So all of them get theirs in the end. Raises JobError where
    there are cards, and fewer than so many.
    """
    cards = visible_gpus() if enabled else []
    if cards and len(cards) < count:
        raise JobError(f"{count} processes need a GPU each, and there are {len(cards)} here: start fewer")
    if not cards:
        yield None
        return
    folder, names = _folder(folder), lock_names(cards)
    with contextlib.ExitStack() as locks:
        held: dict[str, IO[str]] = {}
        with _alone(folder) if count > 1 else contextlib.nullcontext():
            while len(held) < count:
                for card in cards:
                    if card not in held and len(held) < count and (lock := _locked(folder / f"{names[card]}.lock")):
                        held[card] = locks.enter_context(lock)
                if len(held) < count:
                    time.sleep(1.0)
        mine = [card for card in cards if card in held]
        with _shown(",".join(mine)):
            yield mine


@contextlib.contextmanager
def gpus_of_job(enabled: bool = True, folder: Path | None = None) -> Iterator[None]:
    """Hold a card for each process of the job on this machine: the first of them takes all, and the others see what it
    took. Each shows that it uses its own, for as long as it lives: where the first ends, the others may not have.
    Raises as `some_gpus` does."""
    if ranks.world_size() == 1:
        with one_gpu(enabled, folder):
            yield
    elif ranks.leads_host():
        with some_gpus(ranks.on_this_host(), enabled, folder) as cards:
            ranks.agreed(lambda: cards, by_host=True)
            yield
    else:
        cards = ranks.agreed(lambda: None, by_host=True)
        if not cards:
            yield
            return
        card = cards[int(os.environ["LOCAL_RANK"])]
        with _used(_folder(folder), lock_names([card])[card]), _shown(",".join(cards)):
            yield


def _folder(given: Path | None) -> Path:
    """Where the locks are."""
    folder = given or Path(tempfile.gettempdir()) / f"paperlm-gpus-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def lock_names(cards: list[str]) -> dict[str, str]:
    """Card -> name of its lock: its UUID; where nobody tells it, its number, in SLURM's allocation if it is in one."""
    allocation = f"slurm{job}-" if (job := os.environ.get("SLURM_JOB_ID")) else ""
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        said = ""
    uuids = dict(re.findall(r"(?m)^GPU (\d+): .*\(UUID: ([\w-]+)\)", said))
    return {card: uuids.get(card, card if "-" in card else f"{allocation}{card}") for card in cards}


@contextlib.contextmanager
def _used(folder: Path, card: str) -> Iterator[None]:
    """Show that this process uses a card that the first of its job has locked."""
    with (folder / f"{card}.users").open("w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        yield


def _locked(path: Path) -> IO[str] | None:
    """The open file whose lock this process now has; None: another has it, or another process still uses the card."""
    lock = path.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with path.with_suffix(".users").open("w") as users:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of whoever collects several cards."""
    with (folder / "several.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _shown(cards: str) -> Iterator[None]:
    """Show only these cards to this process."""
    before = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = cards
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VISIBLE, None)
        else:
            os.environ[VISIBLE] = before
