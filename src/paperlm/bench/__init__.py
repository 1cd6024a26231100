"""The benchmark of paperlm_kernels with the operations that need this package's models: the folders of `ops/` here.

They are modules of `paperlm_kernels.bench.ops`, which `with_ours` extends by that folder.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType

from paperlm_kernels.bench import rows

from paperlm.errors import SpecError, unknown
from paperlm.locks import held


def with_ours() -> ModuleType:
    """`paperlm_kernels.bench.ops`, which finds the operations of both packages from then on."""
    from paperlm_kernels.bench import ops

    folder = str(Path(__file__).parent / "ops")
    if folder not in ops.__path__:
        ops.__path__.append(folder)
    return ops


def main(arguments: list[str]) -> int:
    """`paperlm bench`: the command line of `paperlm_kernels.bench`, whose exit status it returns."""
    from paperlm_kernels.bench import command

    with_ours()
    return command.main(arguments, program="python -m paperlm bench")


def measure_case(op: str, case: str, methods: str, device: str, size: str, out: Path) -> int:
    """Write the rows of methods on a case to `out`, with the measures that tables show; returns the exit status.

    The file is there when all were measured, not before, and every row says as `case_seconds` how long all took; while
    another process measures it, this one waits and leaves that one's rows.

    methods: names separated by commas; empty: all. device: cpu or cuda. size: full, or small to try it. A method that
    fails or is absent leaves a row that says so, and the table prints `not run` with its reason: that is no failure
    of the job. Raises SpecError for an unknown operation, case or method, before anything is written.
    """
    try:
        operation = with_ours().operation(op)
    except ValueError as error:
        raise SpecError(str(error)) from error
    if case not in (cases := (*operation.groups, *operation.cases)):
        raise SpecError(unknown("case", case, cases))
    known = (*operation.methods, *filter(None, (operation.first,)))
    if strangers := [name for name in map(str.strip, methods.split(",")) if name and name not in known]:
        raise SpecError(unknown("method", strangers[0], known))
    usual = operation.defaults(device, for_tables=True)
    arguments = [op, "--cases", case, "--methods", methods or usual.methods, "--measure", usual.measures]
    arguments += ["--repeats", str(usual.repeats), "--warmup", str(usual.warmup), "--seconds", str(usual.seconds)]
    partial = out.with_name(f".{out.name}.partial")
    before = out.stat().st_mtime_ns if out.is_file() else None
    with held(out.with_name(f".{out.name}.lock"), f"{op}, {case}"):
        if out.is_file() and out.stat().st_mtime_ns != before:
            return 0
        partial.unlink(missing_ok=True)
        started = time.monotonic()
        status = main([*arguments, "--device", device, "--scale", size, "--out", str(partial)])
        if partial.is_file() and status in (0, 1):
            took = {"case_seconds": round(time.monotonic() - started, 2)}
            found = [{**row, **took} for row in rows.read(partial)]
            partial.unlink()
            rows.append(partial, found)
            partial.replace(out)
            return 0
        return status
