"""One task in a process of its own, or a method's, one after the other: JSON is its argument, rows of JSON its output.

It writes READY when it has imported what it needs, and touches the device only when a line arrives on its standard
input. Where methods take turns it writes `null` at the end of each, and waits for `again` or `finish`. Where a process
goes on, it writes DONE behind the rows, and waits for another task.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from typing import Any, TextIO

from paperlm_kernels.bench import ops
from paperlm_kernels.bench.operation import TURN, Operation, Task

READY, DONE = json.dumps("ready"), json.dumps("done")


def main() -> None:
    """Entry point of the process."""
    # Whatever a library prints must not mix with the rows.
    rows = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # whose lines are written at once: the last one says what the process died of
    given = json.loads(sys.argv[1])
    ops.__path__[:] = given["folders"]
    task = _task(given["task"])
    operation = ops.operation(task.op)
    for module in operation.modules(task.method) if task.device != "cpu" else ():
        importlib.import_module(module)
    print(READY, file=rows, flush=True)
    while sys.stdin.readline():
        _measure(operation, task, rows)
        if not operation.goes_on:
            return
        _clear()
        print(DONE, file=rows, flush=True)
        if not (line := sys.stdin.readline()):
            return
        task = _task(json.loads(line))


def _measure(operation: Operation, task: Task, rows: TextIO) -> None:
    steps, again = operation.run(task), None
    while True:
        try:
            found = steps.send(again)
        except StopIteration:
            return
        print(json.dumps(found), file=rows, flush=True)
        again = sys.stdin.readline() == "again\n" if found is TURN else None


def _task(given: dict[str, Any]) -> Task:
    return Task(**{**given, "measures": tuple(given["measures"])})


def _clear() -> None:
    """No tensor of a task is left on the device for the next."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
