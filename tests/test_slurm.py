"""The cluster profile, on a SLURM of one node that these tests start themselves (tests/slurm/up.sh)."""

from __future__ import annotations

import csv
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import copy_tracked, job_environment, smoke_run
from support_workflow import pretend_cards

from paperlm.plan.project import ROOT, Project
from paperlm.plan.workflow import Workflow
from paperlm.record.record import read_record

TABLE = "paper_tables/mixln_table1.csv"
PROFILE = ["--workflow-profile", "workflow/profiles/slurm"]
# The partition of the test cluster; squeue, because it has no job database; and short waits, because its jobs are.
ON_THE_NODE = [
    *("--default-resources", "slurm_partition=main", "--slurm-status-command", "squeue"),
    *("--slurm-init-seconds-before-status-checks", "5", "--seconds-between-status-checks", "2", "--latency-wait", "10"),
]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return copy_tracked(tmp_path / "clone")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment in which the SLURM commands reach a running cluster: one node with two pretend GPUs."""
    if missing := [p for p in ("munged", "slurmctld", "slurmd", "sbatch", "srun") if not shutil.which(p)]:
        pytest.skip(f"no {', '.join(missing)}: apt-get install --no-install-recommends slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("slurmd runs as root only")
    state = tmp_path_factory.mktemp("slurm")
    outside = {k: v for k, v in job_environment().items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
    # The daemons outlive up.sh, so its output goes to a file: a pipe would stay open.
    log = state / "up.log"
    try:
        with log.open("w") as out:
            up = [ROOT / "tests/slurm/up.sh", state]
            status = subprocess.call(up, stdout=out, stderr=out, env=outside | {"SLURM_TEST_GPUS": "2"}, timeout=60)
        assert status == 0, log.read_text()
        inside = subprocess.run(
            ["bash", "-c", '. "$0/env" && env -0', state], env=outside, capture_output=True, text=True, check=True
        )
        yield dict(line.split("=", 1) for line in inside.stdout.split("\0") if line)
    finally:
        subprocess.run([ROOT / "tests/slurm/down.sh", state], env=outside, timeout=60, check=False)


def snakemake(folder: Path, environment: dict[str, str], *arguments: str, timeout: float = 240) -> str:
    """Output of a successful snakemake call in `folder`."""
    command = [sys.executable, "-m", "snakemake", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def slurm_jobs(folder: Path, environment: dict[str, str]) -> list[dict[str, str]]:
    """Every job that was submitted from `folder`: what it ran, how it ended, what it was granted."""
    fields = {
        "folder": "WorkDir", "job": "Comment", "state": "State", "memory": "MinMemory", "time": "TimeLimit",
        "gpus": "tres-per-job", "cpus": "NumCPUs",
    }  # fmt: skip
    squeue = ["squeue", "--noheader", "--states=all", "--Format=" + ",".join(f"{name}:|" for name in fields.values())]
    lines = subprocess.run(squeue, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    jobs = [dict(zip(fields, line.removesuffix("|").split("|"), strict=True)) for line in lines]
    return [job for job in jobs if job.pop("folder") == str(folder)]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.timeout(900)
def test_table_1_is_made_from_sixteen_slurm_jobs_and_one_that_prepares_the_data(clone, cluster):
    """Each run is one job of its own with the scale's memory and minutes, and no GPU where the scale asks for none."""
    project = Project({"scale": "smoke"}, clone)
    runs = {job.job_id for job in project.jobs_of("mixln_table1")}
    snakemake(clone, cluster, *PROFILE, TABLE, *ON_THE_NODE, "--config", "scale=smoke", timeout=800)

    jobs = slurm_jobs(clone, cluster)
    data, pretrain = (
        [job for job in jobs if job["job"].startswith(f"rule_{rule}_")] for rule in ("prepare_data", "pretrain")
    )
    assert len(runs) == 16 and len(data) == 1 and len(jobs) == 17
    assert {job["state"] for job in jobs} == {"COMPLETED"}
    assert {job["job"].removeprefix("rule_pretrain_wildcards_") for job in pretrain} == runs
    granted = {(job["memory"], job["time"], job["gpus"], job["cpus"]) for job in pretrain}
    size = project.scale.resources.default
    assert granted == {(f"{size.mem_mb}M", f"{size.runtime}:00", "N/A", "1")}

    with (clone / TABLE).open(newline="") as file:
        rows = {row[1]: row[2:] for row in csv.reader(file)}
    cells = [float(cell) for method in ("Post-LN", "DeepNorm", "Pre-LN", "Mix-LN") for cell in rows[method]]
    assert len(cells) == 16 and all(math.isfinite(cell) for cell in cells)


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.timeout(1800)
def test_tables_2_and_3_are_made_from_slurm_jobs_of_every_kind_of_their_chains(clone, cluster):
    """Fine-tuning, evaluation, reward models and policy optimization, each job submitted once, after its parents."""
    names = ("mixln_table2", "mixln_table3")
    project = Project({"scale": "smoke"}, clone)
    plan = Workflow(project)
    asked = [job for name in names for job in project.jobs_of(name)]
    chain = {job.job_id: job for one in asked for job in (one, *one.ancestors())}
    tables = [f"paper_tables/{name}.csv" for name in names]
    snakemake(clone, cluster, *PROFILE, *tables, *ON_THE_NODE, "--config", "scale=smoke", timeout=1700)

    jobs = slurm_jobs(clone, cluster)
    assert {job["state"] for job in jobs} == {"COMPLETED"}
    made = [job for job in jobs if not job["job"].startswith("rule_prepare_data")]
    names_made = [job["job"].partition("_wildcards_")[2] for job in made]
    assert sorted(names_made) == sorted(chain)
    sizes = [plan.job_size(name) for name in names_made]
    granted = [(job["memory"], job["time"], job["gpus"], job["cpus"]) for job in made]
    assert granted == [(f"{size.mem_mb}M", f"{size.runtime}:00", "N/A", "1") for size in sizes]
    assert len(jobs) - len(made) == len({settings.data_id for job in chain.values() for settings in job.data()})
    assert {job.kind for job in chain.values()} == {"pretrain", "sft", "lm_eval", "reward_model", "rloo"}
    for table in tables:
        with (clone / table).open(newline="") as file:
            assert not any(cell in ("not run", "blocked") for row in csv.reader(file) for cell in row)


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_run_of_a_gpu_scale_is_granted_its_gpus_and_asks_inside_the_job_for_no_more(clone, cluster, tmp_path, gpus):
    """A job sees other cards and cores than the login node does; it has to claim what was claimed when it was sent.
    With two cards it is two processes of torchrun, on one machine."""
    pretend_cards(clone, gpus)
    card = tmp_path / "bin/nvidia-smi"
    card.parent.mkdir()
    card.write_text("#!/bin/sh\necho 'GPU 0: pretend'\n")
    card.chmod(0o755)
    login = cluster | {"PATH": f"{card.parent}{os.pathsep}{cluster['PATH']}", "CUDA_VISIBLE_DEVICES": ""}

    run = smoke_run().job_id
    record = f"results/smoke/pretrain/{run}.json"
    snakemake(clone, login, *PROFILE, record, *ON_THE_NODE, "--config", "scale=smoke", timeout=500)
    (job,) = (job for job in slurm_jobs(clone, cluster) if run in job["job"])
    assert (job["state"], job["gpus"], job["cpus"]) == ("COMPLETED", f"gres:gpu:{gpus}", str(gpus))
    assert read_record(clone / record, run).cost.world_size == gpus


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_job_of_several_cards_is_started_by_torchrun_and_one_of_one_card_is_not(clone, gpus):
    pretend_cards(clone, gpus)
    record = f"results/smoke/pretrain/{smoke_run().job_id}.json"
    login = job_environment(CUDA_VISIBLE_DEVICES="")
    out = snakemake(clone, login, *PROFILE, record, "--dry-run", "--printshellcmds", "--config", "scale=smoke")
    (command,) = (line for line in out.splitlines() if " -m paperlm run " in line)
    assert ("torch.distributed.run --standalone --nproc-per-node 2" in command) == (gpus == 2), command


