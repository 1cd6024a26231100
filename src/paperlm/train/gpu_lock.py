"""Jobs of one machine never share a GPU by accident.

Each job takes the first free card of those it may see, by a file lock that the kernel drops when the process ends,
however it ends. Under torchrun, or in a SLURM job that was granted one card, nothing is done.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


def visible_gpus() -> list[str]:
    """Identifiers of the cards this process may use, without importing torch."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
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
    """Hold one card, waiting for a free one, and show only it to this process. Yields its identifier, or None.

    Has to be entered before CUDA is initialized.
    """
    cards = visible_gpus() if enabled and "RANK" not in os.environ else []
    if not cards or (len(cards) == 1 and os.environ.get("SLURM_JOB_ID")):
        yield None
        return
    folder = folder or Path(tempfile.gettempdir()) / f"paperlm-gpus-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        for card in cards:
            lock = (folder / f"{card}.lock").open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                continue
            before = os.environ.get("CUDA_VISIBLE_DEVICES")
            os.environ["CUDA_VISIBLE_DEVICES"] = card
            try:
                yield card
            finally:
                lock.close()
                if before is None:
                    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
                else:
                    os.environ["CUDA_VISIBLE_DEVICES"] = before
            return
        time.sleep(1.0)
