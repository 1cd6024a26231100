"""Random damage to every kind of file that steers a number, and the command that reads it next.

`python tests/support_fuzz.py --tries 5000 --seed 1 --out docs/reference/fuzz.json` (`make fuzz`) keeps the counts;
`tests/test_fuzz.py` takes seconds of it. A try is drawn from the seed and its own number alone, so that
`--seed 1 --only 4711` does one again. Stages (`support_fuzz_stages.py`) say what is damaged, which command runs, and
what comes out of it where nothing was damaged. How a try ends:

    no damage     a line in the place of the same line
    refused       exit status 2 and an error of ours that names the file, or what it is of, and the remedy
    same          the same numbers and bytes as without the damage
    made again    the same, and the damaged file is whole again
    another plan  of declarations alone: what the edit says is valid, and is planned as it says
    not run       a file that is gone: what it would have told stands as `not run`, and every other number is the same
    rows left     a line of measurements that is gone, or stands elsewhere: every number shown is one of those measured
    continued     killed at a random moment, the same command ends in the same bytes

Anything else is a fault: another number, a traceback, a hang, a crash, an error without a file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import io
import json
import os
import random
import re
import selectors
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import tqdm
from support import made_with, torch_of
from support_fuzz_damage import HARMS, drawn

from paperlm import checks
from paperlm.plan import project as project_module

OPEN = checks.open_project

LIMIT = 60
"Seconds after which a command hangs: many times what the longest takes (`longest_seconds` of the record)."
LIMIT_IS = "PAPERLM_FUZZ_LIMIT"
"Environment variable that `--limit` sets, for a machine that has other work: processes and modules read it alike."
SENTENCES = 4000
"Characters of an error, which may list every mistake of a declaration: more is no sentence."
FINE = ("no damage", "refused", "same", "made again", "another plan", "not run", "rows left", "continued")


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit status (None: it was killed, or hung), what it said, and what there then is."""

    status: int | None
    said: str
    found: Any = None


@dataclass
class Stage:
    """A folder whose files are damaged in a copy, and what runs there."""

    name: str
    root: Path
    files: Sequence[str]
    "below the root: what the command reads"
    run: Callable[[Path, str], Any]
    "In a process of its own, in the copy, with the name of the damaged file; gives what came out of it."
    other: Callable[[str], Path]
    "The file of the same place of another job."
    weight: float = 1.0
    "how often it is drawn"
    declares: bool = False
    "whether its files are edited by hand, so that another valid content is another plan"
    allowed: Callable[[Any, Any, Path, Path], str] = lambda found, expected, damaged, whole: ""
    "How a try ends whose outcome is another one than expected; empty: with another number."
    killed: bool = False
    "whether its command works for long, so that it is killed as well"
    reader: Callable[[str], str] = lambda name: ""
    "What of its commands reads a file; files of one reader share what comes out without damage."
    _expected: dict[str, Any] = field(default_factory=dict)
    took: float = 0.0
    "seconds of its command without damage"

    def without_damage(self, name: str, folder: Path) -> Any:
        """What the command gives where nothing was damaged."""
        reader = self.reader(name)
        if reader not in self._expected:
            shutil.copytree(self.root, folder, symlinks=True)
            started = time.monotonic()
            done = alone(lambda: self.run(folder, name), folder)
            self.took = time.monotonic() - started
            shutil.rmtree(folder)
            assert done.status == 0, f"{self.name}, {name}: {done.said}"
            self._expected[reader] = done.found
        return self._expected[reader]


def limit() -> float:
    return float(os.environ.get(LIMIT_IS, LIMIT))


def alone(work: Callable[[], Any], folder: Path, kill_after: float = 0.0) -> Done:
    """Run in a forked process in the folder. What raises no error of ours ends in status 1."""
    answer = folder.with_name(f"{folder.name}.answer")
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _child(work, folder, answer)
    until = time.monotonic() + (kill_after or limit())
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.002)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0:
        return Done(None, "killed" if status == -signal.SIGKILL else f"crashed: signal {-status}")
    return Done(**json.loads(answer.read_text(encoding="utf-8")))


def _child(work: Callable[[], Any], folder: Path, answer: Path) -> None:
    """Does not return."""
    faulthandler.disable()
    tqdm.tqdm.set_lock(threading.RLock())  # its own is shared by all children, also by one that was killed holding it
    os.chdir(folder)
    said = io.StringIO()
    status, found = 1, None
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            found = work()
            status = 0
        except SystemExit as error:  # of the command line: its exit status
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            said.write(traceback.format_exc())
    done = {"status": status, "said": said.getvalue()[-60_000:], "found": found}
    answer.write_text(json.dumps(done, default=str), encoding="utf-8", errors="replace")
    os._exit(0)


def command(*arguments: str) -> None:
    """A verb of the command line; SystemExit with its status unless that is 0."""
    from paperlm.cli import main

    if status := main(list(arguments)):
        raise SystemExit(status)


