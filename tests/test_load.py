"""Many jobs at once: a plan of thousands, a table of hundreds of records.

Times are of the processor, so that other work on the machine does not count, in seconds of the machine of the
committed costs where one is asked for. What grows with the number of jobs is compared with Snakemake alone, in the same
run: a machine that trains as fast as another need not run Python as fast.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import copy_declarations, copy_tracked
from support_workflow import clone_environment, slower

from paperlm.plan.project import ROOT, Project
from paperlm.plan.workflow import Workflow
from paperlm.record.record import read_record, write_record
from paperlm.tables.build import write_table

TABLE = "mixln_table1"


def used(command: list[str], folder: Path) -> tuple[str, float, float]:
    """What a command printed, the seconds of the processor that it took, and the most memory of a process, in GB."""
    code = (
        "import json, resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], capture_output=True, text=True)\n"
        "it = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(json.dumps([done.returncode, done.stdout + done.stderr, it.ru_utime + it.ru_stime, it.ru_maxrss]))\n"
    )
    asked = [sys.executable, "-c", code, *command]
    done = subprocess.run(asked, cwd=folder, capture_output=True, text=True, env=clone_environment(folder), timeout=300)
    status, said, seconds, kib = json.loads(done.stdout)
    assert status == 0, said
    return said, seconds, kib / 2**20


def dry_run(folder: Path, *config: str) -> tuple[int, float, float]:
    """Jobs that a dry run of all exhibits plans in a folder, its seconds of the processor, and its memory in GB."""
    asked = ["-m", "snakemake", "-n", "--quiet", "--cores", "2", *(["--config", *config] if config else [])]
    said, seconds, memory = used([sys.executable, *asked], folder)
    return int(re.search(r"(\d+) jobs to make", said)[1]), seconds, memory


def plain_dry_run(folder: Path, jobs: dict[str, list[str]]) -> float:
    """Seconds of the processor of a dry run of a Snakefile of three rules that has these jobs, each with the files of
    those that it needs as input, and nothing to check."""
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    (folder / "Snakefile").write_text(PLAIN)
    _, seconds, _ = used([sys.executable, "-m", "snakemake", "-n", "--quiet", "--cores", "2"], folder)
    return seconds


PLAIN = """
import json
jobs = json.load(open("jobs.json"))
rule all:
    input: [f"made/{job}.json" for job in jobs]
rule text:
    output: "made/text"
    shell: "touch {output}"
rule made:
    input: text="made/text", models=lambda wildcards: [f"made/{job}.json" for job in jobs[wildcards.job]]
    output: "made/{job}.json"
    params: start="python", job=lambda wildcards: wildcards.job
    resources: mem_mb=1000, runtime=5
    shell: "{params.start} {params.job} {output}"
"""


@pytest.mark.slow
def test_a_dry_run_of_every_exhibit_takes_less_than_ten_seconds(tmp_path):
    jobs, seconds, _ = dry_run(copy_tracked(tmp_path / "clone"))
    assert jobs > 500, "every exhibit is planned"
    assert seconds / slower() < 10


@pytest.mark.slow
def test_a_dry_run_of_two_thousand_jobs_takes_at_most_five_times_that_of_as_many_without_a_check(tmp_path):
    clone = copy_tracked(tmp_path / "clone")
    jobs, seconds, memory = dry_run(clone, "scale=tiny", "seeds=[0,1,2,3,4]")
    todo = Workflow(Project({"scale": "tiny", "seeds": [0, 1, 2, 3, 4]}, clone)).state.todo()
    assert jobs >= len(todo) > 2000, "what is measured is planned as well"
    needed = {job.job_id: [parent.job_id for parent in job.parents().values()] for job in todo.values()}
    assert seconds < 5 * plain_dry_run(tmp_path / "plain", needed) and memory < 2


def with_seeds(root: Path, seeds: int) -> tuple[Project, list[Path]]:
    """A project whose table has so many seeds of each model, and records of all: those that are committed, each again
    under the other seeds."""
    copy_declarations(root)
    shutil.copytree(ROOT / "paper_tables/records/gpu", root / "paper_tables/records/gpu")
    shutil.copy(ROOT / "paper_tables/records/SHA256SUMS", root / "paper_tables/records")
    project = Project({"scale": "gpu", "seeds": [*range(seeds)], "run_missing": "no"}, root)
    for cell in project.cells(TABLE):
        there = [root / project.places.committed(job) for job in cell.jobs]
        if known := [read_record(path) for path in there if path.is_file()]:
            for job, path in zip(cell.jobs, there, strict=True):
                if not path.is_file():
                    record = known[0].model_copy(update={"job_id": job.job_id, "job": job.canonical()})
                    write_record(root / project.places.made(job), record)
    plan = Workflow(project)
    return project, [root / path for path in plan.inputs(TABLE)]


@pytest.mark.slow
def test_a_table_of_five_hundred_records_is_built_in_less_than_twenty_seconds(tmp_path):
    project, records = with_seeds(tmp_path, 64)
    assert len(records) >= 500
    started = time.process_time()
    write_table(project, TABLE, records, tmp_path / "out/table.csv")
    assert (time.process_time() - started) / slower() < 20
