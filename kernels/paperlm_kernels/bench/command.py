"""Command line: `python -m paperlm_kernels.bench <operation>` measures, `... show rows.jsonl` prints the rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from paperlm_kernels.bench import ops, report
from paperlm_kernels.bench import rows as files
from paperlm_kernels.bench.arguments import amount, to_read, to_write, whole
from paperlm_kernels.bench.operation import Operation, Task
from paperlm_kernels.bench.run import run

CHARTS = (".svg", ".png", ".pdf")


def main(arguments: Sequence[str] | None = None, program: str = "python -m paperlm_kernels.bench") -> int:
    """Parse and run; the exit status: 0, 1 if a method failed, 2 for a wrong argument, 130 if interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given and not given[0].startswith("-") and given[0] != "show":
            ops.operation(given[0])  # names the nearest one
        options = _parser(program).parse_args(given)
        return _show(options) if options.verb == "show" else _measure(ops.operation(options.verb), options)
    except SystemExit as done:  # of the parser, which has said why
        return int(done.code or 0)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; rows of finished methods are kept", file=sys.stderr)
        return 130


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description="Measure operations and their peers, as rows of JSON.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, operation in ops.operations().items():
        about = f"Measure {operation.summary}: each method in a process of its own, on the same data."
        measure = verbs.add_parser(name, help=operation.summary, description=about)
        groups = ", ".join(operation.groups)
        default = "default: what the device can do in reasonable time"
        measure.add_argument(
            "--cases", help=f"names{' or ' if groups else ''}{groups}, separated by commas ({default})"
        )
        measure.add_argument("--methods", help="names separated by commas (default: all)")
        parts = "; ".join(f"{part}: {what}" for part, what in operation.measures.items())
        measure.add_argument("--measure", help=f"names separated by commas. {parts}")
        measure.add_argument("--repeats", type=whole(), help="repetitions of each time")
        measure.add_argument(
            "--seconds",
            type=amount("seconds", above_zero=False),
            help="fewer repetitions if they take longer; a few in any case",
        )
        measure.add_argument("--warmup", type=whole(0), help="repetitions before those")
        measure.add_argument("--seed", type=whole(0, 2**63 - 1), default=0, help="of the data")
        operation.add_arguments(measure)
        measure.add_argument(
            "--scale", choices=("full", "small"), default="full", help="small: an eighth of the sizes, to try this out"
        )
        measure.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
        measure.add_argument("--out", type=to_write(), help="append the rows to this JSON lines file")
        measure.add_argument("--plot", type=to_write(*CHARTS), help="draw a chart (svg, png, pdf); needs seaborn")
        measure.add_argument(
            "--list", action="store_true", help="print cases and methods, and which of them cannot run here"
        )
    show = verbs.add_parser("show", help="print rows as Markdown tables")
    show.add_argument("rows", type=to_read, help="JSON lines file")
    show.add_argument("--plot", type=to_write(*CHARTS), help="draw a chart (svg, png, pdf) too; needs seaborn")
    return parser


def _show(options: argparse.Namespace) -> int:
    found = files.read(options.rows)
    if not found:
        raise ValueError(f"{options.rows} has no rows; `cross_entropy --out {options.rows}` appends some")
    print(shown(found))
    if options.plot is not None:
        _import_seaborn()
        if len(names := sorted({row["op"] for row in found})) > 1:
            raise ValueError(f"--plot draws one operation, and {options.rows} has {', '.join(names)}")
        _plot(options.plot, ops.operation(names[0]), found)
    return 0


def shown(rows: Iterable[files.Row]) -> str:
    """Markdown tables of rows, by operation; those of operations of other packages have rows like ours."""
    known, by_op = ops.operations(), {}
    for row in rows:
        by_op.setdefault(row["op"], []).append(row)
    return "\n\n".join(known.get(op, report).tables(by_op[op]) for op in sorted(by_op))


