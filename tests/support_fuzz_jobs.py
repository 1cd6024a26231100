"""Jobs that random damage and random kills are tried on: stopped half way, and about to work on what others left."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import test_damage
from support_fuzz import Stage, command, in_folder
from support_small_jobs import job as small_job
from test_damage import removal, trained
from test_job_fields import toy_registry

from paperlm.data import registry
from paperlm.errors import Interrupted
from paperlm.files import sha256_of
from paperlm.jobs import Machine
from paperlm.plan.project import ROOT
from paperlm.record.places import Places
from paperlm.run import Maker


def below(root: Path, *patterns: str) -> list[str]:
    """Files with content that match, by their names below `root`."""
    found = {str(p.relative_to(root)) for g in patterns for p in root.glob(g) if p.is_file() and p.stat().st_size}
    return sorted(found)


def jobs(base: Path) -> Iterator[Stage]:
    """A training that was stopped, one that is done, and a measurement of its blocks that was killed half way."""
    folders = {}
    for seed, name in enumerate(("run", "other")):
        stopped, done, half = (base / f"jobs/{name}-{state}" for state in ("stopped", "trained", "measuring"))
        with contextlib.suppress(Interrupted):
            test_damage.made(stopped, trained(seed), stop_after=test_damage.STOP)
        shutil.copytree(ROOT / "workflow/scales", stopped / "workflow/scales")
        shutil.copytree(stopped, done)
        test_damage.made(done, trained(seed))
        shutil.copytree(done, half)
        test_damage.leave_half(half, removal(seed))
        folders[name] = {"stopped": stopped, "trained": done, "measuring": half}
    reads: dict[str, tuple[Any, list[str]]] = {
        "stopped": (trained(), ["results/smoke/work/**/*", "results/data/*/*"]),
        "trained": (removal(), ["results/smoke/models/**/*", "results/data/*/*"]),
        "measuring": (removal(), ["results/smoke/work/**/*"]),
    }
    for state, (job, patterns) in reads.items():
        root = folders["run"][state]
        yield Stage(
            f"job {state}", root, below(root, *patterns), functools.partial(made, job=job),
            functools.partial(twin, folders["other"][state], (trained, removal)), 1.0, killed=True,
        )  # fmt: skip


def made(folder: Path, name: str, job: Any, local: bool = False, every: str = "2") -> Any:
    """`paperlm run` of a job with its parents; gives all that must be the same."""
    in_folder(folder)
    keep = ["--keep", "2"] if job.kind == "pretrain" else []
    machine = ["--device", "cpu", "--checkpoint-updates", every]
    data = ["--local-data", str(folder / "local")] if local else []
    command("run", "--job", json.dumps(job.canonical()), "--scale", "smoke", "--with-parents", *machine, *keep, *data)
    return test_damage.outcome(folder, job)


def twin(root: Path, kinds: Sequence[Callable[[int], Any]], name: str) -> Path:
    """The file in the same place of the jobs of the other seed, whose folders have other names."""
    for make in kinds:
        name = name.replace(make(0).job_id, make(1).job_id)
    return root / name


ON_MODELS = ("lm_eval", "span_answers", "text_perplexity", "stored_perplexity", "hub_model", "continue_pretrain")
"Kinds that read, between them, items, documents, models of this project and from elsewhere, and states of training."
STOPPED = {"sft": 2, "image_classification": 2, "text_to_sql": 2, "reward_model": 2}
"Kinds with checkpoints of their own -> the update after which they are stopped."


def kinds(base: Path) -> Iterator[Stage]:
    """Small jobs of other kinds, whose data and models are there, or which were stopped."""
    toys = toy_registry(made_folder(base / "kinds/local"))
    registry.registry = lambda: toys
    for kind in (*ON_MODELS, *STOPPED):
        roots = []
        for seed, name in enumerate(("run", "other")):
            root = base / f"kinds/{kind}-{name}"
            job = small_job(kind, **({"seed": 5 + seed} if kind in STOPPED else {}))
            shutil.copytree(base / "kinds/local", root / "local")
            shutil.copytree(ROOT / "workflow/scales", root / "workflow/scales")
            machine = Machine(device="cpu", progress=False, checkpoint_updates=1, stop_after=STOPPED.get(kind, 0))
            maker = Maker(Places(root, "smoke"), machine, str(root / "local"))
            with contextlib.suppress(Interrupted):
                maker.with_parents(job)
            (root / maker.places.made(job)).unlink(missing_ok=True)
            shutil.rmtree(root / maker.places.model(job), ignore_errors=True)
            roots.append((root, job))
        (root, job), (twin_root, twin_job) = roots
        patterns = ["results/smoke/work/**/*"] if kind in STOPPED else ["results/smoke/models/**/*"]
        patterns += ["results/data/*/*"]
        other = functools.partial(place_of_twin, twin_root, job.job_id, twin_job.job_id)
        run = functools.partial(made, job=job, local=True, every="1")
        yield Stage(f"kind {kind}", root, below(root, *patterns), run, other, 0.2, killed=True)


def local(base: Path) -> Iterator[Stage]:
    """Files of a local folder, from which data are prepared."""
    root = base / "local_data"
    toys = toy_registry(made_folder(root / "local"))
    registry.registry = lambda: toys
    of = [("pretrain", "text_a"), ("sft", "instructions_a"), ("reward_model", "pairs_a"), ("hub_model", "model_a")]
    settings = {name: small_job(kind).data()[0] for kind, name in of}

    def reader(name: str) -> str:
        return next(dataset for dataset in settings if dataset in name)

    def run(folder: Path, name: str) -> Any:
        in_folder(folder)
        asked = settings[reader(name)].model_dump_json()
        command("prepare-data", "--settings", asked, "--out", "made", "--local-data", str(folder / "local"))
        return {p.name: sha256_of(p) for p in sorted((folder / "made").iterdir()) if p.is_file()}

    files = below(root, *(f"local/{dataset}{rest}" for dataset in settings for rest in ("*", "*/**/*")))
    yield Stage(
        "local data", root, files, run, lambda name: root / name.replace("_a", "_b"), 0.5, reader=reader, killed=True
    )  # fmt: skip


def made_folder(folder: Path) -> Path:
    folder.parent.mkdir(parents=True)
    return folder


def place_of_twin(root: Path, one: str, other: str, name: str) -> Path:
    return root / name.replace(one, other)
