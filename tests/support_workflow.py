"""Helpers of the tests of the workflow: clones, and Snakemake in them."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

from support import copy_tracked, job_environment
from support_jobs import write_kinds, write_paper

from paperlm.plan.project import ROOT
from paperlm.record.calibration import step_seconds

SMOKE = ("--config", "scale=smoke")


def toy_clone(folder: Path) -> Path:
    """A clone whose only paper is the toy, with the toy kinds among its own: jobs of a second."""
    copy_tracked(folder)
    write_kinds(folder / "src/paperlm/jobs")
    return write_paper(folder)


def clone_environment(folder: Path, **extra: str) -> dict[str, str]:
    """Environment of a command in a clone: its own packages."""
    return job_environment(PYTHONPATH=f"{folder}/src:{folder}/kernels", **extra)


def snakemake(folder: Path, *arguments: str, expect: int = 0, **environment: str) -> str:
    """Output of a Snakemake call in `folder`."""
    command = [sys.executable, "-m", "snakemake", "--cores", "2", *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        env=clone_environment(folder, **environment),
        timeout=300 * slower(),
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


@functools.cache
def slower() -> float:
    """How many times as long this machine takes as the one of the committed costs; 1 for a faster one."""
    committed = json.loads((ROOT / "docs/reference/tiny/costs.json").read_text())
    return max(1.0, step_seconds() / committed["machine"]["step_seconds"])


def paperlm_in(folder: Path, *arguments: str, expect: int = 0) -> str:
    """Output of `python -m paperlm ...` of a clone."""
    command = [sys.executable, "-m", "paperlm", *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=clone_environment(folder), timeout=300 * slower()
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def pretend_cards(folder: Path, of_a_training: int) -> None:
    """Let scale smoke of a clone ask for GPUs, of which a pre-training of 71M has so many; jobs compute on the CPU all
    the same."""
    scale = folder / "workflow/scales/smoke.yaml"
    text, none = scale.read_text(), "\n  gpus: {value: 0, why: computes on a processor}\n"
    assert "\ndevice: cpu\n" in text and none in text
    one, reason = "\n  gpus: {value: 1, why: a test}\n", "why: a test"
    several = f"  jobs: {{pretrain/71M: {{mem_mb: 3000, runtime: 5, gpus: {{value: {of_a_training}, {reason}}}}}}}\n"
    text = text.replace("\ndevice: cpu\n", "\ndevice: gpu\n").replace(none, one)
    scale.write_text(f"{text}  scaling: {{value: 0.5, {reason}}}\n{several}")
    rules = folder / "workflow/rules/common.smk"
    assert 'DEVICE = "cuda" if' in rules.read_text()
    rules.write_text(rules.read_text().replace('DEVICE = "cuda" if', 'DEVICE = "cpu" if'))
