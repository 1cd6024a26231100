"""Packing and unpacking of a safetensors file on one core of a CPU: from file to file, with every checksum."""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from paperlm_kernels.bench import clocks
from paperlm_kernels.bench.operation import Task
from paperlm_kernels.bench.ops.neuzip.coder import FILE_PARTS, Coder
from paperlm_kernels.bench.peers import AbsentError

MEMORY = Path("/dev/shm")
"A folder in memory, so that no disk is measured."
NAMES = ("model.safetensors", "model.packed", "again.safetensors")


class DifferentError(ValueError):
    """What was unpacked is not the file that was packed."""


def stays_on_one_core(task: Task) -> bool:
    """Whether a task asks for files and can have them."""
    can = task.device == "cpu" and hasattr(os, "sched_setaffinity")
    return can and not set(FILE_PARTS).isdisjoint(task.measures)


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """This thread, and those that begin within, on one core; PyTorch in one thread."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(cores)})  # the first often has what the system does besides
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def speeds(coder: Coder, part: str, task: Task) -> tuple[list[float], Path]:
    """Megabytes of bfloat16 a second of each repetition of a part, and where its files were. Raises AbsentError where
    they cannot be, DifferentError where a codec without loss gives another file."""
    if not stays_on_one_core(task):
        raise AbsentError("files are packed on one core of a CPU, which Linux keeps a process on: ask for --device cpu")
    matrix = coder.matrix()
    size = 2 * matrix.numel()
    place = _place(4 * size)  # as it is, packed, and a new one of each before it takes the place of the old
    with tempfile.TemporaryDirectory(dir=place) as folder:
        plain, packed, again = (Path(folder) / name for name in NAMES)
        _write(plain, matrix)
        coder.pack_file(plain, packed)
        source, target = (plain, packed) if part == "pack_file" else (packed, again)
        call = getattr(coder, part)

        def once() -> float:
            begin = time.perf_counter()
            call(source, target)
            return time.perf_counter() - begin

        for _ in range(task.warmup):
            once()
        number = clocks.repetitions(once(), repeats=task.repeats, seconds=task.seconds)
        found = [size / once() / 1e6 for _ in range(number)]
        if part == "unpack_file" and coder.lossless and not filecmp.cmp(plain, again, shallow=False):
            raise DifferentError("the file that was unpacked is not the one that was packed")
    return found, place


def _place(needed: int) -> Path:
    for place in (MEMORY, Path(tempfile.gettempdir())):
        if place.is_dir() and shutil.disk_usage(place).free > needed:
            return place
    raise AbsentError(f"its files need {needed:,} bytes in {MEMORY}, or in a folder that TMPDIR names: make room")


def _write(path: Path, matrix: Tensor) -> None:
    """A safetensors file with one matrix of bfloat16."""
    described = {"dtype": "BF16", "shape": list(matrix.shape), "data_offsets": [0, 2 * matrix.numel()]}
    header = json.dumps({"weight": described}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.write(matrix.contiguous().view(torch.int16).numpy())
