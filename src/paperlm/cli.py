"""The verbs behind the rules, also for use by hand: `python -m paperlm <verb> --help`.

Each verb imports what it needs when it runs, so that the light ones start at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from paperlm.errors import PaperLMError, SpecError
from paperlm.files import FULL_DISK


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit status: 0, 2 for an error the user can mend, 75 for a run to be continued."""
    options = _parser().parse_args(arguments)
    try:
        return options.verb(options) or 0
    except PaperLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 75 if type(error).__name__ == "Interrupted" else 2
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        print(f"error: no space left ({error}); free some and start the same command again", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paperlm", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(required=True, metavar="<verb>")

    def verb(name: str, function, summary: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=summary, description=summary)
        sub.set_defaults(verb=function)
        return sub

    p = verb("prepare-data", _prepare_data, "tokenize a dataset into memory-mapped shards")
    p.add_argument("--settings", required=True, type=_json, help="RunConfig.data_settings() as JSON")
    p.add_argument("--out", required=True, type=Path, help="folder for the shards and manifest.json")
    p.add_argument("--local-data", default="", help="folder that holds the files of `local:` datasets")

    p = verb("pretrain", _pretrain, "train one language model and write its record")
    p.add_argument("--settings", required=True, type=_json, help="a RunConfig as JSON (printed by `show --json`)")
    p.add_argument("--data", required=True, type=Path, help="manifest.json of the prepared tokens")
    p.add_argument("--out", required=True, type=Path, help="the record to write")
    p.add_argument("--checkpoints", required=True, type=Path, help="folder of this run's checkpoints")
    p.add_argument("--model", type=Path, help="folder for the final model (safetensors)")
    p.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    p.add_argument("--micro-batch", type=int, default=0, help="sequences per forward pass; 0 chooses")
    p.add_argument("--compile", choices=["auto", "yes", "no"], default="auto")
    p.add_argument(
        "--exact-loss",
        choices=["auto", "torch", "kernels"],
        default="auto",
        help="what computes a loss that is not a fused one; auto: the kernels where they were measured to be faster",
    )
    p.add_argument("--checkpoint-seconds", type=float, default=60.0)
    p.add_argument("--checkpoint-updates", type=int, default=0, help="checkpoint by updates instead of by the clock")

    p = verb("probe-ranks", _probe_ranks, "how fast a trained model's probabilities fall with their rank")
    p.add_argument("--settings", required=True, type=_json, help="the RunConfig of the model's run as JSON")
    p.add_argument("--data", required=True, type=Path, help="manifest.json of the run's prepared tokens")
    p.add_argument("--model", required=True, type=Path, help="folder that `pretrain --model` wrote")
    p.add_argument("--out", required=True, type=Path, help="the record to write")
    p.add_argument("--tokens", type=int, default=65_536, help="at most so many validation tokens")
    p.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")

    p = verb("table", _table, "build a table, its diff and its claims from records")
    _common(p)
    p.add_argument("table")
    p.add_argument("--records", nargs="*", type=Path, default=[], help="record files")
    p.add_argument("--out", required=True, type=Path, help="the table's CSV; diff and claims are written beside it")
    p.add_argument("--html", type=Path, help="folder for the report's HTML versions")

    p = verb("curves", _curves, "draw the training curves behind a table")
    _common(p)
    p.add_argument("table")
    p.add_argument("--records", nargs="*", type=Path, default=[])
    p.add_argument("--out", required=True, type=Path, help="SVG file; the CSV with its numbers is written beside it")

    p = verb("figure", _figure, "draw a figure of a paper file")
    _common(p)
    p.add_argument("figure")
    p.add_argument("--records", nargs="*", type=Path, default=[], help="files of the table it is drawn from")
    p.add_argument("--out", required=True, type=Path, help="SVG file; PNG and CSV are written beside it")

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
    p.add_argument("--out", required=True, type=Path, help="JSON lines file to append the rows to")

    p = verb("summary", _summary, "print a built table, its diff and its verdicts")
    p.add_argument("tables", nargs="+", type=Path, help="CSV files of built tables")

    p = verb("show", _show, "what is behind a table or one of its cells: numbers, run, rule, function, settings")
    _common(p)
    p.add_argument("table")
    p.add_argument("--cell", help='"row,column", e.g. "Mix-LN,LLaMA-130M"')
    p.add_argument("--json", action="store_true", help="print the runs of the cell as JSON, for `pretrain --settings`")

    p = verb(
        "bench", _bench, "`bench train` times training against transformers here; `bench show` prints what was measured"
    )
    p.add_argument("what", choices=["train", "show"])
    p.add_argument("--sizes", nargs="+", default=["71M", "130M", "1B"])
    p.add_argument("--out", type=Path, help="JSON lines file to append the rows to")
    p.add_argument("--seconds", type=float, default=8.0, help="time per measurement")
    p.add_argument("--micro-batches", nargs="+", type=int, default=[64, 128, 256], help="tried for each side")
    p.add_argument(
        "--loss",
        nargs="+",
        default=["cross_entropy"],
        help="ours takes part once with each: cross_entropy, cce_exact, cce_exact_kept (RunConfig.loss, unfiltered)",
    )
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", action="append", default=[], metavar="KEY=VALUE", help="as in config.yaml")
    parser.add_argument("--config-json", type=_json, help="a whole configuration, instead of config.yaml")


def _json(text: str):
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None


def _project(options: argparse.Namespace):
    from paperlm.spec.load import read_yaml
    from paperlm.spec.project import ROOT, Project

    if options.config_json is not None:
        return Project(options.config_json)
    import yaml

    config = read_yaml(ROOT / "config.yaml")
    for item in options.config:
        key, equals, value = item.partition("=")
        if not equals:
            raise SpecError(f"--config takes KEY=VALUE, got {item!r}")
        config[key] = yaml.safe_load(value)
    return Project(config)


def _prepare_data(options: argparse.Namespace) -> None:
    from paperlm.data.prepare import prepare

    prepare(options.settings, options.out, options.local_data)


def _pretrain(options: argparse.Namespace) -> None:
    from paperlm.spec.load import parse
    from paperlm.spec.run import RunConfig

    run = parse(options.settings, RunConfig, "--settings")
    with _gpu(options.device):
        import torch

        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        from paperlm.train.loop import Execution, pretrain

        execution = Execution(
            device=options.device,
            micro_batch=options.micro_batch,
            compile=options.compile,
            exact_loss=options.exact_loss,
            checkpoint_seconds=options.checkpoint_seconds,
            checkpoint_updates=options.checkpoint_updates,
        )
        result = pretrain(run, options.data, options.checkpoints, execution)
    if result is None:
        return
    from paperlm.record.record import write_record

    record, model = result
    if options.model:
        model.save_pretrained(options.model)
    write_record(options.out, record)


def _probe_ranks(options: argparse.Namespace) -> None:
    from paperlm.record.record import write_record
    from paperlm.spec.load import parse
    from paperlm.spec.run import RunConfig

    run = parse(options.settings, RunConfig, "--settings")
    with _gpu(options.device):
        import torch

        from paperlm.evaluate.ranks import probe_ranks

        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        on_gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
        device = torch.device("cuda" if on_gpu else "cpu")
        write_record(options.out, probe_ranks(run, options.data, options.model, options.tokens, device))


def _gpu(device: str):
    from paperlm.train.gpu_lock import one_gpu

    return one_gpu(enabled=device != "cpu")


def _table(options: argparse.Namespace) -> None:
    from paperlm.tables.build import write_table

    write_table(_project(options), options.table, options.records, options.out, options.html)


def _curves(options: argparse.Namespace) -> None:
    from paperlm.figures.curves import draw_curves

    draw_curves(_project(options), options.table, options.records, options.out)


def _figure(options: argparse.Namespace) -> None:
    from paperlm.figures.draw import write_figure

    write_figure(_project(options), options.figure, options.records, options.out)


def _measure(options: argparse.Namespace) -> int:
    from paperlm.bench.kernels import measure

    with _gpu(options.device):
        return measure(options.op, options.case, options.methods, options.device, options.size, options.out)


def _summary(options: argparse.Namespace) -> None:
    from paperlm.tables.terminal import print_summary

    for path in options.tables:
        print_summary(path)


def _show(options: argparse.Namespace) -> None:
    from paperlm.tables.show import show

    show(_project(options), options.table, options.cell, options.json)


def _bench(options: argparse.Namespace) -> None:
    if options.what == "show":
        from paperlm.bench.report import throughput_table
        from paperlm.spec.project import ROOT

        print(throughput_table(ROOT / "paper_tables/records/bench/pretrain.jsonl"))
        return
    from paperlm.bench.train import bench_train

    bench_train(options.sizes, options.out, options.seconds, options.micro_batches, options.loss)
