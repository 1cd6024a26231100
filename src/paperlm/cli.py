"""The verbs behind the rules, also for use by hand: `python -m paperlm <verb> --help`.

Each verb imports what it needs when it runs, so that the light ones start at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paperlm_kernels.bench.arguments import Refused, amount, folder, json_object, to_read, to_write, whole

import paperlm
from paperlm.errors import Interrupted, PaperLMError, SpecError, unknown
from paperlm.files import is_full_disk


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit status: 0, 2 for an error the user can mend, 75 for a run to be continued."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        parser, verbs = _parser()
        if given and not given[0].startswith("-") and given[0] not in verbs:
            raise SpecError(unknown("verb", given[0], verbs))
        # Verbs that pass everything on must not have their options read here.
        rest = given[1:] if given and given[0] in PASSED_ON else []
        options = parser.parse_args(given[:1] if rest else given)
        options.rest = rest
        return options.verb(options) or 0
    except PaperLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 75 if isinstance(error, Interrupted) else 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # who read the output has gone, e.g. head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if is_full_disk(error):
            said = f"no space left ({error}); free some and start the same command again"
        elif isinstance(error, OSError) and error.filename is not None:
            said = f"{error.filename}: {error.strerror}"
        else:
            raise
        print(f"error: {said}", file=sys.stderr)
        return 2


if TYPE_CHECKING:
    from paperlm.jobs import Machine
    from paperlm.plan.project import ProjectConfig

PASSED_ON = ("bench", "lm-eval")
"Verbs whose arguments another command line reads."


def _parser() -> tuple[argparse.ArgumentParser, Iterable[str]]:
    """The parser and the names of its verbs. Raises SpecError for an environment variable that is no default."""
    parser = argparse.ArgumentParser(prog="paperlm", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"paperlm {paperlm.__version__}")
    verbs = parser.add_subparsers(required=True, metavar="<verb>")

    def verb(name: str, function, summary: str, prefix: bool = False) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=summary, description=summary, add_help=not prefix)
        sub.set_defaults(verb=function)
        return sub

    p = verb("prepare-data", _prepare_data, "prepare a data set: tokenize a text, or lay out items or images")
    p.add_argument("--settings", required=True, type=json_object, help="of paperlm.data.settings, as JSON")
    p.add_argument("--out", required=True, type=folder, help="folder for the data and manifest.json")
    _local_data(p)

    p = verb("run", _run, "make one job, or every job of a table or figure; what is there already is not made again")
    p.add_argument("what", nargs="?", help="job id, or the name of a table or figure (see `plan`, `show`)")
    p.add_argument("--with-parents", action="store_true", help="first the data and the models that it works on")
    p.add_argument("--job", type=json_object, help="a job as JSON instead (`show --json` prints it)")
    p.add_argument("--scale", help="scale whose folders are used; with `what`: as --config scale=...")
    p.add_argument(
        "--keep",
        default="",
        help="with --job: updates after which the model is kept for other jobs; trunk-<update>: for one to go on from",
    )
    p.add_argument("--again", action="store_true", help="make the named job although its record is there")
    _common(p)
    _machine(p)
    _local_data(p)

    p = verb("why", _why, "every difference between two jobs: settings, data, rules, versions, commit, hardware")
    p.add_argument("first", help="job id, or path of a record")
    p.add_argument("second")
    _common(p)

    p = verb("plan", _plan, "jobs to make for tables and figures, by kind, and how long such jobs took")
    p.add_argument("names", nargs="*", help="tables, figures or papers; none: everything")
    p.add_argument("--cores", type=_positive, help="jobs at a time on a CPU; left out: the cores of this machine")
    p.add_argument("--each", action="store_true", help="GPUs, memory and hours of every job, a line each")
    _common(p)

    p = verb("evidence", _evidence, "missing jobs by the claims that they would decide per hour, by recorded costs")
    p.add_argument("--hours", type=amount("hours"), default=3.0, help="time to spend (default: %(default)s)")
    p.add_argument("--scale", help="as --config scale=...")
    p.add_argument("--run", action="store_true", help="make them, in this order, with their parents")
    _common(p)
    _machine(p)
    _local_data(p)

    p = verb("watch", _watch, "a line for each job that is being made, with its progress and time left")
    p.add_argument("--seconds", type=amount("seconds"), default=2.0, help="between two looks")
    p.add_argument("--once", action="store_true", help="look once")
    _common(p)

    p = verb("table", _table, "build a table, its diff and its claims from records")
    _common(p)
    p.add_argument("table", help="its name")
    p.add_argument("--records", nargs="*", type=to_read, default=[], help="record files")
    p.add_argument(
        "--out", required=True, type=to_write(".csv"), help="the table's CSV; diff and claims are written beside it"
    )
    p.add_argument("--html", type=folder, help="folder for the report's HTML versions")

    p = verb("consistency", _consistency, "check the printed numbers of all papers against each other")
    _common(p)
    p.add_argument("--out", required=True, type=to_write(".csv"), help="CSV file: a row for each check")

    p = verb("curves", _curves, "draw the training curves behind a table")
    _common(p)
    p.add_argument("table", help="its name")
    p.add_argument("--records", nargs="*", type=to_read, default=[], help="record files")
    p.add_argument(
        "--out", required=True, type=to_write(".svg"), help="SVG file; the CSV with its numbers is written beside it"
    )

    p = verb("figure", _figure, "draw a figure of a paper file")
    _common(p)
    p.add_argument("figure", help="its name")
    p.add_argument("--records", nargs="*", type=to_read, default=[], help="record files")
    p.add_argument("--out", required=True, type=to_write(".svg"), help="SVG file; PNG and CSV are written beside it")

    p = verb("measure", _measure, "measure an operation of paperlm_kernels on one case, on a free GPU")
    p.add_argument("op", help="e.g. cross_entropy")
    p.add_argument(
        "--case", required=True, help="name of its inputs (python -m paperlm_kernels.bench cross_entropy --list)"
    )
    p.add_argument(
        "--methods", default="", help="names separated by commas; empty: what the benchmark takes on the device"
    )
    p.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    p.add_argument("--size", choices=["full", "small"], default="full", help="small: an eighth of each size, to try it")
    p.add_argument("--out", required=True, type=to_write(".jsonl"), help="JSON lines file, of this case alone")

    p = verb("summary", _summary, "print a built table, its diff and its verdicts")
    p.add_argument("tables", nargs="+", type=Path, help="CSV files of built tables and figures")

    p = verb("documents", _documents, "whether the generated parts of the documents are what their sources say")
    p.add_argument("--write", action="store_true", help="write them anew")
    _common(p)

    p = verb("results", _results, "write docs/results.md, README's table and all other generated parts of documents")
    p.add_argument("--take", action="store_true", help="first copy what was built at this scale into the reference")
    _common(p)

    p = verb("show", _show, "what is behind a table or one of its cells: numbers, run, rule, function, settings")
    _common(p)
    p.add_argument("table", help="name of a table or figure")
    p.add_argument("--cell", help='"row,column", e.g. "Mix-LN,LLaMA-130M"; of a figure: a row')
    p.add_argument("--json", action="store_true", help="print the jobs of the cell as JSON, for `run --job`")

    p = verb("bench", _bench, "time operations against their peers; `bench --help` lists them", prefix=True)
    p = verb("lm-eval", _lm_eval, "lm_eval's own command line, which then knows this project's models", prefix=True)
    return parser, verbs.choices


def _machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--micro-batch", type=_positive, default=0, help="examples per forward pass; left out: chosen")
    parser.add_argument("--compile", choices=["auto", "yes", "no"], default="auto")
    seconds = amount("seconds")
    default = _from_environment("PAPERLM_CHECKPOINT_SECONDS", "", lambda text: seconds(text) if text else None)
    parser.add_argument("--checkpoint-seconds", type=seconds, default=default, help="left out: as in config.yaml")
    parser.add_argument("--checkpoint-updates", type=_positive, default=0, help="by updates instead of by the clock")


def _local_data(parser: argparse.ArgumentParser) -> None:
    default = _from_environment("PAPERLM_LOCAL_DATA", "", _local_folder)
    parser.add_argument(
        "--local-data", type=_local_folder, default=default, help="folder that holds the files of `local:` datasets"
    )


def _local_folder(text: str) -> str:
    if text and not Path(text).is_dir():
        raise Refused(f"{text}: no such folder; name the one that has the files of `local:` datasets")
    return text


def _from_environment(variable: str, otherwise: str, parse: Callable[[str], Any]) -> Any:
    """Default of an argument that a variable gives. Raises SpecError naming it."""
    try:
        return parse(os.environ.get(variable, otherwise))
    except Refused as error:
        raise SpecError(f"environment variable {variable}: {error}") from None


_positive = whole(1)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", action="append", default=[], metavar="KEY=VALUE", help="as in config.yaml")
    parser.add_argument("--config-json", type=json_object, help="a whole configuration, instead of config.yaml")


def _project(options: argparse.Namespace):
    from paperlm.checks import open_project
    from paperlm.load import parse, parse_yaml
    from paperlm.plan.project import ProjectConfig, clone, configuration

    root = clone()
    if options.config_json is not None:
        if unread := [f"--{name}" for name in ("config", "scale") if getattr(options, name, None)]:
            raise SpecError(f"{unread[0]} beside --config-json, which is a whole configuration: put it in there")
        # the folder may be given by a variable too, and is a choice of the machine
        own = {"local_data": options.local_data} if getattr(options, "local_data", "") else {}
        return open_project(parse({**options.config_json, **own}, ProjectConfig, "--config-json"))
    given = {}
    for item in options.config:
        key, equals, value = item.partition("=")
        if not equals:
            raise SpecError(f"--config takes KEY=VALUE, got {item!r}")
        try:
            given[key] = parse_yaml(value)
        except ValueError as error:
            raise SpecError(f"--config {item}: {error}") from None
    if getattr(options, "scale", None):
        given["scale"] = options.scale
    if getattr(options, "local_data", ""):
        given["local_data"] = options.local_data
    return open_project(configuration(root, given))


def _with_records(options: argparse.Namespace):
    """The project, which knows a job of one at least of the records that are given."""
    from paperlm.tables.results import check_asked

    project = _project(options)
    check_asked(project, options.records)
    return project


def _prepare_data(options: argparse.Namespace) -> None:
    from paperlm.data.items import prepare_any
    from paperlm.data.settings import data_settings

    prepare_any(data_settings(options.settings), options.out, options.local_data)


def _machine_of(options: argparse.Namespace, config: ProjectConfig) -> Machine:
    """Raises SpecError for variables of torchrun that are no numbers."""
    from paperlm.jobs import Machine

    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if not os.environ.get(variable, "0").isdecimal():
            raise SpecError(
                f"environment variable {variable} is {os.environ[variable]!r}; torchrun sets a whole number"
            )
    return Machine(
        device=options.device,
        micro_batch=options.micro_batch,
        compile=options.compile,
        checkpoint_seconds=options.checkpoint_seconds or config.checkpoint_seconds,
        checkpoint_updates=options.checkpoint_updates,
    )


def _run(options: argparse.Namespace) -> None:
    from paperlm.plan.project import ProjectConfig, clone
    from paperlm.run import run_given, run_named

    if (options.job is None) == (options.what is None):
        raise SpecError("run takes the id of a job, the name of a table or figure, or --job JSON: give one of them")
    if options.what is not None:
        project = _project(options)
        if options.keep:
            raise SpecError("--keep is for --job; a job that is named keeps what its children need")
        run_named(project, options.what, _machine_of(options, project.config), options.with_parents, options.again)
        return
    if options.config or options.config_json is not None:
        raise SpecError("--config is for a job that is named: --job has its own settings, and --scale its folders")
    if not options.scale:
        raise SpecError("--job needs --scale: the record goes to results/<scale>/")
    machine = _machine_of(options, ProjectConfig())
    given = options.scale, options.keep, machine, options.local_data, options.with_parents, options.again
    run_given(clone(), options.job, *given)


def _why(options: argparse.Namespace) -> None:
    from paperlm.plan.why import why

    why(_project(options), options.first, options.second)


def _plan(options: argparse.Namespace) -> None:
    from paperlm.plan.estimate import print_plan

    print_plan(_project(options), options.names, options.cores, options.each)


def _evidence(options: argparse.Namespace) -> None:
    from paperlm.evidence import print_evidence, run_evidence

    project = _project(options)
    print_evidence(project, options.hours)
    if options.run:
        run_evidence(project, options.hours, _machine_of(options, project.config))


def _watch(options: argparse.Namespace) -> None:
    from paperlm.watch import watch

    watch(_project(options), options.seconds, options.once)


def _table(options: argparse.Namespace) -> None:
    from paperlm.figures.base import exhibit_contents
    from paperlm.tables.build import write_table

    write_table(_with_records(options), options.table, options.records, options.out, options.html, exhibit_contents)


def _consistency(options: argparse.Namespace) -> None:
    from paperlm.tables.consistency import write_consistency

    write_consistency(_project(options), options.out)


def _curves(options: argparse.Namespace) -> None:
    from paperlm.figures.curves import draw_curves

    draw_curves(_with_records(options), options.table, options.records, options.out)


def _figure(options: argparse.Namespace) -> None:
    from paperlm.figures.base import write_figure

    write_figure(_with_records(options), options.figure, options.records, options.out)


def _measure(options: argparse.Namespace) -> int:
    from paperlm.bench import measure_case
    from paperlm.train.gpu_lock import one_gpu

    with one_gpu(enabled=options.device != "cpu"):
        return measure_case(options.op, options.case, options.methods, options.device, options.size, options.out)


def _summary(options: argparse.Namespace) -> None:
    from paperlm.tables.terminal import print_summary

    for path in options.tables:
        print_summary(path)


def _documents(options: argparse.Namespace) -> None:
    from paperlm.documents import check_documents, write_documents

    (write_documents if options.write else check_documents)(_project(options))


def _results(options: argparse.Namespace) -> None:
    from paperlm.documents import write_documents
    from paperlm.results_page import take_reference

    project = _project(options)
    if options.take:
        take_reference(project)
    write_documents(project)


def _show(options: argparse.Namespace) -> None:
    from paperlm.tables.show import show

    show(_project(options), options.table, options.cell, options.json)


def _bench(options: argparse.Namespace) -> int:
    from paperlm.bench import main as bench

    return bench(options.rest)


def _lm_eval(options: argparse.Namespace) -> int | None:
    from paperlm.evaluate.harness import main as lm_eval

    return lm_eval(options.rest)
