"""A job that dies, or runs out of disk, at the n-th change to its files; then the same command again.

`python tests/support_kills.py --every` (`make kills`) goes through every place and keeps what came out in
docs/reference/kills.json; `tests/test_kills.py` takes a sample.

Changes are seen by Python's audit events, so that those of libraries count: files opened for writing, folders made,
names changed, files and folders removed. What is made: the data of a model, its training with checkpoints and a
snapshot (`pretrain`), a removal of its blocks behind that, each of whose measurements is kept (`block_removal`), and of
every other kind a small job whose parents are there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support import made_with, torch_of

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate")
ADDING = "open to add"
WHOLE = ("pretrain", "block_removal")
"Kinds that are surveyed with all that they stand on."
ROOM = 200
"Bytes that a file can still have on the disk that is full."
SHARES = 4
"Of the places of a kind, where several processes go through them."
FULL, OTHER = 28, 1
"Exit status of a process that said so, and of one that ended in another error."

watch: Callable[[str, str], None] | None = None
"Called before each change, with the event and the path."


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if watch is None:
        return
    if event == "open":
        path, _, flags = arguments
        if not isinstance(path, int) and flags & (os.O_WRONLY | os.O_RDWR):
            watch(event if flags & os.O_TRUNC else ADDING, os.fsdecode(path))
    elif event in CHANGES:
        watch(event, os.fsdecode(arguments[0]))


def torn(path: str) -> None:
    """The file as a kill within its last write leaves it."""
    if os.path.isfile(path) and not os.path.islink(path):
        os.truncate(path, os.path.getsize(path) // 2)


def counting(root: Path, at: int, then: Callable[[str, str], None]) -> list[str]:
    """From now on changes below `root` are listed, and `then` is called before change number `at`, from 0."""
    global watch
    seen: list[str] = []

    def watched(event: str, path: str) -> None:
        # Removal of a tree names entries relative to a folder that is open.
        if os.path.isabs(path) and not path.startswith(f"{root}{os.sep}"):
            return
        seen.append(f"{event} {path.removeprefix(str(root))}")
        if len(seen) == at + 1:
            then(event, path)

    watch = watched
    return seen


def die(event: str, path: str) -> None:
    global watch
    watch = None
    if event == "os.rename":  # what is renamed was written last
        torn(path)
    elif event == "open":  # between the opening, which empties a file, and the first byte
        open(path, "wb").close()
    os.kill(os.getpid(), signal.SIGKILL)


def fill(event: str, path: str) -> None:
    """From here on the kernel refuses each byte of a file beyond the first few, whoever writes it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, resource.RLIM_INFINITY))


