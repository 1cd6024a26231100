"""Copies of the tree in which mutants stand, and tests that are run there by processes that fork."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from support_mutants_areas import AREAS, Area
from support_mutants_sample import ROOT, Mutant, mutated

SLOWER = 3.0, 60.0
"A mutant may take so many times what the tests take without one, and so many seconds more, before it counts as caught."
LOADED = ("pytest", "hypothesis", "torch", "transformers", "datasets", "lm_eval", "pandas", "scipy.stats")
"What takes long to load, and is none of the code that is mutated."
NONE_LEFT = 5
"Exit status of pytest where every test was left out."


def copy(folder: Path) -> Path:
    """The files that a clone would have, uncommitted ones included."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.check_output(listing, cwd=ROOT, text=True).split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def environment_of(tree: Path, variables: dict[str, str]) -> dict[str, str]:
    """Environment of tests of a tree, with a folder of its own for what they leave behind."""
    scratch = tree.with_name(f"{tree.name}-tmp")
    scratch.mkdir(exist_ok=True)
    # Two mutants of a module can have the same size and second, by which Python would take one's bytes for the other's.
    own = {"PYTHONPATH": f"{tree}/src{os.pathsep}{tree}/kernels", "PYTHONDONTWRITEBYTECODE": "1"}
    own |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TMPDIR": str(scratch)}
    own = os.environ | own | variables
    own.pop("PYTEST_ADDOPTS", None)  # They are of the run of tests around this one.
    return own


class Runs:
    """Runs of tests of a tree, by a process that forks for each."""

    def __init__(self, tree: Path, python: str, variables: dict[str, str], loaded: tuple[str, ...] = LOADED) -> None:
        self.said = tree / "said.txt"
        command = [python, str(ROOT / "tests/support_forks.py"), *loaded]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=tree, env=environment_of(tree, variables), **pipes)

    def run(self, arguments: Iterable[str], limit: float) -> tuple[int | None, list[str]]:
        """Exit status of pytest, None where the time was too short, and what failed."""
        self.process.stdin.write(json.dumps([list(arguments), str(self.said), limit]) + "\n")
        self.process.stdin.flush()
        return tuple(json.loads(self.process.stdout.readline()))

    def failing(self, test: str, limit: float) -> list[str]:
        """Which tests of a file fail; the file itself, if it cannot be read or says nothing."""
        status, failed = self.run([path_of(test)], limit)
        return [] if status == 0 else failed or [path_of(test)]

    def ask(self, tests: Iterable[str], limit: float, but: Iterable[str] = ()) -> tuple[str, str]:
        """What they say, `caught` or `survived`, and which of them failed first; `but` leaves out some."""
        paths = [path for path in map(path_of, tests) if path not in but]
        if not paths:
            return "survived", ""
        status, failed = self.run([*paths, "-x", *(f"--deselect={name}" for name in but)], limit)
        if status is None:
            return "caught", "the time limit"
        if status == 0 or (status == NONE_LEFT and but):
            return "survived", ""
        said = self.said.read_text(encoding="utf-8")
        return "caught", failed[0] if failed else f"exit status {status}: {said.strip().splitlines()[-1:]}"

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def path_of(test: str) -> str:
    return f"tests/test_{test}.py"


def limit_of(usual: float) -> float:
    return SLOWER[0] * usual + SLOWER[1]


CHANGING = threading.Lock()
"cosmic-ray, which changes a source, is not made for threads."


class Bench:
    """A copy of the tree, in which a mutant stands while tests run."""

    def __init__(self, tree: Path, python: str) -> None:
        self.tree, self.python = tree, python
        self.forks: dict[str, Runs] = {}

    def runs(self, area: Area) -> Runs:
        kind = json.dumps(area.variables)
        if kind not in self.forks:
            self.forks[kind] = Runs(self.tree, self.python, area.variables)
        return self.forks[kind]

    def change(self, mutant: Mutant) -> tuple[str, str]:
        """The source without and with the mutant."""
        source = (self.tree / mutant.module).read_text(encoding="utf-8")
        with CHANGING:
            return source, mutated(mutant, source)

    def outcome(self, mutant: Mutant, tests: Sequence[str], usual: float, but: set[str]) -> tuple[str, str]:
        """What the tests said and by which of them. Those of the module's name come first.

        A test that fails without the mutant as well says nothing: it is left out from then on, and put into `but`. So
        does a time that is too short without it, on a machine with other work: they are given twice as much.
        """
        path, runs, limit = self.tree / mutant.module, self.runs(AREAS[mutant.area]), limit_of(usual)
        source, after = self.change(mutant)
        own_first = sorted(tests, key=lambda name: path.stem not in name)
        while True:
            path.write_text(after, encoding="utf-8")
            try:
                said, by = runs.ask(own_first, limit, but)
            finally:
                path.write_text(source, encoding="utf-8")
            if said == "survived":
                return said, by
            named = by.startswith("tests/")
            asked = [by] if named else [path for path in map(path_of, tests) if path not in but]
            status, _ = runs.run([*asked, *(() if named else (f"--deselect={name}" for name in but))], limit)
            if status == 0:
                return said, by
            if status is None:
                limit *= 2
                continue
            if not named:
                raise RuntimeError(f"{mutant.key}: without the mutant, too, the tests end in {status}")
            but.add(by)

    def close(self) -> None:
        for runs in self.forks.values():
            runs.close()