def in_folder(folder: Path, project: Any = None) -> None:
    """From here on the verbs work in this folder. `project`: opened before, of a folder with the same declarations."""

    def opened(config: Any = None, root: Path = folder) -> Any:
        if project is None:
            return OPEN(config, root)
        project.root = folder
        project.places = type(project.places)(folder, project.scale.scale)
        return project

    project_module.clone = lambda: folder
    checks.open_project = opened


def content(path: Path) -> bytes | None:
    """None of what is no file, or a link."""
    return path.read_bytes() if path.is_file() and not path.is_symlink() else None


def judged(stage: Stage, name: str, harm: str, done: Done, expected: Any, folder: Path) -> str:
    """How a try ended; what is in none of FINE is a fault."""
    path, whole = folder / name, stage.root / name
    if [*folder.rglob("*.executed")]:
        return "executed"
    if done.status is None:
        return "hang" if done.said == "killed" else done.said
    if done.status == 0:
        # what JSON makes of it
        if done.found == json.loads(json.dumps(expected, default=str)):
            return "made again" if content(path) == content(whole) else "same"
        if stage.declares:
            return "another plan"
        return stage.allowed(done.found, expected, path, whole) or "another number"
    if done.status != 2 or "Traceback (most recent call last)" in done.said:
        return "traceback" if "Traceback" in done.said else f"ended in {done.status}"
    said = re.split(r"^(?:\w+: )?error: ", done.said, maxsplit=1, flags=re.MULTILINE)[-1].strip()
    if len(said) > SENTENCES:
        return "no sentence"
    near = (path.name, path.parent.name, path.stem)
    return "refused" if any(part in said for part in near) else "names no file"


@dataclass(frozen=True)
class Try:
    """One damage and how it ended."""

    number: int
    stage: str
    file: str
    harm: str
    end: str
    said: str = ""
    seconds: float = 0.0
    made: dict[str, Any] = field(default_factory=dict)  # what `made_with` says


Group = Callable[[Path], Iterator[Stage]]
"Lays out stages of one kind in a folder."


def dealt(groups: Mapping[str, tuple[Group, float]], seed: int, numbers: Iterable[int]) -> dict[str, list[int]]:
    """Group -> the numbers of the tries that are drawn from it, in the order of the groups: what the last ones load
    would make every process that is forked after them slower."""
    weights = [weight for _, weight in groups.values()]
    drawn = [(random.Random(f"{seed} {number}").choices([*groups], weights)[0], number) for number in numbers]
    return {name: [number for group, number in drawn if group == name] for name in groups}


def attempt(stages: Sequence[Stage], seed: int, number: int, base: Path) -> Try:
    """Try `number` of a seed."""
    rng = random.Random(f"{seed} {number} within its group")
    stage = rng.choices(stages, [stage.weight for stage in stages])[0]
    name = rng.choice(stage.files)
    folder = base / "try"
    shutil.rmtree(folder, ignore_errors=True)
    expected = stage.without_damage(name, folder)
    started = time.monotonic()
    shutil.copytree(stage.root, folder, symlinks=True)
    if stage.killed and rng.random() < 0.2:
        harm = "killed"
        after = rng.random() * stage.took
        alone(lambda: stage.run(folder, name), folder, kill_after=after)
        done = alone(lambda: stage.run(folder, name), folder)
        end = judged(stage, name, harm, done, expected, folder)
        end = "continued" if end in ("same", "made again") else f"killed: {end}"
    else:
        harm = drawn(rng, folder / name)
        HARMS[harm](rng, folder / name, stage.other(name))
        if content(folder / name) == content(stage.root / name):
            return Try(number, stage.name, name, harm, "no damage")
        done = alone(lambda: stage.run(folder, name), folder)
        end = judged(stage, name, harm, done, expected, folder)
    return Try(number, stage.name, name, harm, end, done.said[-3000:], time.monotonic() - started)


def attempts(
    groups: Mapping[str, tuple[Group, float]], seed: int, numbers: Sequence[int], base: Path, until: float
) -> Iterator[Try]:
    """The tries, until the time is over."""
    for name, mine in dealt(groups, seed, numbers).items():
        if mine:
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars
                stages = [*groups[name][0](base)]
        for number in mine:
            if time.monotonic() > until:
                return
            yield attempt(stages, seed, number, base)


