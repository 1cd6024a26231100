# Loads and checks every declaration before any job starts; named input functions. All logic is in src/paperlm.
import atexit
import functools
import gc
import inspect
import os
import sys
from pathlib import Path
from shlex import quote

from snakemake.cli import parse_args
from snakemake.exceptions import WorkflowError

# Thousands of jobs and their files, all of which stay: looking for garbage less often takes a sixth off a dry run.
gc.set_threshold(200_000, 50, 100)

ROOT = Path(workflow.basedir)
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "kernels")]
sys.path = list(dict.fromkeys(sys.path))

from paperlm.checks import open_project
from paperlm.errors import PaperLMError
from paperlm.plan.estimate import expectation, stated_cores
from paperlm.plan.project import configuration
from paperlm.plan.stale_lock import break_stale_lock
from paperlm.plan.workflow import NOTHING, Workflow

REPORT = any(argument.partition("=")[0] == "--report" for argument in sys.argv)


@functools.cache
def named_targets():
    "What Snakemake's command line asks for; None in a child of it and in another program."
    called = workflow.is_main_process and Path(sys.argv[0]).name in ("snakemake", "__main__.py")
    return parse_args(sys.argv[1:])[1].targets if called else None


try:
    project = open_project(configuration(ROOT, config))
    plan = Workflow(project)
except PaperLMError as error:
    raise WorkflowError(str(error)) from None

if workflow.is_main_process:
    break_stale_lock(Path.cwd() / ".snakemake")
    if named_targets() is not None and not REPORT:
        plan.together = plan.made_by(named_targets())
    plan.ask_again()


def show_expectation():
    "How long it would take: behind Snakemake's own table of jobs."
    settings = workflow.resource_settings
    cores = stated_cores(sys.argv, settings.cores)
    try:
        print(expectation(plan, plan.asked(sys.argv), cores, settings.nodes), file=sys.stderr)
    except PaperLMError as error:
        print(f"no estimate of the time: {error}", file=sys.stderr)


def lift_default_rate():
    """No limit of jobs a second where none was asked for, on one machine. Snakemake's own default of 100 has its
    scheduler look for work each second once more for every job that has ended (9.27): a quarter of a core after 100.
    """
    limiter = getattr(workflow.scheduler, "job_rate_limiter", None)
    asked = any(argument.startswith("--max-jobs-per-") for argument in sys.argv)
    default = limiter and not asked and (limiter.max_jobs, limiter.timespan) == (100, 1)
    if default and workflow.resource_settings.nodes is None:
        workflow.scheduler.job_rate_limiter = None


if {"-n", "--dry-run", "--dryrun"} & set(sys.argv):
    atexit.register(show_expectation)

SCALE = project.scale.scale
DEVICE = "cuda" if project.scale.device == "gpu" else "cpu"


wildcard_constraints:
    table="|".join(project.tables),
    figure="|".join(project.figures),
    op="|".join({op for op, _ in plan.measurements}) or NOTHING,
    case="|".join({case for _, case in plan.measurements}) or NOTHING,
    data="|".join(plan.datasets) or NOTHING,


# Jobs find the two packages without an installation; one thread a job on a CPU (two are slower on two cores). Where
# local data lies and how often a checkpoint is written changes no result, so they are no parameters of a rule.
shell.prefix(
    f"export PYTHONSAFEPATH=1 PYTHONPATH={quote(f'{ROOT}/src:{ROOT}/kernels')} HF_HUB_DISABLE_TELEMETRY=1"
    f" PAPERLM_LOCAL_DATA={quote(project.config.local_data)}"
    f" PAPERLM_CHECKPOINT_SECONDS={project.config.checkpoint_seconds}; "
    + ("export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false; " if DEVICE == "cpu" else "")
)


def signed(function):
    "With its signature at hand: Snakemake works it out at every call, a twentieth of a dry run of thousands of jobs."
    function.__signature__ = inspect.signature(function)
    return function


def checked(function):
    "A function of the plan of a wildcard, whose errors stop Snakemake without a traceback."

    def call(wildcards):
        try:
            return function(wildcards)
        except PaperLMError as error:
            raise WorkflowError(str(error)) from None

    return signed(call)


data_of_job = checked(lambda wildcards: plan.data_of(wildcards.job))
inputs_of_table = checked(lambda wildcards: plan.inputs(wildcards.table))
inputs_of_figure = checked(lambda wildcards: plan.inputs(wildcards.figure))


def again_of_exhibit(wildcards):
    return plan.again(wildcards.get("table") or wildcards.get("figure"))


@signed
def models_of_job(wildcards):
    return plan.models_of(wildcards.job)


@signed
def job_settings(wildcards):
    return plan.settings(wildcards.job)


@signed
def job_keep(wildcards):
    return plan.keep(wildcards.job)


@signed
def job_rules(wildcards):
    return plan.rules_of(wildcards.job)


@signed
def job_memory(wildcards):
    return plan.job_size(wildcards.job).mem_mb


@signed
def job_minutes(wildcards):
    return plan.job_size(wildcards.job).runtime


@signed
def job_gpus(wildcards):
    "Where Snakemake hands jobs to a cluster, and in such a job, as many as the scale says; else as this machine has."
    return plan.gpus(wildcards.job, here=workflow.is_main_process and workflow.resource_settings.nodes is None)


def card_threads():
    return plan.threads_per_job(workflow.resource_settings.cores if workflow.is_main_process else None)


@signed
def job_threads(wildcards):
    return card_threads() * max(1, job_gpus(wildcards))


@signed
def started_by(wildcards, resources):
    "What starts the processes of a job: torchrun, which is this module, where several can share it on its GPUs."
    if (count := plan.processes(wildcards.job, int(resources.get("gpu", 0)))) > 1:
        return f"python -m torch.distributed.run --standalone --nproc-per-node {count}"
    return "python"


def data_settings(wildcards):
    return plan.datasets[wildcards.data].model_dump_json()


def published_of_table(wildcards):
    return project.tables[wildcards.table][1].published or []


def published_of_all(wildcards):
    return sorted({table.published for _, table in project.tables.values() if table.published})


def consistency_digest(wildcards):
    return plan.consistency_digest()


def editions(wildcards):
    return project.config.model_dump_json(include={"editions"})


def methods_of_case(wildcards):
    return ",".join(plan.measurements[wildcards.op, wildcards.case])


def exhibit_config(wildcards):
    return project.config.model_dump_json(exclude={"local_data", "checkpoint_seconds"})


def exhibit_digest(wildcards):
    return plan.exhibit_digest(wildcards.get("table") or wildcards.get("figure"))


def targets(*names):
    "Files of these exhibits; where a report is asked for, of those that are built: Snakemake stops at one that is not."
    return plan.targets(*names, built=REPORT)


def refuse_unknown_targets():
    "A target that nothing makes stops here, with the nearest one: Snakemake would name none."
    for target in named_targets() or ():
        path = os.path.relpath(target)
        made = workflow.is_rule(target) or any(rule.is_producer(path) for rule in workflow.rules)
        if not made and not Path(path).exists():
            atexit.unregister(show_expectation)
            raise WorkflowError(plan.unknown_target(target, (rule.name for rule in workflow.rules)))


def show_summary():
    "Diff and verdicts of the tables and figures that were asked for, in the terminal."
    names = [f"paper_tables/{name}.csv" for name in plan.asked_for(sys.argv)]
    if names:
        shell("python -m paperlm summary {names} >&2")
