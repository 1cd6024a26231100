"""Whatever happens to a file that steers a number: an error of ours that names it with the remedy, or the same number.

Jobs are stopped or finished once; then each of their files is damaged in each way, in a copy, and the next command
runs. What it may say or give is known from runs that nothing happened to.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import smoke_run
from support_damage import DAMAGES

from paperlm.errors import Interrupted, PaperLMError
from paperlm.files import sha256_of, write_sealed
from paperlm.jobs import Job, Machine, parse_job
from paperlm.record.places import Places
from paperlm.record.record import read_record
from paperlm.run import Maker

STEPS, EVERY, STOP = 5, 2, 4
TRAINED = {"steps": STEPS, "eval_every": 2, "train_examples": 40, "validation_tokens": 600}


@functools.cache
def trained(seed: int = 0) -> Job:
    return smoke_run(seed=seed, **TRAINED)


@functools.cache
def removal(seed: int = 0) -> Job:
    return parse_job({"kind": "block_removal", "of": trained(seed).canonical(), "at": 2, "documents": 4})


def made(root: Path, job: Job, **machine: Any) -> None:
    """The job with its parents; its snapshot after two updates is kept."""
    options = Machine(device="cpu", progress=False, checkpoint_updates=EVERY, **machine)
    Maker(Places(root, "smoke"), options, keep={trained(s).job_id: (2,) for s in (0, 1)}).with_parents(job)


def outcome(root: Path, job: Job) -> dict[str, Any]:
    """All that must be the same: the record but for cost and environment, and the bytes of the model."""
    places = Places(root, "smoke")
    record = read_record(root / places.made(job), job.job_id).model_dump(exclude={"cost", "environment"})
    folder = root / places.model(job)
    files = {p.relative_to(folder).as_posix(): sha256_of(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    return {"record": record, "files": files}


@dataclass(frozen=True)
class Stage:
    """A folder in which a command was stopped or is still to run, the same of another job, and what comes out."""

    root: Path
    other: Path
    job: Job
    expected: dict[str, Any]
    files: tuple[str, ...]
    "below the root: what the next command reads"


def below(root: Path, *patterns: str) -> tuple[str, ...]:
    return tuple(
        sorted(str(p.relative_to(root)) for g in patterns for p in root.glob(g) if p.is_file() and p.stat().st_size)
    )


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stage]:
    base = tmp_path_factory.mktemp("stages")
    for seed, name in enumerate(("run", "other")):
        with pytest.raises(Interrupted):
            made(base / f"{name}-stopped", trained(seed), stop_after=STOP)
        shutil.copytree(base / f"{name}-stopped", base / f"{name}-trained")
        made(base / f"{name}-trained", trained(seed))
        shutil.copytree(base / f"{name}-trained", base / f"{name}-measured")
        made(base / f"{name}-measured", removal(seed))
        shutil.copytree(base / f"{name}-trained", base / f"{name}-measuring")
        leave_half(base / f"{name}-measuring", removal(seed))
    unbroken = base / "unbroken"
    made(unbroken, trained())
    assert outcome(unbroken, trained()) == outcome(base / "run-trained", trained()), "resuming changes nothing"
    expected = {job.kind: outcome(base / "run-measured", job) for job in (trained(), removal())}
    reads = {
        "stopped": (trained(), ("results/smoke/work/**/*", "results/data/*/*")),
        "trained": (removal(), ("results/smoke/models/**/*", "results/data/*/*")),
        "measuring": (removal(), ("results/smoke/work/**/*",)),
    }
    return {
        name: Stage(
            base / f"run-{name}", base / f"other-{name}", job, expected[job.kind], below(base / f"run-{name}", *of)
        )
        for name, (job, of) in reads.items()
    }


def leave_half(root: Path, job: Job) -> None:
    """A removal that was killed after its second measurement."""
    from paperlm.jobs import block_removal

    calls: list[Path] = []

    def killed(path: Path, what: str, value: dict) -> None:
        write_sealed(path, what, value)
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(block_removal, "write_sealed", killed)
        made(root, job)


def faults(stage: Stage, damage: Callable[[Path, Path], None], folder: Path) -> list[str]:
    """Files whose damage ended in another number, or in an error that is none of ours or does not say where or what."""
    found = []
    for name in stage.files:
        shutil.copytree(stage.root, folder, symlinks=True)
        path = folder / name
        damage(path, twin(stage, name))
        try:
            made(folder, stage.job)
            if outcome(folder, stage.job) != stage.expected:
                found.append(f"{name}: another number")
        except PaperLMError as error:
            if not any(part in str(error) for part in (str(path), str(path.parent))):
                found.append(f"{name}: does not name it: {error}")
            elif not any(word in str(error) for word in ("delete", "remove", "make it again", "run the job", "move")):
                found.append(f"{name}: no remedy: {error}")
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
        if [*folder.rglob("*.executed")]:
            found.append(f"{name}: executed")
        shutil.rmtree(folder)
    return found


def twin(stage: Stage, name: str) -> Path:
    """The file of the other job in the same place; its folder has another name."""
    parts = list(Path(name).parts)
    for index, part in enumerate(parts):
        if part in (trained().job_id, removal().job_id):
            parts[index] = (trained(1) if part == trained().job_id else removal(1)).job_id
    return stage.other.joinpath(*parts)


@pytest.mark.parametrize("name", ["stopped", "trained", "measuring"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_ends_in_an_error_that_names_it_or_in_the_same_number(stages, name, damage, tmp_path):
    stage = stages[name]
    assert len(stage.files) >= {"stopped": 8, "trained": 8, "measuring": 1}[name]
    assert faults(stage, DAMAGES[damage], tmp_path / "damaged") == []
