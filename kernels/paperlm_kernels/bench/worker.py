"""One task in a process of its own: JSON is its argument, rows of JSON are its output.

It writes READY when it has imported what it needs, and touches the device only when a line arrives on its standard
input. Where methods take turns it writes `null` at the end of each, and waits for `again` or `finish`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from paperlm_kernels.bench import ops
from paperlm_kernels.bench.operation import TURN, Task

READY = json.dumps("ready")
"The first line that it writes."


def main() -> None:
    """Entry point of the process."""
    # Whatever a library prints must not mix with the rows.
    rows = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # whose lines are written at once: the last one says what the process died of
    given = json.loads(sys.argv[1])
    ops.__path__[:] = given["folders"]
    task = Task(**{**given["task"], "measures": tuple(given["task"]["measures"])})
    operation = ops.operation(task.op)
    for module in operation.modules(task.method) if task.device != "cpu" else ():
        importlib.import_module(module)
    print(READY, file=rows, flush=True)
    if not sys.stdin.readline():
        return
    steps, again = operation.run(task), None
    while True:
        try:
            found = steps.send(again)
        except StopIteration:
            return
        print(json.dumps(found), file=rows, flush=True)
        again = sys.stdin.readline() == "again\n" if found is TURN else None


if __name__ == "__main__":
    main()
