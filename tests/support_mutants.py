"""Mutants: faults that cosmic-ray makes in the source, one at a time, and whether the nearest tests catch them.

`make mutants` draws a sample and keeps what came out in docs/reference/mutants.json. It runs where cosmic-ray is
installed, and the tests in the project's own environment, in a copy of the tree. Each mutant's outcome is kept at once,
so that a call goes on where the last one was stopped; `--again` tries those that survived once more, with the tests as
they are now. A survivor is either equivalent, for a reason that is written into the record by hand and stays there, or
asks for a test.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from support_mutants_areas import AREAS, Area

ROOT = Path(__file__).resolve().parent.parent
SEED, SAMPLE = 20241218, 300
"The day on which Mix-LN appeared; what the record has to hold."
SLOWER = 3.0, 60.0
"A mutant may take so many times what the tests take without one, and so many seconds more, before it counts as caught."
LOADED = ("pytest", "hypothesis", "torch", "transformers", "datasets", "lm_eval", "pandas", "scipy.stats")
"What takes long to load, and is none of the code that is mutated."


UNTOLD = re.compile(
    r"core/(NoOp|Variable.*"
    r"|Replace(Comparison|Binary)Operator_(Eq_Is|NotEq_IsNot|Is_Eq|IsNot_NotEq)"
    r")"
)
"Operators that are left out: whether equal numbers and strings are one object is the interpreter's affair, not ours."


class Mutant(NamedTuple):
    """A fault: the operator's occurrence in a module, and where that is."""

    area: str
    module: str
    operator: str
    occurrence: int
    start: tuple[int, int]
    end: tuple[int, int]
    text: str = ""
    "the line that it starts in, without the spaces around it"
    nth: int = 0
    "of the lines of the module with that text"
    indent: int = 0
    variant: int = 0
    "of the operator's changes at this place"

    @property
    def place(self) -> str:
        """Where it is, by what stands there: lines that come or go elsewhere leave the sample as it is."""
        columns = (self.start[1] - self.indent, self.end[0] - self.start[0], self.end[1] - self.indent)
        return f"{self.module} {self.text or self.start[0]} {self.nth} {columns}"

    @property
    def key(self) -> str:
        return f"{self.module} {rank(self.place)[:12]} {self.operator} {self.variant}"


def rank(*parts: object) -> str:
    """A draw by lot that parts alone decide."""
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()


def placed(mutants: Iterable[Mutant], sources: dict[str, str]) -> Iterator[Mutant]:
    """With what stands where they are."""
    lines = {name: source.splitlines() for name, source in sources.items()}
    seen: Counter[tuple[str, str]] = Counter()
    for mutant in sorted(mutants):
        here = lines[mutant.module]
        raw = here[mutant.start[0] - 1]
        text = raw.strip()
        nth = sum(line.strip() == text for line in here[: mutant.start[0] - 1])
        named = mutant._replace(text=text, nth=nth, indent=len(raw) - len(raw.lstrip()))
        seen[named.place, mutant.operator] += 1
        yield named._replace(variant=seen[named.place, mutant.operator] - 1)


def files(area: Area, root: Path = ROOT) -> list[str]:
    found = [path.relative_to(root).as_posix() for name in area.modules for path in sorted(root.glob(name))]
    return list(dict.fromkeys(found))


