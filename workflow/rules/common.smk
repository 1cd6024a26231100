# Loads and checks every declaration before any job starts; named input functions. All logic is in src/paperlm.
import json
import os
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

ROOT = Path(workflow.basedir)
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "kernels")]
sys.path = list(dict.fromkeys(sys.path))

from paperlm.data.registry import data_id
from paperlm.errors import PaperLMError
from paperlm.spec.project import Project
from paperlm.spec.workflow import Jobs

try:
    project = Project({k: v for k, v in config.items()})
    jobs = Jobs(project)
except PaperLMError as error:
    raise WorkflowError(str(error)) from None

SCALE = project.scale.scale
RUN_TABLES = [name for name, (_, table) in project.tables.items() if table.kind == "runs"]
JUDGED_FIGURES = [name for name, (_, figure) in project.figures.items() if figure.claims]


wildcard_constraints:
    table="|".join(project.tables),
    figure="|".join(project.figures),
    op="|".join({op for op, _ in jobs.measurements} or {"none"}),
    case="|".join({case for _, case in jobs.measurements} or {"none"}),
    run=jobs.run_pattern(),
    data=r"[a-z0-9_.-]+-[0-9a-f]{8}",


# Jobs find the two packages without an installation; one thread a job on a CPU (two are slower on two cores).
shell.prefix(
    f"export PYTHONSAFEPATH=1 PYTHONPATH='{ROOT}/src:{ROOT}/kernels' HF_HUB_DISABLE_TELEMETRY=1; "
    + ("export OMP_NUM_THREADS=1; " if project.scale.device == "cpu" else "")
)


def records_of_table(wildcards):
    try:
        return jobs.records(wildcards.table)
    except PaperLMError as error:
        raise WorkflowError(str(error)) from None


def records_of_figure(wildcards):
    try:
        return jobs.figure_records(wildcards.figure)
    except PaperLMError as error:
        raise WorkflowError(str(error)) from None


def published_of_table(wildcards):
    return project.tables[wildcards.table][1].published or []


def methods_of_case(wildcards):
    return ",".join(jobs.methods(wildcards.op, wildcards.case))


def data_of_run(wildcards):
    return f"results/data/{data_id(project.runs[wildcards.run].data_settings())}/manifest.json"


def run_json(wildcards):
    return json.dumps(project.runs[wildcards.run].canonical(), separators=(",", ":"))


def exact_loss(wildcards):
    return "torch" if wildcards.run in project.compared_by_loss else "auto"


def data_json(wildcards):
    return json.dumps(jobs.datasets[wildcards.data], separators=(",", ":"))


def run_memory(wildcards):
    return project.job_size(project.runs[wildcards.run]).mem_mb


def run_minutes(wildcards):
    return project.job_size(project.runs[wildcards.run]).runtime


def show_summary():
    "Diff and verdicts of the tables and figures that were asked for, in the terminal."
    for name in jobs.asked_for(sys.argv):
        shell("python -m paperlm summary paper_tables/{name}.csv >&2")
