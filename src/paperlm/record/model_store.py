"""Model folders between jobs: whole or absent, and never trusted without checksum and job id.

<folder>/config.json, model.safetensors, tokenizer files; at-<update>/ the same of a snapshot; trunk-<update>/ a
state of training to go on from, as checkpoints have it; manifest.json, written last: the job, how it ended, the rules
it was made under, the SHA-256 of every file, and its own. A link is refused: what it points to can change.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paperlm.errors import JobError
from paperlm.files import check_file, read_sealed, sha256_of, write_sealed
from paperlm.frozen import digest
from paperlm.jobs.base import Job, Stage, Trunk, folder_of, update_of
from paperlm.record.record import drift
from paperlm.result import NO_MODEL

MANIFEST = "manifest.json"
WHAT = "a model's manifest"
KEYS = ("job_id", "outcome", "labels", "behaviour", "ancestors", "files")

Behaviours = dict[str, dict[str, int]]
"Job id -> the behaviours that it was made under."


@dataclass(frozen=True)
class Origin:
    """What a model carries from its parents and its own job beyond its files."""

    labels: tuple[str, ...] = ()
    "what has to stand beside every number that is computed from it"
    ancestors: Behaviours = field(default_factory=dict)
    "the rules that the models it was made from were made under"
    weights: dict[str, str] = field(default_factory=dict)
    "of the models it was made from, as `weights_of` has them"


def store_model(building: Path, folder: Path, job: Job, outcome: str, origin: Origin) -> None:
    """Put a finished folder into its place, with its manifest; a folder that was there is replaced.

    A job that ended without a model leaves a manifest that says how it ended, and no files.
    """
    building.mkdir(parents=True, exist_ok=True)
    files = sorted(p for p in building.rglob("*") if p.is_file() and p.name != MANIFEST)
    content = {
        "job_id": job.job_id,
        "outcome": outcome,
        "labels": list(origin.labels),
        "behaviour": job.behaviours(),
        "ancestors": origin.ancestors,
        "weights": origin.weights,
        "files": {str(p.relative_to(building)): sha256_of(p) for p in files},
    }
    write_sealed(building / MANIFEST, WHAT, content)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(building, folder)
    shutil.rmtree(old, ignore_errors=True)


def read_manifest(folder: Path, job: Job) -> dict[str, Any]:
    """What a model folder says it holds. Raises JobError if it is missing, unreadable, or another job's."""
    again = f"make it again (python -m paperlm run {job.job_id} --again --with-parents)"
    if not (folder / MANIFEST).exists():
        raise JobError(f"{folder}: no finished model of {job.job_id}; {again}")
    manifest = read_sealed(folder / MANIFEST, WHAT, KEYS, JobError, f"delete {folder} and {again}")
    if manifest["job_id"] != job.job_id:
        raise JobError(f"{folder}: is the model of {manifest['job_id']}, not of {job.job_id}; delete it and {again}")
    return manifest


def has_model(folder: Path, job: Job, stages: set[Stage | None], current: bool = False) -> bool:
    """Whether a folder has the job's model at these stages (None: its end), by its manifest alone.

    `current`: one that was made under earlier rules does not count.
    """
    try:
        manifest = read_manifest(folder, job)
    except JobError:
        return False
    if current and drift(job, manifest["behaviour"], manifest["ancestors"]):
        return False
    if manifest["outcome"] in NO_MODEL:
        return True  # there is none to be had
    return all(_sign_of(stage)[1] in manifest["files"] for stage in stages)


def _sign_of(stage: Stage | None) -> tuple[str, str]:
    """Where a stage lies below the model's folder, and the file that tells that it is there."""
    prefix = f"{folder_of(stage)}/" if stage is not None else ""
    return prefix, prefix + ("state.json" if isinstance(stage, Trunk) else "config.json")


def weights_of(folder: Path, job: Job) -> dict[str, str]:
    """Id of a model's job, and of those that it was made from -> digest of the files of its tensors at its end,
    whatever stage of it is worked on: it tells two trainings of one job apart."""
    manifest = read_manifest(folder, job)
    tensors = [sum_ for name, sum_ in _files_of(manifest, None).items() if name.endswith(".safetensors")]
    own = {job.job_id: digest(sorted(tensors))} if tensors else {}
    return {**manifest.get("weights", {}), **own}


def _files_of(manifest: dict[str, Any], stage: Stage | None) -> dict[str, str]:
    """Files of a stage -> SHA-256."""
    prefix = _sign_of(stage)[0].rstrip("/")
    return {name: sum_ for name, sum_ in manifest["files"].items() if name.rpartition("/")[0] == prefix}


def checked_model(folder: Path, job: Job, stage: Stage | None) -> Path:
    """Folder of a stage of the job (None: its end), every file of it compared with its checksum.

    Raises JobError for a file that is missing or altered, a snapshot that was not kept, and a job that left no model.
    """
    manifest = read_manifest(folder, job)
    if manifest["outcome"] in NO_MODEL:
        raise JobError(f"{job.job_id} ended as {manifest['outcome']}: it left no model to work on")
    prefix, sign = _sign_of(stage)
    here = {prefix + p.name for p in (folder / prefix).glob("*") if not p.is_dir() or p.is_symlink()}
    wanted = _files_of(manifest, stage)
    if sign not in wanted:
        what = "model" if not isinstance(stage, Trunk) else "state of training with its optimizer"
        at = "at its end" if stage is None else f"after update {update_of(stage)}"
        raise JobError(f"{folder}: holds no {what} {at}; delete it and run {job.job_id} again")
    for name, checksum in wanted.items():
        check_file(folder / name, checksum, JobError, f"delete {folder} and run {job.job_id} again")
    if strangers := sorted(here - wanted.keys() - {MANIFEST}):
        raise JobError(f"{folder / strangers[0]}: is not in the manifest, and would be read; remove it")
    return folder / prefix
