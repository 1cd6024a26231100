"""Runs each method on each case in its own process and collects the rows."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from paperlm_kernels.bench.methods import METHODS
from paperlm_kernels.bench.worker import BOUND, Task, outcome

LIMIT = 180
"Seconds after which a method is given up."

Row = dict[str, Any]


class Worker:
    """A process of `paperlm_kernels.bench.worker` that waits to be told to begin."""

    def __init__(self, task: Task) -> None:
        self.task = task
        package_folder = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (package_folder, os.environ.get("PYTHONPATH"))))
        self.errors = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paperlm_kernels.bench.worker", json.dumps(dataclasses.asdict(task))],
            env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            text=True, encoding="utf-8",
        )  # fmt: skip

    def run(self, device: str) -> list[Row]:
        """Rows of the task; the last one says what went wrong, if anything did. `device` names it in that row."""
        failed = ""
        try:
            output, _ = self.process.communicate("begin\n", timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, _ = self.process.communicate()
            failed = f"no result after {LIMIT} s"
        finally:
            self.process.kill()
        rows = [json.loads(line) for line in output.splitlines()]
        if self.process.returncode and not failed:
            self.errors.seek(0)
            lines = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
            failed = lines[-1][:300] if lines else f"exit status {self.process.returncode}"
        if failed:
            rows.append(outcome(self.task, device, f"failed: {failed}"))
        self.errors.close()
        return rows

    def close(self) -> None:
        """End a worker that was not needed."""
        if self.process.poll() is None:
            self.process.communicate()
        self.errors.close()


def run(tasks: Iterable[Task], collect: Callable[[Task, list[Row]], None]) -> list[Row]:
    """Rows of all tasks, one process a task; `collect` is called after each. Absent methods give an outcome row.

    The first task of a case describes its data; the share of tiles alive found there goes into the case's other rows.
    """
    queue = list(tasks)
    reasons = {task: _absent(task) for task in queue}
    present = [task for task in queue if reasons[task] is None]
    everything: list[Row] = []
    spare: Worker | None = None
    device, alive = queue[0].device if queue else "", {}
    try:
        for task in queue:
            if reasons[task] is not None:
                rows = [outcome(task, device, f"absent: {reasons[task]}")]
            else:
                worker, spare = spare or Worker(task), None
                following = present[present.index(task) + 1 :]
                # On a CPU a starting process would slow down the one that is measured.
                if following and task.device != "cpu":
                    spare = Worker(following[0])
                rows = worker.run(device)
            device = rows[-1]["device"] if rows else device
            for row in rows:
                if row["metric"] == "alive_share" and row["tiles"] == "128x128":
                    alive[task.case, task.permute] = row["value"]
                elif row["metric"] == "time":
                    row["alive_share"] = alive.get((task.case, task.permute))
            everything += rows
            collect(task, rows)
    finally:
        if spare is not None:
            spare.close()
    return everything


def _absent(task: Task) -> str | None:
    if task.method == BOUND:
        return None
    return METHODS[task.method][0].func.absent(torch.device(task.device))
