"""Runs each method on each case, in a process of its own, and collects the rows."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from paperlm_kernels.bench import ops
from paperlm_kernels.bench.operation import Operation, Task
from paperlm_kernels.bench.rows import Row, commit_id
from paperlm_kernels.bench.worker import DONE, READY

TOGETHER = 16
"Processes that import at once, where there are as many cores: each holds some hundred megabytes while it waits."
TURNS = 3
"As many as each method has where they take turns, however long they are; unless fewer repetitions are asked for."


class Worker:
    """A process of `paperlm_kernels.bench.worker` that waits to be told to begin. `rows` are those of its task."""

    def __init__(self, operation: Operation, task: Task) -> None:
        from paperlm_kernels.bench.clocks import KEEP_FREED

        self.operation, self.task = operation, task
        self.rows: list[Row] = []
        self.waiting = True
        "for the next word: to begin, to have another turn, or to finish"
        self.ended = False
        self.imported = threading.Event()
        "set too when it has died of it, which `go` finds"
        # What this process can import, that one can.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment |= {"PAPERLM_COMMIT": commit} if (commit := commit_id()) else {}  # one for all rows of a call
        if task.device == "cpu":
            environment |= KEEP_FREED
        given = {"folders": list(ops.__path__), "task": dataclasses.asdict(task)}
        self._errors = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paperlm_kernels.bench.worker", json.dumps(given)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            encoding="utf-8",
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with self._process.stdout as output:
            for line in output:
                if line == f"{READY}\n":
                    self.imported.set()
                else:
                    self._lines.put(line)
        self._lines.put(None)
        self.imported.set()

    def take(self, task: Task) -> None:
        """Another task, when the one before is done."""
        self.task, self.rows, self.waiting = task, [], True
        self._errors.seek(0)  # of the process too: what it says from now on is of this task
        self._errors.truncate()
        self._tell(json.dumps(dataclasses.asdict(task)))

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it has ended, and the end of its output says so
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def go(self, word: str, device: str) -> None:
        """Let it work until its turn is over or all is done; if something went wrong, the last row says what.
        `device` names it in that row."""
        self.waiting = False
        self._tell(word)
        until = time.monotonic() + self.operation.limit
        try:
            while (line := self._lines.get(timeout=max(0.0, until - time.monotonic()))) is not None:
                if not line.endswith("\n"):
                    break  # it died over this row
                if line == f"{DONE}\n":
                    return
                if (found := json.loads(line)) is None:
                    self.waiting = True
                    return
                self.rows.append(found)
            failed = self._failure()
        except queue.Empty:
            failed = f"no result after {self.operation.limit:g} s"
        self.close()
        if failed:
            self.rows.append(self.operation.outcome(self.task, device, f"failed: {failed}"))

    def _failure(self) -> str:
        """What a process that has ended died of; empty: nothing."""
        status = self._process.wait()
        if status == 0:
            return ""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        if status < 0:
            kill = " (by the kernel if its memory was full)" if -status == signal.SIGKILL else ""
            return f"ended by {signal.Signals(-status).name}{kill}"
        return lines[-1][:300] if lines else f"exit status {status}"

    def dead(self) -> bool:
        """Whether it has ended, of itself too."""
        return self.ended or self._process.poll() is not None

    def close(self) -> None:
        """End it, if it has not ended."""
        self.ended = True
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._errors.close()


def run(operation: Operation, tasks: Iterable[Task], collect: Callable[[Task, list[Row]], None]) -> list[Row]:
    """Rows of all tasks, one process a task, or a method, where processes go on; `collect` is called after each task.
    Absent methods give an outcome row.

    Tasks of a case follow each other, its `first` before the others: the fields that `shared` makes of its rows go into
    the times of the others. Raises ValueError for an operation that takes turns and goes on.
    """
    if operation.in_turns and operation.goes_on:
        raise ValueError(f"{operation.name} takes turns and goes on; set one of in_turns and goes_on")
    wanted, everything = [dataclasses.replace(task) for task in tasks], []  # each is one of its own, though it is twice
    reasons = [None if t.method == operation.first else operation.absent(t.method, t.device) for t in wanted]
    started: list[Worker] = []
    ready: dict[str | int, Worker] = {}

    def key(task: Task) -> str | int:
        return task.method if operation.goes_on else id(task)

    left = collections.Counter(key(task) for task, reason in zip(wanted, reasons, strict=True) if reason is None)
    absent: list[tuple[Task, str]] = []
    device = wanted[0].device if wanted else ""
    shared: dict[str, dict] = {}

    def worker(task: Task) -> Worker:
        made = ready.get(key(task))
        if made is None or (made.task is not task and made.dead()):
            made = ready[key(task)] = Worker(operation, task)
            started.append(made)
        return made

    def finished(task: Task, found: list[Row]) -> None:
        if task.method == operation.first:
            shared[task.case] = operation.shared(found)
        for row in found if task.method != operation.first else ():
            if row["metric"] == "time":
                row |= shared.get(task.case, {})
        everything.extend(found)
        collect(task, found)

    def without() -> None:
        while absent:
            task, reason = absent.pop(0)
            finished(task, [operation.outcome(task, device, f"absent: {reason}")])

    try:
        for batch in _batches(operation, list(zip(wanted, reasons, strict=True))):
            for task in (task for group in batch for task, reason in group if reason is None):
                worker(task)
            until = time.monotonic() + operation.limit
            for made in ready.values():
                made.imported.wait(max(0.0, until - time.monotonic()))
            for group in batch:
                workers = []
                for task, reason in group:
                    if reason is not None:
                        absent.append((task, reason))
                    else:
                        workers.append(worker(task))
                        if workers[-1].task is not task:
                            workers[-1].take(task)
                        workers[-1].go("begin", device)
                _turns(workers, device)
                for made in workers:
                    device = made.rows[-1]["device"] if made.rows else device
                    finished(made.task, made.rows)
                    left[key(made.task)] -= 1
                    if not left[key(made.task)]:
                        made.close()
                if device != wanted[0].device:  # a process has told the card's name
                    without()
        without()
    finally:
        for made in started:
            made.close()
    return everything


Group = list[tuple[Task, str | None]]
"What takes turns: the methods of a case, or a task alone; each with the reason why it is absent, or None."


def _batches(operation: Operation, tasks: Group) -> Iterator[list[Group]]:
    """Groups whose processes start together. None measures before all have imported what they need: that keeps a core
    and the disk busy for longer than many measure, of whom some let a card wait for Python. On a CPU one at a time:
    those that wait would take memory from the one that measures, as those that go on do."""
    groups = [[pair] for pair in tasks]
    if operation.in_turns:
        key = lambda pair: (pair[0].case, pair[0].method == operation.first)  # noqa: E731
        groups = [list(group) for _, group in itertools.groupby(tasks, key)]
    batch: list[Group] = []
    most = 1 if not tasks or tasks[0][0].device == "cpu" else min(TOGETHER, os.cpu_count() or 1)
    for group in groups:
        if batch and sum(map(_present, (*batch, group))) > most:
            yield batch
            batch = []
        batch.append(group)
    yield batch


def _present(group: Group) -> int:
    return sum(reason is None for _, reason in group)


def _turns(workers: list[Worker], device: str) -> None:
    """Turns until as many as repetitions are asked for, or the time is over; then the end of each."""
    if not any(worker.waiting for worker in workers):
        return
    task = workers[0].task
    begin = time.monotonic()
    for number in range(task.repeats):
        going = [worker for worker in workers if worker.waiting]
        if number >= TURNS and time.monotonic() - begin > task.seconds * len(going):
            break
        for worker in going:
            worker.go("again", device)
    for worker in workers:
        if worker.waiting:
            worker.go("finish", device)