def child(work: Callable[[], None]) -> tuple[int, str]:
    """Run in a forked process. Returns its exit status, negative for a signal, and what it had to say."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        status, said = 0, ""
        try:
            work()
        except BaseException as error:
            from paperlm.errors import PaperLMError
            from paperlm.files import is_full_disk

            said = f"{type(error).__name__}: {error}"
            mendable = isinstance(error, PaperLMError) or is_full_disk(error)  # what the command line says in a line
            status = FULL if mendable else OTHER
        os.write(writing, said.encode()[:60_000])
        os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


def changes(base: Path, start: Path, do: Callable[[Path], None]) -> list[str]:
    """What a run from `start` that nothing happens to changes, in order."""
    root, listed = base / "counted", base / "counted.json"
    shutil.copytree(start, root)

    def work() -> None:
        seen = counting(root, -1, lambda event, path: None)
        do(root)
        global watch
        watch = None
        listed.write_text(json.dumps(seen))

    status, said = child(work)
    assert status == 0, said
    return json.loads(listed.read_text())


def fault(
    start: Path,
    root: Path,
    do: Callable[[Path], None],
    how: str,
    at: int,
    ends: Callable[[Path], Any],
    expected: Any,
) -> str:
    """What is wrong after a kill or a full disk at change `at` and the same command again; empty if nothing is."""

    def hurt() -> None:
        counting(root, at, die if how == "kill" else fill)
        do(root)

    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(start, root)
    status, said = child(hurt)
    if how == "kill" and status != -signal.SIGKILL:
        return f"was not killed: {status} {said}"
    if how == "full" and status not in (0, FULL):
        return f"ended in {status} {said}"
    if how == "full" and status == FULL and ("\n" in said or not any(w in said for w in ("free", "too large"))):
        return f"does not say in a sentence what to do: {said}"
    status, said = child(lambda: do(root))
    if status:
        return f"the same command then ended in {status} {said}"
    left = [p.relative_to(root).as_posix() for p in root.rglob("*") if p.name.endswith((".tmp", ".old", ".gone"))]
    if left:
        return f"left {left[0]} behind"
    return "" if ends(root) == expected else "the same command then gave another outcome"


def job_of(kind: str) -> Any:
    from support import smoke_run
    from support_small_jobs import job

    from paperlm.jobs import parse_job

    trained = smoke_run(steps=5, eval_every=2, train_examples=40, validation_tokens=600)
    if kind in WHOLE:
        removal = {"kind": "block_removal", "of": trained.canonical(), "at": 2, "documents": 4}
        return trained if kind == "pretrain" else parse_job(removal)
    return job(kind)


def make(root: Path, kind: str, local_data: Path, parents_alone: bool = False) -> None:
    """The job with its parents, or these alone. A training keeps a snapshot after two updates."""
    from paperlm.jobs import Machine
    from paperlm.record.places import Places
    from paperlm.run import Maker

    wanted = job_of(kind)
    trainings = [job for job in (*wanted.ancestors(), wanted) if job.has_curve and 2 in job.snapshots()]
    keep = {job.job_id: {2} for job in trainings}
    for name, parent in wanted.parents().items():
        if (state := wanted.snapshot(name)) is not None:
            keep.setdefault(parent.job_id, set()).add(state)
    machine = Machine(device="cpu", progress=False, checkpoint_updates=2)
    kept = {job_id: tuple(sorted(states, key=str)) for job_id, states in keep.items()}
    maker = Maker(Places(root, "smoke"), machine, str(local_data), kept)
    for job in wanted.parents().values() if parents_alone else (wanted,):
        maker.with_parents(job)


def outcome(root: Path, kind: str) -> dict[str, Any]:
    """All that must be the same: records but for cost and environment, the bytes of the model and of the data."""
    from paperlm.files import sha256_of
    from paperlm.record.places import Places
    from paperlm.record.record import read_record

    places, found, wanted = Places(root, "smoke"), {}, job_of(kind)
    for job in (*wanted.ancestors(), wanted):
        if (path := root / places.made(job)).is_file():
            found[job.job_id] = read_record(path, job.job_id).model_dump(exclude={"cost", "environment"})
    files = [p for name in ("smoke/models", "data") for p in (root / "results" / name).rglob("*") if p.is_file()]
    # How far a preparation is, is read by nothing once its manifest is there.
    kept = [p for p in files if "locks" not in p.parts and not p.name.endswith(".progress.json")]
    return found | {p.relative_to(root).as_posix(): sha256_of(p) for p in sorted(kept)}


def begin() -> None:
    """See changes from now on, and load in this process what its children need."""
    sys.addaudithook(hook)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - progress bars of every child


def survey(
    kind: str, hows: tuple[str, ...], sample: int | None, part: str = "", share: tuple[int, int] = (0, 1)
) -> Iterator[dict[str, Any]]:
    """A row for each change with `part` in its name, `sample` of them evenly spread: how, at, of, change, fault.

    `share`: (n, of) takes the n-th of so many shares of them.
    """
    from support_toy_registry import toy_registry

    from paperlm.data import registry as registry_module

    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder).resolve()
        toys = toy_registry(base / "local")
        registry_module.registry = lambda: toys
        start = base / "parents"
        start.mkdir()
        if kind not in WHOLE:
            make(start, kind, base / "local", parents_alone=True)

        def do(root: Path) -> None:
            make(root, kind, base / "local")

        shutil.copytree(start, base / "whole")
        do(base / "whole")
        expected = outcome(base / "whole", kind)
        seen = changes(base, start, do)
        places = [at for at, change in enumerate(seen) if part in change]
        count = len(places) if sample is None else min(sample, len(places))
        steps = [i / (count - 1) for i in range(count)] if count > 1 else [0.5]
        spread = sorted({round(step * (len(places) - 1)) for step in steps})
        for how in hows:
            for at in (places[i] for i in spread[share[0] :: share[1]]):
                found = fault(start, base / "hurt", do, how, at, lambda root: outcome(root, kind), expected)
                yield {"how": how, "at": at, "of": len(seen), "change": seen[at], "fault": found}


def alone(options: argparse.Namespace) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each kind with its rows, which are printed as they come."""
    begin()
    for kind in options.kind:
        rows = []
        asked = tuple(options.how), None if options.every else options.sample, options.part, tuple(options.share)
        for row in survey(kind, *asked):
            rows.append({"kind": kind} | row)
            print(json.dumps(rows[-1]), flush=True)
        yield kind, rows


