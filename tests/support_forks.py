"""A process that has loaded what tests load, and forks for each run of tests, which then begin at once.

`support_mutants_bench.py` starts it with the project's interpreter, in the tree, with the modules to load as arguments,
and writes a line for each run: arguments of pytest, a file for what they say, and the seconds they may take. It answers
with the exit status, or null when these were too few, and the tests and files that failed. Whatever a run started is
ended with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


class Failures:
    """A plugin of pytest that writes down at once what fails, a line of JSON each."""

    def __init__(self, path: str) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(report.nodeid) + "\n")

    pytest_collectreport = pytest_runtest_logreport


def run(arguments: list[str], out: str) -> None:
    """In a forked process. Never returns."""
    os.setsid()
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, to in enumerate((nothing, file, file)):
        os.dup2(to, number)
    status = 99
    try:
        import pytest

        options = ["-q", "-p", "no:cacheprovider", "-m", "not slow"]
        status = int(pytest.main([*options, *arguments], plugins=[Failures(f"{out}.failed")]))
    finally:
        sys.stdout.flush()
        os._exit(status)


def failed(out: str) -> list[str]:
    """Tests that failed, and files that could not be read as tests."""
    path = Path(f"{out}.failed")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return list(dict.fromkeys(map(json.loads, lines)))


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
        arguments, out, seconds = json.loads(line)
        Path(f"{out}.failed").unlink(missing_ok=True)
        if (pid := os.fork()) == 0:
            run(arguments, out)
        print(json.dumps([wait(pid, seconds), failed(out)]), flush=True)


if __name__ == "__main__":
    main()
