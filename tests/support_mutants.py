"""Mutants: faults that cosmic-ray makes in the source, one at a time, and whether the nearest tests catch them.

`make mutants` draws a sample and keeps what came out in docs/reference/mutants.json. It runs where cosmic-ray is
installed, and the tests in the project's own environment, in a copy of the tree. Each mutant's outcome is kept at once,
so that a call goes on where the last one was stopped; `--again` tries those that survived once more, with the tests as
they are now. A survivor is either equivalent, for a reason that is written into the record by hand and stays there, or
asks for a test.

What counts as caught: a test fails with the mutant, and passes without it, before and after. `--without-failing` leaves
out tests that fail without one, on a machine with other versions, and the record names them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support_mutants_areas import AREAS
from support_mutants_bench import CHANGING, Bench, copy, environment_of, path_of
from support_mutants_sample import ROOT, SAMPLE, SEED, Mutant, change, sampled

MADE = "import json, support; print(json.dumps(support.made_with()))"
"What a record says of the machine and of its versions."


class Step(NamedTuple):
    """Tests to run, of a mutant or, to know how long they take, without one."""

    stage: int
    number: int
    area: str
    tests: tuple[str, ...]
    mutant: Mutant | None


class Survey:
    """What there is to do for a sample, for threads that have a bench each.

    The nearest tests are asked about every mutant before further ones about those that they miss, and short ones before
    long ones, so that a call that is stopped has answered much.
    """

    def __init__(self, sample: Sequence[Mutant], quick: bool, without_failing: bool) -> None:
        self.quick, self.without_failing = quick, without_failing
        self.usual: dict[tuple[str, str], tuple[float, set[str]]] = {}
        "(variables, test) -> seconds that it takes without a mutant, and what fails there"
        self.steps = [Step(1, n, m.area, AREAS[m.area].tests, m) for n, m in enumerate(sample, 1)]
        self.left: dict[str, int] = {}
        "of a mutant that the nearest tests missed: runs of further ones to come"
        self.ended: set[str] = set()
        self.seconds: Counter[str] = Counter()
        self.busy = 0
        self.error = ""
        self.changed = threading.Condition()
        asked: dict[tuple[str, str], int] = {}
        for area in dict.fromkeys(step.area for step in self.steps):
            for stage, tests in ((0, AREAS[area].tests), (2, () if quick else AREAS[area].further)):
                for test in tests:
                    key = self.named(area, test)
                    if stage < asked.get(key, 9):
                        asked[key] = stage
        areas = {self.named(step.area, test): step.area for step in self.steps for test in self.all_of(step.area)}
        self.steps += [Step(stage, 0, areas[key], (key[1],), None) for key, stage in asked.items()]

    @staticmethod
    def named(area: str, test: str) -> tuple[str, str]:
        return json.dumps(AREAS[area].variables), test

    @staticmethod
    def all_of(area: str) -> tuple[str, ...]:
        return (*AREAS[area].tests, *AREAS[area].further)

    def known(self, step: Step) -> bool:
        return all(self.named(step.area, test) in self.usual for test in step.tests)

    def turn(self, step: Step) -> tuple[int, float, int]:
        """The lowest is taken first."""
        found = (self.usual.get(self.named(step.area, test), (0.0, ()))[0] for test in step.tests)
        return step.stage, sum(found) if step.mutant else 0.0, step.number

    def take(self) -> Step | None:
        """What is to be done next; None when nothing is left, or it was stopped."""
        with self.changed:
            while not self.error:
                self.steps = [s for s in self.steps if s.mutant is None or s.mutant.key not in self.ended]
                ready = (step for step in self.steps if step.mutant is None or self.known(step))
                step = min(ready, key=self.turn, default=None)
                if step is not None:
                    self.steps.remove(step)
                    self.busy += 1
                    return step
                if not self.busy:
                    return None
                self.changed.wait()
        return None

    def without(self, step: Step, seconds: float, failing: Iterable[str]) -> None:
        """What a test says without a mutant."""
        with self.changed:
            self.usual[self.named(step.area, step.tests[0])] = seconds, set(failing)
            if failing and not self.without_failing:
                self.error = f"without a mutant {', '.join(failing)} fails: mend that first"

    def usually(self, step: Step) -> tuple[float, set[str]]:
        """Seconds that the tests of a step take, and what to leave out of them."""
        with self.changed:
            found = [self.usual[self.named(step.area, test)] for test in step.tests]
        return sum(seconds for seconds, _ in found), set().union(*(failing for _, failing in found))

    def say(self, step: Step, said: str, seconds: float, but: set[str]) -> bool:
        """Take in what tests said of a mutant. Whether that was the last word on it."""
        with self.changed:
            key = step.mutant.key
            for test in step.tests:
                failing = self.usual[self.named(step.area, test)][1]
                failing.update(name for name in but if name.split("::")[0] == path_of(test))
            self.seconds[key] += seconds
            if key in self.ended:
                return False
            further = () if self.quick else AREAS[step.area].further
            if said == "caught" or (step.stage == 1 and not further):
                self.ended.add(key)
                return True
            if step.stage == 1:
                self.left[key] = len(further)
                self.steps += [step._replace(stage=3, tests=(test,)) for test in further]
                return False
            self.left[key] -= 1
            if not self.left[key]:
                self.ended.add(key)
            return not self.left[key]

    def left_out(self, area: str) -> list[str]:
        """Tests of an area that fail without a mutant."""
        with self.changed:
            found = [self.usual.get(self.named(area, test), (0.0, set()))[1] for test in self.all_of(area)]
            return sorted(set().union(*found))

    def done(self, error: str = "") -> None:
        with self.changed:
            self.busy -= 1
            self.error = self.error or error
            self.changed.notify_all()


def work(survey: Survey, bench: Bench, keep: Callable[[Mutant, str, str, str], None]) -> None:
    """Do what is to be done until nothing is left."""
    while (step := survey.take()) is not None:
        error, started = "", time.monotonic()
        try:
            if step.mutant is None:
                failing = bench.runs(AREAS[step.area]).failing(step.tests[0], 1200)
                survey.without(step, time.monotonic() - started, failing)
            else:
                usual, but = survey.usually(step)
                said, by = bench.outcome(step.mutant, step.tests, usual, but)
                if survey.say(step, said, time.monotonic() - started, but):
                    keep(step.mutant, said, by, change(*bench.change(step.mutant)))
        except Exception:
            error = traceback.format_exc()
        survey.done(error)


def run(sample: list[Mutant], chosen: argparse.Namespace) -> None:
    """Try every mutant of the sample that has no outcome yet."""
    state = chosen.state
    state.parent.mkdir(parents=True, exist_ok=True)
    done = {row["key"]: row for row in rows(state)}
    asked = [m for m in sample if m.key not in done or (chosen.again and done[m.key]["outcome"] == "survived")]
    survey = Survey(asked, chosen.quick, chosen.without_failing)
    with tempfile.TemporaryDirectory(prefix="paperlm-mutants-") as folder:
        trees = [copy(Path(folder) / str(number)) for number in range(chosen.workers)]
        reading = environment_of(trees[0], {})
        reading["PYTHONPATH"] += f"{os.pathsep}{trees[0]}/tests"
        made = json.loads(subprocess.check_output([chosen.python, "-c", MADE], cwd=trees[0], env=reading, text=True))

        def keep(mutant: Mutant, outcome: str, by: str, changed: str) -> None:
            before = done.get(mutant.key)
            row = {"key": mutant.key, "area": mutant.area, "module": mutant.module, "line": mutant.start[0]}
            row |= {"operator": mutant.operator, "change": changed, "outcome": outcome, "by": by}
            row |= {"first": before["first"] if before else outcome, "seconds": round(survey.seconds[mutant.key], 1)}
            row |= {"made": made, "left_out": survey.left_out(mutant.area)}
            with CHANGING:
                if outcome == "caught" or not chosen.quick:
                    with state.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                print(f"{len(survey.ended)} of {len(asked)}: {outcome} {by} {mutant.key}", flush=True)

        benches = [Bench(tree, chosen.python) for tree in trees]
        threads = [threading.Thread(target=work, args=(survey, bench, keep)) for bench in benches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for bench in benches:
            bench.close()
    if survey.error:
        sys.exit(survey.error)


def rows(state: Path) -> list[dict[str, Any]]:
    """The last outcome of each mutant."""
    lines = state.read_text(encoding="utf-8").splitlines() if state.is_file() else []
    return list({row["key"]: row for row in map(json.loads, lines)}.values())


def record(
    outcomes: list[dict[str, Any]], of: dict[str, int], earlier: dict[str, Any], size: int = SAMPLE
) -> dict[str, Any]:
    """What is kept: counts, what survived with the reason that stood there, and what a test was written for."""
    reasons = {(row["module"], row["change"]): row["reason"] for row in earlier.get("survivors", [])}
    kept = ("area", "module", "line", "operator", "change")
    survivors = [row for row in outcomes if row["outcome"] == "survived"]
    unasked = sorted({name for row in survivors for name in row["left_out"]})
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
            "tried": len(ours),
            "caught": sum(row["outcome"] == "caught" for row in ours),
            "equivalent": sum(row["area"] == area for row in equivalent),
        }
    caught = sum(row["outcome"] == "caught" for row in outcomes)
    machines = [row["made"] for row in outcomes]
    return {
        "seed": SEED,
        "sample": size,
        "mutants": len(outcomes),
        "caught": caught,
        "caught before tests were added": sum(row["first"] == "caught" for row in outcomes),
        "equivalent": len(equivalent),
        "share caught of those that are not equivalent": round(caught / max(1, len(outcomes) - len(equivalent)), 4),
        "areas": counts,
        "made with": [made for n, made in enumerate(machines) if made not in machines[:n]],
        "tests that survivors were not asked, since they fail there without a mutant": unasked,
        "survivors": survivors,
        "mended": [{**{name: row[name] for name in kept}, "by": row["by"]} for row in mended],
    }


def sentence(found: Mapping[str, Any]) -> str:
    """What the documents say of a record."""
    possible = sum(area["possible"] for area in found["areas"].values())
    open_ones = found["mutants"] - found["caught"] - found["equivalent"]
    tried = "all" if found["mutants"] == found["sample"] else f"{found['mutants']}"
    torch = " and ".join(sorted({made["packages"]["torch"] for made in found["made with"]}))
    return (
        f"Of {found['sample']} faults (seed {found['seed']}), drawn from {possible:,} in {len(found['areas'])} areas, "
        f"{tried} were tried, with PyTorch {torch}: {found['caught']} were caught, "
        f"{found['caught'] - found['caught before tests were added']} of them by tests that were written for them; "
        f"{found['equivalent']} change nothing, for reasons that the record gives; {open_ones or 'none'} went unseen. "
        f"That is {found['share caught of those that are not equivalent']:.1%} of those that change something."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="interpreter of the project's environment")
    parser.add_argument("--state", type=Path, default=ROOT / "results/mutants.jsonl", help="outcomes so far")
    parser.add_argument("--out", type=Path, help="the record")
    parser.add_argument("--again", action="store_true", help="try survivors once more")
    parser.add_argument("--quick", action="store_true", help="leave those to a later call that the nearest tests miss")
    parser.add_argument("--workers", type=int, default=1, help="copies of the tree that share the mutants")
    parser.add_argument("--without-failing", action="store_true", help="leave out tests that fail without a mutant")
    parser.add_argument("--area", choices=AREAS, action="append", help="only mutants of these")
    parser.add_argument("--key", nargs="+", default=[""], help="only mutants with one of these in their key")
    parser.add_argument("--tests", nargs="+", help="ask these alone, in place of the area's: who survives them is left")
    chosen = parser.parse_args()
    sample, of = sampled(chosen.state.with_suffix(".sample.json"))
    if chosen.tests:
        chosen.quick = True
        AREAS.update({name: area._replace(tests=tuple(chosen.tests), further=()) for name, area in AREAS.items()})
    asked = (m for m in sample if any(part in m.key for part in chosen.key))
    run([m for m in asked if not chosen.area or m.area in chosen.area], chosen)
    if chosen.out:
        keys = {mutant.key for mutant in sample}
        outcomes = [row for row in rows(chosen.state) if row["key"] in keys]
        earlier = json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.is_file() else {}
        found = record(outcomes, of, earlier, len(sample))
        chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        unexplained = [row for row in outcomes if row["outcome"] == "survived"]
        sys.exit(f"{len(unexplained)} of {len(outcomes)} mutants survived: {chosen.out} says why, or lacks a reason")


if __name__ == "__main__":
    main()