def silent(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Spans whose change nobody can see: annotations of functions and of what stands in them, which are not evaluated.

    Fields of classes are read by pydantic, so that theirs count.
    """
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node.returns)
            found += [inner.annotation for inner in ast.walk(node) if isinstance(inner, ast.AnnAssign | ast.arg)]
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            found.append(node.test)
    return [((e.lineno, e.col_offset), (e.end_lineno or 0, e.end_col_offset or 0)) for e in found if e is not None]


def told(mutants: Iterable[Mutant], sources: dict[str, str]) -> Iterator[Mutant]:
    spans = {name: silent(source) for name, source in sources.items()}
    for mutant in mutants:
        inside = any(start <= mutant.start and mutant.end <= end for start, end in spans[mutant.module])
        if not inside and not UNTOLD.fullmatch(mutant.operator):
            yield mutant


def drawn(
    mutants: Iterable[Mutant], runs: Callable[[Mutant], bool], size: int = SAMPLE, seed: int = SEED
) -> list[Mutant]:
    """One mutant at each of `size` places: as many of each area, or what a small one has; the rest from the others.

    Places are drawn rather than mutants, since a sum alone has eleven. What is no Python (`runs`) is no mutant.
    """
    places: dict[str, dict[str, list[Mutant]]] = {}
    for mutant in sorted(mutants):
        places.setdefault(mutant.area, {}).setdefault(mutant.place, []).append(mutant)
    queues = {
        area: [
            sorted(here[place], key=lambda mutant: rank(seed, mutant.key))
            for place in sorted(here, key=lambda place: rank(seed, place))
        ]
        for area, here in places.items()
    }
    found: list[Mutant] = []
    while len(found) < size and any(queues.values()):
        for area in sorted(queues):
            one = None
            while queues[area] and one is None and len(found) < size:
                one = next(filter(runs, queues[area].pop(0)), None)
            found += [one] if one else []
    return found


def possible(root: Path = ROOT) -> list[Mutant]:
    """Every mutant of every area, by cosmic-ray."""
    import cosmic_ray.commands
    from cosmic_ray.work_db import WorkDB

    found: list[Mutant] = []
    for name, area in AREAS.items():
        names = files(area, root)
        with tempfile.TemporaryDirectory() as folder:
            database = WorkDB(Path(folder) / "work.sqlite", WorkDB.Mode.create)
            cosmic_ray.commands.init([root / file for file in names], database, {})
            for item in database.work_items:
                (spec,) = item.mutations
                module = spec.module_path.relative_to(root).as_posix()
                place = (spec.occurrence, tuple(spec.start_pos), tuple(spec.end_pos))
                found.append(Mutant(name, module, spec.operator_name, *place))
            database.close()
        sources = {file: (root / file).read_text(encoding="utf-8") for file in names}
        mine = placed((m for m in found if m.area == name), sources)
        found = [m for m in found if m.area != name] + list(told(mine, sources))
    return found


def mutated(mutant: Mutant, source: str) -> str:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    return mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)


def is_python(mutant: Mutant) -> bool:
    try:
        ast.parse(mutated(mutant, (ROOT / mutant.module).read_text(encoding="utf-8")))
    except SyntaxError:
        return False
    return True


def change(before: str, after: str) -> str:
    """The lines that differ, as `- before` and `+ after`."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return "\n".join(f"{line[0]} {line[1:].strip()}" for line in lines if not line.startswith(("---", "+++", "@@")))


def copy(folder: Path) -> Path:
    """The files that a clone would have, uncommitted ones included."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.check_output(listing, cwd=ROOT, text=True).split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


class Runs:
    """Runs of tests of a tree, by a process that forks for each."""

    def __init__(self, tree: Path, python: str, variables: dict[str, str], loaded: tuple[str, ...] = LOADED) -> None:
        self.said = tree / "said.txt"
        environment = os.environ | variables | {"PYTHONPATH": f"{tree}/src{os.pathsep}{tree}/kernels"}
        environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        # Two mutants of a module can have the same size and second, by which Python would take one's bytes for the
        # other's.
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        environment.pop("PYTEST_ADDOPTS", None)  # They are of the run of tests around this one.
        command = [python, str(ROOT / "tests/support_forks.py"), *loaded]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=tree, env=environment, **pipes)

    def ask(self, tests: Iterable[str], limit: float) -> tuple[str, str]:
        """What they say, `caught` or `survived`, and which of them failed first."""
        self.process.stdin.write(json.dumps([list(tests), str(self.said), limit]) + "\n")
        self.process.stdin.flush()
        status = json.loads(self.process.stdout.readline())
        if status is None:
            return "caught", "the time limit"
        if status == 0:
            return "survived", ""
        said = self.said.read_text(encoding="utf-8")
        first = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        return "caught", first[1] if first else f"exit status {status}: {said.strip().splitlines()[-1:]}"

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class Bench:
    """A copy of the tree, in which a mutant stands while tests run."""

    def __init__(self, tree: Path, python: str) -> None:
        self.tree, self.python = tree, python
        self.forks: dict[str, Runs] = {}
        self.usual: dict[tuple[str, ...], float] = {}
        "Seconds that tests take without a mutant."

    def ask(self, area: Area, tests: Iterable[str], limit: float) -> tuple[str, str]:
        kind = json.dumps(area.variables)
        if kind not in self.forks:
            self.forks[kind] = Runs(self.tree, self.python, area.variables)
        return self.forks[kind].ask(tests, limit)

    def limit(self, area: Area, tests: tuple[str, ...]) -> float:
        if tests not in self.usual:
            started = time.monotonic()
            outcome, by = self.ask(area, tests, 1200)
            if outcome != "survived":
                sys.exit(f"without a mutant {by} ends the tests {', '.join(tests)}: mend that first")
            self.usual[tests] = time.monotonic() - started
        return SLOWER[0] * self.usual[tests] + SLOWER[1]

    def outcome(self, mutant: Mutant, quick: bool) -> tuple[str, str, str]:
        """What the nearest tests said and by which of them, and the change. Tests of the module's name come first."""
        area, path = AREAS[mutant.area], self.tree / mutant.module
        source = path.read_text(encoding="utf-8")
        after = mutated(mutant, source)
        said = "survived", ""
        for tests in (area.tests,) if quick else (area.tests, area.further):
            limit = self.limit(area, tests)
            path.write_text(after, encoding="utf-8")
            try:
                own_first = sorted(tests, key=lambda name: path.stem not in name)
                said = self.ask(area, own_first, limit)
            finally:
                path.write_text(source, encoding="utf-8")
            if said[0] == "caught":
                break
        return *said, change(source, after)


def run(sample: list[Mutant], state: Path, python: str, again: bool, quick: bool) -> None:
    """Try every mutant of the sample that has no outcome yet."""
    state.parent.mkdir(parents=True, exist_ok=True)
    done = {row["key"]: row for row in rows(state)}
    with tempfile.TemporaryDirectory(prefix="paperlm-mutants-") as folder:
        bench = Bench(copy(Path(folder)), python)
        for number, mutant in enumerate(sample, 1):
            before = done.get(mutant.key)
            if before and not (again and before["outcome"] == "survived"):
                continue
            started = time.monotonic()
            outcome, by, changed = bench.outcome(mutant, quick)
            row = {"key": mutant.key, "area": mutant.area, "module": mutant.module, "line": mutant.start[0]}
            row |= {"operator": mutant.operator, "change": changed, "outcome": outcome, "by": by}
            row |= {"first": before["first"] if before else outcome, "seconds": round(time.monotonic() - started, 1)}
            if outcome == "caught" or not quick:
                with state.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            print(f"{number} of {len(sample)}: {outcome} {by} {mutant.key}", flush=True)


def rows(state: Path) -> list[dict[str, Any]]:
    """The last outcome of each mutant."""
    lines = state.read_text(encoding="utf-8").splitlines() if state.is_file() else []
    return list({row["key"]: row for row in map(json.loads, lines)}.values())


def record(outcomes: list[dict[str, Any]], of: dict[str, int], earlier: dict[str, Any]) -> dict[str, Any]:
    """What is kept: counts, what survived with the reason that stood there, and what a test was written for."""
    reasons = {(row["module"], row["change"]): row["reason"] for row in earlier.get("survivors", [])}
    kept = ("area", "module", "line", "operator", "change")
    survivors = [row for row in outcomes if row["outcome"] == "survived"]
    mended = [row for row in outcomes if row["first"] == "survived" != row["outcome"]]
    survivors = [
        {**{name: row[name] for name in kept}, "reason": reasons.get((row["module"], row["change"]), "")}
        for row in survivors
    ]
    equivalent = [row for row in survivors if row["reason"].startswith("equivalent")]
    counts = {}
    for area in AREAS:
        ours = [row for row in outcomes if row["area"] == area]
        counts[area] = {
            "possible": of[area],
            "sampled": len(ours),
            "caught": sum(row["outcome"] == "caught" for row in ours),
            "equivalent": sum(row["area"] == area for row in equivalent),
        }
    caught = sum(row["outcome"] == "caught" for row in outcomes)
    return {
        "seed": SEED,
        "mutants": len(outcomes),
        "caught": caught,
        "caught before tests were added": sum(row["first"] == "caught" for row in outcomes),
        "equivalent": len(equivalent),
        "share caught of those that are not equivalent": round(caught / max(1, len(outcomes) - len(equivalent)), 4),
        "areas": counts,
        "survivors": survivors,
        "mended": [{**{name: row[name] for name in kept}, "by": row["by"]} for row in mended],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="interpreter of the project's environment")
    parser.add_argument("--state", type=Path, default=ROOT / "results/mutants.jsonl", help="outcomes so far")
    parser.add_argument("--out", type=Path, help="the record")
    parser.add_argument("--again", action="store_true", help="try survivors once more")
    parser.add_argument("--quick", action="store_true", help="leave those to a later call that the nearest tests miss")
    parser.add_argument("--area", choices=AREAS, action="append", help="only mutants of these")
    chosen = parser.parse_args()
    everything = possible()
    sample = drawn(everything, is_python)
    of = {area: sum(m.area == area for m in everything) for area in AREAS}
    run(
        [m for m in sample if not chosen.area or m.area in chosen.area],
        chosen.state,
        chosen.python,
        chosen.again,
        chosen.quick,
    )
    if chosen.out:
        keys = {mutant.key for mutant in sample}
        outcomes = [row for row in rows(chosen.state) if row["key"] in keys]
        earlier = json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.is_file() else {}
        chosen.out.write_text(json.dumps(record(outcomes, of, earlier), indent=1) + "\n", encoding="utf-8")
        unexplained = [row for row in outcomes if row["outcome"] == "survived"]
        sys.exit(f"{len(unexplained)} of {len(outcomes)} mutants survived: {chosen.out} says why, or lacks a reason")


if __name__ == "__main__":
    main()
