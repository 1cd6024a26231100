"""Command line: `python -m paperlm_kernels.bench cross_entropy` measures, `... show rows.jsonl` prints the rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from paperlm_kernels.bench import rows as files
from paperlm_kernels.bench.report import tables

MEASURES = ("loss", "gradient", "both", "both_cold", "error", "determinism", "kernels")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and run; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m paperlm_kernels.bench", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measure = verbs.add_parser(
        "cross_entropy", help="time, memory and accuracy of linear cross-entropy, ours and others'",
        description="Measure the loss of a linear classifier: each method in its own process, on the same data.",
    )  # fmt: skip
    measure.add_argument(
        "--cases",
        help="names or all, table1, tableA1, tableA2, cpu, separated by commas (default: all; tiny_cpu on a CPU)",
    )
    measure.add_argument("--methods", help="names separated by commas (default: all; a few on a CPU)")
    measure.add_argument(
        "--measure",
        default="loss,gradient,both",
        help="of loss, gradient, both, both_cold (L2 flushed), error, determinism, kernels (time of each)",
    )
    measure.add_argument("--repeats", type=int, default=50, help="repetitions of each time (default 50)")
    measure.add_argument(
        "--seconds", type=float, help="fewer repetitions, but 10, if they take longer (default: 12, on a CPU 1.5)"
    )
    measure.add_argument("--warmup", type=int, default=3, help="repetitions before those (default 3)")
    measure.add_argument("--seed", type=int, default=0, help="of the data")
    measure.add_argument("--permute", action="store_true", help="relabel the ids at random: many more tiles stay alive")
    measure.add_argument(
        "--scale", choices=("full", "small"), default="full", help="small: an eighth of each size, to try this out"
    )
    measure.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    measure.add_argument("--out", type=Path, help="append the rows to this JSON lines file")
    measure.add_argument("--plot", type=Path, help="draw a chart (svg, png, pdf); needs seaborn")
    measure.add_argument(
        "--list", action="store_true", help="print cases and methods, and which of them cannot run here"
    )
    show = verbs.add_parser("show", help="print rows as Markdown tables")
    show.add_argument("rows", type=Path, help="JSON lines file")
    show.add_argument("--plot", type=Path, help="draw a chart (svg, png, pdf) too; needs seaborn")
    options = parser.parse_args(arguments)
    try:
        return _show(options) if options.verb == "show" else _cross_entropy(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; rows of finished methods are kept", file=sys.stderr)
        return 130


def _show(options: argparse.Namespace) -> int:
    found = files.read(options.rows)
    if not found:
        raise ValueError(f"{options.rows} has no rows; `cross_entropy --out {options.rows}` appends some")
    print(tables(found))
    _plot(options.plot, found)
    return 0


def _cross_entropy(options: argparse.Namespace) -> int:
    import torch

    from paperlm_kernels.bench.methods import METHODS, ON_CPU
    from paperlm_kernels.bench.run import run
    from paperlm_kernels.bench.worker import BOUND, Task
    from paperlm_kernels.cross_entropy.data import CASES, GROUPS

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.list:
        _list(device)
        return 0
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch sees no CUDA GPU; use --device cpu (cases cpu), or install a CUDA build of PyTorch")
    if options.seconds is None:
        options.seconds = 12.0 if device == "cuda" else 1.5
    if options.repeats < 1 or options.warmup < 0 or options.seconds < 0:
        raise ValueError("--repeats is 1 or more, --warmup and --seconds are 0 or more")
    if options.plot is not None:
        _import_seaborn()
    cases = _names("case", options.cases or ("all" if device == "cuda" else "tiny_cpu"), CASES, GROUPS)
    given = options.methods or ",".join(METHODS if device == "cuda" else ON_CPU)
    methods = [name for name in _names("method", given, [*METHODS, BOUND]) if name != BOUND]
    measures = tuple(_names("measure", options.measure, MEASURES))
    common = {
        "measures": measures, "repeats": options.repeats, "warmup": options.warmup, "seconds": options.seconds,
        "seed": options.seed, "permute": options.permute, "small": options.scale == "small", "device": device,
    }  # fmt: skip
    tasks = [Task(case, method, **common) for case in cases for method in (BOUND, *methods)]
    progress = _Progress(len(tasks))

    def collect(task: Task, rows: list[dict]) -> None:
        progress.step(f"{task.case} {task.method}: {_summary(rows)}")
        if options.out is not None:
            files.append(options.out, rows)

    found = run(tasks, collect)
    progress.close()
    print(tables(found))
    _plot(options.plot, found)
    if options.out is not None:
        print(f"\n{len(found)} rows appended to {options.out}")
    return 1 if any("failed" in row.get("outcome", "") for row in found) else 0


def _names(kind: str, given: str, known: Iterable[str], groups: dict[str, tuple[str, ...]] | None = None) -> list[str]:
    """Known names from a list separated by commas, groups expanded. Raises ValueError with the nearest name."""
    from paperlm_kernels.cross_entropy.options import unknown

    groups = groups or {}
    names: list[str] = []
    for name in filter(None, (part.strip() for part in given.split(","))):
        if name not in known and name not in groups:
            raise ValueError(unknown(kind, name, [*groups, *known]))
        names += groups.get(name, (name,))
    if not names:
        raise ValueError(f"no {kind} given; known: {', '.join([*groups, *known])}")
    return list(dict.fromkeys(names))


def _summary(rows: list[dict]) -> str:
    parts = []
    for row in rows:
        if row["metric"] == "outcome":
            parts.append(row["outcome"])
        elif row["metric"] in ("time", "peak_memory", "error"):
            parts.append(f"{row['measure']} {row['value']:.4g} {row['unit']}")
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


def _list(device: str) -> None:
    """Cases and methods, by name."""
    import torch

    from paperlm_kernels.bench.methods import METHODS
    from paperlm_kernels.cross_entropy.data import CASES, GROUPS

    print("cases (tokens x ids x width; lower bound of memory):")
    for case in CASES.values():
        tables = [table for table, names in GROUPS.items() if case.name in names]
        size = f"{case.tokens} x {case.vocab} x {case.width}; {case.lower_bound:.0f} MiB"
        print(f"  {case.name:<20} {case.model}: {size}" + (f" ({tables[0]})" if tables else ""))
    print("methods:")
    for name, (build, about) in METHODS.items():
        absent = build.func.absent(torch.device(device))
        print(f"  {name:<28} {about}" + (f" [absent: {absent}]" if absent else ""))


def _import_seaborn() -> None:
    try:
        import seaborn  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "--plot needs seaborn: pip install seaborn, or leave --plot out and draw later with `show`"
        ) from error


def _plot(path: Path | None, found: list[dict]) -> None:
    if path is None:
        return
    _import_seaborn()
    from paperlm_kernels.bench.chart import draw

    draw(found, path)
    print(f"\nchart written to {path}")


if __name__ == "__main__":
    sys.exit(main())