@pytest.mark.parametrize(("more", "planned"), [([], True), (["seeds=[0,1]"], True), (["run_missing=no"], False)])
def test_the_profile_trains_what_is_missing_from_a_login_node_without_a_gpu_unless_told_otherwise(clone, more, planned):
    """Keys of --config are added to the profile's, and are the stronger ones."""
    login = job_environment(CUDA_VISIBLE_DEVICES="")
    out = snakemake(clone, login, *PROFILE, TABLE, "--dry-run", "--config", "scale=paper", *more)
    assert bool(re.search(r"(?m)^pretrain +\d+$", out)) == planned
    assert bool(re.search(r"slurm_partition=edit_me, .*gpu=1", out)) == planned


def test_a_partition_named_on_the_command_line_leaves_every_submitted_job_its_memory_and_time(clone):
    """--default-resources on the command line replaces the profile's whole key."""
    login = job_environment(CUDA_VISIBLE_DEVICES="")
    named = ["--default-resources", "slurm_partition=gpu"]
    out = snakemake(clone, login, *PROFILE, TABLE, "--dry-run", *named, "--config", "scale=paper")
    blocks = re.findall(r"(?m)^rule (?:prepare_data|pretrain):\n(?:    .*\n)+", out)
    assert len(blocks) > 16
    for block in blocks:
        for resource in ("slurm_partition=gpu", r"mem_mb=\d+", r"runtime=\d+"):
            assert re.search(rf"\b{resource}\b", block), block
