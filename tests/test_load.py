"""Many jobs at once: a plan of thousands, a table of hundreds of records.

Times are of the processor, so that other work on the machine does not count, in seconds of the machine of the
committed costs.
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


@pytest.mark.slow
def test_a_dry_run_of_two_thousand_jobs_takes_less_than_ten_seconds_and_two_gigabytes(tmp_path):
    clone = copy_tracked(tmp_path / "clone")
    asked = ["-m", "snakemake", "-n", "--quiet", "--cores", "2", "--config", "scale=tiny", "seeds=[0,1,2,3,4]"]
    said, seconds, memory = used([sys.executable, *asked], clone)
    jobs = len(Workflow(Project({"scale": "tiny", "seeds": [0, 1, 2, 3, 4]}, clone)).state.todo())
    planned = int(re.search(r"(\d+) jobs to make", said)[1])
    assert planned >= jobs > 2000, "what is measured is planned as well"
    assert seconds / slower() < 10 and memory < 2


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