def shared(options: argparse.Namespace) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each kind with its rows, by processes that have a share of its places each."""
    asked = ["--how", *options.how, "--sample", str(options.sample), "--part", options.part]
    asked += ["--every"] if options.every else []

    def ask(kind: str, share: int) -> list[dict[str, Any]]:
        command = [sys.executable, __file__, "--kind", kind, *asked, "--share", str(share), str(SHARES)]
        done = subprocess.run(command, capture_output=True, text=True)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        if done.returncode != any(row["fault"] for row in rows):
            raise RuntimeError(f"share {share} of {kind} broke off: {done.stdout[-2000:]} {done.stderr[-2000:]}")
        return rows

    with ThreadPoolExecutor(options.workers) as pool:
        asked_for = {kind: [pool.submit(ask, kind, share) for share in range(SHARES)] for kind in options.kind}
        for kind, answers in asked_for.items():
            rows = [row for answer in answers for row in answer.result()]
            yield kind, sorted(rows, key=lambda row: (options.how.index(row["how"]), row["at"]))


def sentence(surveys: Sequence[Mapping[str, Any]]) -> str:
    """What the documents say of the counts."""
    kills, full = (sum(found["places"][how] for found in surveys) for how in ("kill", "full"))
    every = all(found["places"][how] == found["changes"] for found in surveys for how in ("kill", "full"))
    faults = {found["kind"]: len(found["faults"]) for found in surveys if found["faults"]}
    wrong = ", ".join(f"{count} of {kind}" for kind, count in faults.items())
    part, changes = "each" if every else "a part", sum(found["changes"] for found in surveys)
    made, mended = torch_of(found["made with"] for found in surveys), {f["kind"]: len(f["mended"]) for f in surveys}
    again = [kind for kind, count in mended.items() if count]
    before = f" {sum(mended.values())} more ({', '.join(again)}) were mended, and all of those kinds tried again."
    return (
        f"Of {len(surveys)} kinds {part} of {changes:,} changes was tried, with {made}: {kills:,} kills and {full:,} "
        f"full disks, {wrong or 'none'} with another outcome or without a remedy.{before if again else ''}"
    )


def main() -> int:
    from paperlm.jobs import job_kinds

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", nargs="+", choices=sorted(job_kinds()), default=sorted(job_kinds()))
    parser.add_argument("--how", nargs="+", choices=["kill", "full"], default=["kill", "full"])
    parser.add_argument("--sample", type=int, default=12, help="places of each, evenly spread")
    parser.add_argument("--every", action="store_true", help="every place")
    parser.add_argument("--part", default="", help="only changes that have it in their name")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the places")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help="of the places: which, of how many shares")
    parser.add_argument("--out", type=Path, help="JSON file for what came out, by kind")
    options = parser.parse_args()
    surveys = alone(options) if options.workers == 1 else shared(options)
    faults = False
    for kind, rows in surveys:
        wrong = [row for row in rows if row["fault"]]
        if options.workers > 1:
            print("".join(json.dumps(row) + "\n" for row in rows), end="", flush=True)
        if options.out:
            counts = {how: sum(row["how"] == how for row in rows) for how in options.how}
            found = {"kind": kind, "changes": rows[0]["of"], "places": counts, "faults": wrong}
            kept = json.loads(options.out.read_text()) if options.out.is_file() else []
            before = [one for one in kept if one["kind"] == kind]
            found["mended"] = [row for one in before for row in one["mended"] + one["faults"] if row not in wrong]
            kept = [one for one in kept if one["kind"] != kind] + [found | {"made with": made_with()}]
            options.out.write_text(json.dumps(sorted(kept, key=lambda one: one["kind"]), indent=1) + "\n")
        faults |= bool(wrong)
    return faults


if __name__ == "__main__":
    sys.exit(main())