def _measure(operation: Operation, options: argparse.Namespace) -> int:
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.list:
        _list(operation, device)
        return 0
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch sees no CUDA GPU; use --device cpu, or install a CUDA build of PyTorch")
    tasks = _tasks(operation, options, device)
    if options.plot is not None:
        _import_seaborn()
        operation.has_chart()
    progress = _Progress(len(tasks))

    def collect(task: Task, rows: list[files.Row]) -> None:
        progress.step(f"{task.case} {task.method}: {_summary(rows)}")
        if options.out is not None:
            files.append(options.out, rows)

    found = run(operation, tasks, collect)
    progress.close()
    print(operation.tables(found))
    if options.plot is not None:
        _plot(options.plot, operation, found)
    if options.out is not None:
        print(f"\n{len(found)} rows appended to {options.out}")
    return 1 if any("failed" in row.get("outcome", "") for row in found) else 0


def _tasks(operation: Operation, options: argparse.Namespace, device: str) -> list[Task]:
    """A task for each method and case, the operation's first before them. Raises ValueError for an argument."""
    usual = operation.defaults(device)
    repeats, warmup, seconds = (
        getattr(usual if getattr(options, name) is None else options, name) for name in ("repeats", "warmup", "seconds")
    )
    cases = _names("case", options.cases, usual.cases, operation.cases, operation.groups)
    first = [operation.first] if operation.first else []
    methods = _names("method", options.methods, usual.methods, [*operation.methods, *first])
    common = {
        "measures": tuple(_names("measure", options.measure, usual.measures, operation.measures)),
        "repeats": repeats, "warmup": warmup, "seconds": seconds, "seed": options.seed,
        "small": options.scale == "small", "device": device, "options": operation.options(options),
    }  # fmt: skip
    order = [*first, *(method for method in methods if method not in first)]
    return [Task(operation.name, case, method, **common) for case in cases for method in order]


def _names(
    kind: str,
    given: str | None,
    usual: str,
    known: Iterable[str],
    groups: Mapping[str, tuple[str, ...]] | None = None,
) -> list[str]:
    """Known names from a list separated by commas, groups expanded. Raises ValueError with the nearest name."""
    from paperlm_kernels.cross_entropy.options import unknown

    groups = groups or {}
    names: list[str] = []
    for name in filter(None, (part.strip() for part in (usual if given is None else given).split(","))):
        if name not in known and name not in groups:
            raise ValueError(unknown(kind, name, [*groups, *known]))
        names += groups.get(name, (name,))
    if not names:
        raise ValueError(f"no {kind} given; known: {', '.join([*groups, *known])}")
    return list(dict.fromkeys(names))


def _summary(rows: list[files.Row]) -> str:
    parts = []
    for row in rows:
        if row["metric"] == "outcome":
            parts.append(" ".join(filter(None, (row.get("measure"), row["outcome"]))))
        elif row["metric"] in ("time", "peak_memory", "error", "throughput"):
            parts.append(f"{row.get('measure', row['metric'])} {row['value']:.4g} {row['unit']}")
        elif row["metric"] == "determinism":
            parts.append("reproducible" if row["value"] == 1 else "not reproducible")
    return ", ".join(parts)


class _Progress:
    """A line for each finished step, with tqdm's bar below where tqdm is installed and someone is watching."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.bar = total, 0, None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self.bar = tqdm(total=total, unit="method", leave=False)

    def step(self, line: str) -> None:
        self.done += 1
        if self.bar is None:
            print(f"[{self.done}/{self.total}] {line}", file=sys.stderr, flush=True)
        else:
            self.bar.write(line, file=sys.stderr)
            self.bar.update()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def _list(operation: Operation, device: str) -> None:
    """Cases and methods, by name."""
    print("cases:")
    for name, about in operation.cases.items():
        groups = [group for group, names in operation.groups.items() if name in names]
        print(f"  {name:<20} {about}" + (f" ({groups[0]})" if groups else ""))
    print("methods:")
    for name, about in operation.methods.items():
        absent = operation.absent(name, device)
        print(f"  {name:<28} {about}" + (f" [absent: {absent}]" if absent else ""))


def _import_seaborn() -> None:
    try:
        import seaborn  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "--plot needs seaborn: pip install seaborn, or leave --plot out and draw later with `show`"
        ) from error


def _plot(path: Path, operation: Operation, found: list[files.Row]) -> None:
    operation.draw(found, path)
    print(f"\nchart written to {path}")
