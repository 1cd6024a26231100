"""Checkpoints: whole or absent, checked when read, kept under the run's own name.

<folder>/step-00000100/{model,optimizer}.safetensors and state.json. A checkpoint is written to a temporary folder and
renamed; the newest two are kept. Nothing is unpickled. What lies beside them and belongs to one of them, the curve of
the training, is named with its checksum in its state.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from paperlm_kernels.stored import named_plain_tensors, stored_weights
from safetensors.torch import load_file, save_file

from paperlm.errors import CheckpointError, PaperLMError
from paperlm.files import check_file, is_full_disk, read_sealed, sha256_of, write_sealed
from paperlm.jobs.base import Job

KEEP = 2
MODEL, OPTIMIZER, STATE_FILE = "model.safetensors", "optimizer.safetensors", "state.json"
STATE = ("job_id", "job", "behaviour", "sha256", "update", "counted", "wall_seconds", "resumed_from")
WHAT = "a state of training"


def save(folder: Path, job: Job, model: torch.nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
    """Write a checkpoint after `state["update"]` updates. Raises PaperLMError on a full disk; older ones stay."""
    target = folder / f"step-{state['update']:08d}"
    temporary, old = folder / f".{target.name}.tmp", folder / f".{target.name}.old"
    for unfinished in (temporary, old):
        shutil.rmtree(unfinished, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary, job, model, optimizer, state)
        if target.exists():  # training went back: a snapshot of an earlier update was missing
            os.replace(target, old)  # deleting it takes more than one call, between which a kill would leave half
        os.replace(temporary, target)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if is_full_disk(error):
            raise PaperLMError(
                f"no space left for the checkpoint {target}; free some and start the same command again: training "
                "continues from the checkpoint before"
            ) from error
        raise
    for behind in (old, *steps(folder)[:-KEEP]):
        shutil.rmtree(behind, ignore_errors=True)


def write(folder: Path, job: Job, model: torch.nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
    """Weights, optimizer and progress of a training as files of an empty folder, which `read` reads."""
    names = {id(p): n for n, p in model.named_parameters()}
    # two stored weights at most are decoded on the device at a time
    tensors = {n: tensor.cpu().contiguous() for n, tensor in named_plain_tensors(model)}
    moments = {
        f"{names[id(p)]}:{key}": value.contiguous()
        for p, entry in optimizer.state.items()
        for key, value in entry.items()
    }
    save_file(tensors, folder / MODEL)
    save_file(moments, folder / OPTIMIZER)
    checksums = {p.name: sha256_of(p) for p in sorted(folder.iterdir())}
    content = {
        "job_id": job.job_id,
        "job": job.canonical(),
        "behaviour": job.behaviours(),
        "sha256": checksums,
        **state,
    }
    write_sealed(folder / STATE_FILE, WHAT, content)


def steps(folder: Path) -> list[Path]:
    """Checkpoints in the folder, oldest first."""
    named = (p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name))
    return sorted(p for p in named if (p / STATE_FILE).exists())


def load(
    folder: Path, job: Job, model: torch.nn.Module, optimizer: Any, at_most: int | None = None
) -> dict[str, Any] | None:
    """Restore the newest checkpoint into model and optimizer; returns its state, or None if there is none.

    `at_most`: only checkpoints of up to so many updates serve. Raises CheckpointError, leaving all files alone, if it
    belongs to another job or is damaged.
    """
    found = [path for path in steps(folder) if at_most is None or int(path.name.removeprefix("step-")) <= at_most]
    if not found:
        return None
    newest = found[-1]
    rest = f"training then continues from {found[-2].name}" if len(found) > 1 else "training then starts anew"
    state = stated(newest, job, f"delete {newest} ({rest})", "move the folder away")
    if state["behaviour"] != job.behaviours():
        raise CheckpointError(
            f"{newest}: made under earlier rules ({state['behaviour']}, now {job.behaviours()}); delete {folder}: "
            "training starts anew"
        )
    restore(newest, state, model, optimizer, f"delete {newest} ({rest})")
    return state


def read(folder: Path, job: Job, model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Restore what `write` wrote of a job that another one continues, and return its state. Raises CheckpointError if
    it is damaged, or another job's."""
    remedy = f"make it again (python -m paperlm run {job.job_id} --again)"
    state = stated(folder, job, remedy, remedy)
    restore(folder, state, model, optimizer, remedy)
    return state


def stated(folder: Path, job: Job, remedy: str, remedy_of_another: str) -> dict[str, Any]:
    """What a folder says of itself. Raises CheckpointError if that is damaged, or of another job."""
    state = read_sealed(folder / STATE_FILE, WHAT, STATE, CheckpointError, remedy)
    if state["job_id"] != job.job_id:
        theirs, ours = state["job"], job.canonical()
        changed = [key for key in {**ours, **theirs} if theirs.get(key) != ours.get(key)] or ["the data"]
        raise CheckpointError(
            f"{folder}: state of {state['job_id']}, not of {job.job_id} (differs in {', '.join(changed)}); "
            f"{remedy_of_another}"
        )
    return state


def restore(folder: Path, state: dict[str, Any], model: torch.nn.Module, optimizer: Any, remedy: str) -> None:
    """Put the tensors of a folder into model and optimizer. Raises CheckpointError if a file is not the one that
    `state` names, or its weights are not this model's."""
    for name, expected in state["sha256"].items():
        check_file(folder / name, expected, CheckpointError, remedy)
    parameters, stored = dict(model.named_parameters()), stored_weights(model)
    tensors = load_file(folder / MODEL)
    if tensors.keys() != parameters.keys():
        raise CheckpointError(f"{folder}: its weights are not those of this model; {remedy}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in stored:
                stored[name].store.write(tensor)
            else:
                parameters[name].copy_(tensor)
    for key, value in load_file(folder / OPTIMIZER).items():
        name, _, field = key.rpartition(":")
        parameter = parameters[name]
        # Adam keeps `step` where it was created: on the device when fused, else on the CPU.
        optimizer.state[parameter][field] = value.to(parameter.device)