def worker(base: Path, work: Callable[[Path], Iterable[Try]]) -> tuple[int, IO[str]]:
    """A forked process that makes tries in a folder of its own: its id, and the lines that it writes of them."""
    base.mkdir()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, os.fdopen(reading, encoding="utf-8", errors="replace")
    status = 1
    try:
        with os.fdopen(writing, "w", encoding="utf-8", errors="replace") as lines:
            for one in work(base):
                print(json.dumps(dataclasses.asdict(one)), file=lines, flush=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def told(workers: Sequence[tuple[int, IO[str]]]) -> Iterator[Try]:
    """The tries of all of them, as they end. RuntimeError for a worker that broke off."""
    with selectors.DefaultSelector() as waiting:
        for pid, lines in workers:
            waiting.register(lines, selectors.EVENT_READ, pid)
        while waiting.get_map():
            for key, _ in waiting.select():
                if line := key.fileobj.readline():
                    yield Try(**json.loads(line))
                    continue
                waiting.unregister(key.fileobj)
                if os.waitpid(key.data, 0)[1]:
                    raise RuntimeError("the tries broke off, see above")


def counted(tries: Sequence[Try], seed: int, earlier: Sequence[Try] = ()) -> dict[str, Any]:
    """What docs/reference/fuzz.json keeps. `earlier`: tries that were made again since."""

    def listed(tries: Iterable[Try]) -> list[dict[str, Any]]:
        wrong = (one for one in tries if one.end not in FINE)
        return [{"try": f.number, "stage": f.stage, "file": f.file, "damage": f.harm, "end": f.end} for f in wrong]

    return {
        "seed": seed,
        "tries": len(tries),
        "ends": dict(sorted(Counter(one.end for one in tries).items())),
        "stages": {
            name: dict(sorted(Counter(one.end for one in tries if one.stage == name).items()))
            for name in sorted({one.stage for one in tries})
        },
        "damages": dict(sorted(Counter(one.harm for one in tries).items())),
        "longest_seconds": round(max((one.seconds for one in tries), default=0.0), 1),
        "faults": listed(tries),
        "mended": [one for one in listed(earlier) if one not in listed(tries)],
    }


def sentence(found: Mapping[str, Any]) -> str:
    """What the documents say of the counts."""

    def ended(*ends: str) -> str:
        return f"{sum(found['ends'].get(end, 0) for end in ends):,}"

    made, wrong = torch_of(found["made with"]), len(found["faults"]) or "none"
    mended = f" {len(found['mended'])} that did was mended and tried again." if found["mended"] else ""
    return (
        f"Of {found['tries']:,} tries (seed {found['seed']}, with {made}), {ended('refused')} were refused so, "
        f"{ended('same', 'made again', 'continued')} ended in the same numbers, {ended('no damage')} left the file as "
        f"it was, {ended('not run', 'rows left')} ended without the numbers of the file that was gone, "
        f"{ended('another plan')} were valid edits that are planned otherwise, and {wrong} ended in another number, a "
        f"traceback, a hang or no sentence.{mended}"
    )


def kept(state: Path) -> list[Try]:
    """The tries that were made, in order: a later one of a number counts."""
    lines = state.read_text(encoding="utf-8").splitlines() if state.is_file() else []
    return [Try(**json.loads(line)) for line in lines]


def main() -> int:
    from support_fuzz_stages import STAGES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the tries")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which a command hangs")
    parser.add_argument("--state", type=Path, help="tries so far, of the same seed, to go on from")
    parser.add_argument("--only", type=int, nargs="+", help="these tries alone, as a fault names them")
    parser.add_argument("--stages", nargs="+", choices=[*STAGES], help="of these alone: numbers then are other tries")
    parser.add_argument("--verbose", action="store_true", help="a line for each try, and what a fault said")
    parser.add_argument("--out", type=Path, help="JSON file for the counts")
    options = parser.parse_args()
    os.environ |= {LIMIT_IS: str(options.limit), "OMP_NUM_THREADS": "1"}
    end = time.monotonic() + options.seconds
    groups = {name: STAGES[name] for name in STAGES if name in (options.stages or STAGES)}
    before, here = kept(options.state) if options.state else [], made_with()
    made = {one.number: one for one in before}
    numbers = options.only or [number for number in range(options.tries) if number not in made]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder).resolve()
        workers = [
            worker(
                base / str(n), lambda at, n=n: attempts(groups, options.seed, numbers[n :: options.workers], at, end)
            )
            for n in range(options.workers)
        ]
        for told_one in told(workers):
            made[told_one.number] = one = dataclasses.replace(told_one, made=here)
            if options.state:
                with options.state.open("a", encoding="utf-8") as file:
                    print(json.dumps(dataclasses.asdict(one)), file=file)
            if options.verbose or one.end not in FINE:
                print(f"{one.number}\t{one.stage}\t{one.file}\t{one.harm}\t{one.end}\t{one.seconds:.1f}", flush=True)
            if one.end not in FINE or (options.verbose and options.only):
                print("    " + one.said.replace("\n", "\n    "), flush=True)
    machines = Counter(json.dumps(one.made) for one in made.values()).most_common()
    used = [{"tries": count, **json.loads(machine)} for machine, count in machines]
    found = counted([*made.values()], options.seed, [one for one in before if one is not made[one.number]])
    found |= {"limit_seconds": options.limit, "made with": used}
    print(json.dumps(found["ends"]))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return bool(found["faults"])


if __name__ == "__main__":
    sys.exit(main())
