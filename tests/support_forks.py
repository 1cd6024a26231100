"""A process that has loaded what tests load, and forks for each run of tests, which then begin at once.

`support_mutants.py` starts it with the project's interpreter, in the tree, with the modules to load as arguments, and
writes a line for each run: the tests, a file for what they say, and the seconds they may take. It answers with their
exit status, or null when these were too few. Whatever a run started is ended with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time


def run(tests: list[str], out: str) -> None:
    """In a forked process. Never returns."""
    os.setsid()
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, to in enumerate((nothing, file, file)):
        os.dup2(to, number)
    status = 99
    try:
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
        status = int(pytest.main([*options, *(f"tests/test_{name}.py" for name in tests)]))
    finally:
        sys.stdout.flush()
        os._exit(status)


def wait(pid: int, seconds: float) -> int | None:
    """Exit status, negative for a signal; None if it took too long."""
    end, status = time.monotonic() + seconds, None
    while status is None and time.monotonic() < end:
        done, how = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(how) if done else None
        time.sleep(0 if done else 0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return status


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        tests, out, seconds = json.loads(line)
        if (pid := os.fork()) == 0:
            run(tests, out)
        print(json.dumps(wait(pid, seconds)), flush=True)


if __name__ == "__main__":
    main()
