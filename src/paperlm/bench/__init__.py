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

    The file is there when all were measured, not before, in place of one with older rows of the case, and every row
    says as `case_seconds` how long all took. While another process measures it, this one waits, and leaves that one's
    rows if they are what it was asked for.

    methods: names separated by commas; empty: all. device: cpu or cuda. size: full, or small to try it. A method that
    fails or is absent leaves a row that says so, and the table prints `not run` with its reason: that is no failure
    of the job. Raises SpecError for an unknown operation, case or method, for a group of cases and for a file with rows
    of other cases, before anything is written.
    """
    try:
        operation = with_ours().operation(op)
    except ValueError as error:
        raise SpecError(str(error)) from error
    if case in operation.groups and case not in operation.cases:
        raise SpecError(f"{case} is a group of cases; name one of them: {', '.join(operation.groups[case])}")
    if case not in operation.cases:
        raise SpecError(unknown("case", case, operation.cases))
    usual = operation.defaults(device, for_tables=True)
    wanted = list(filter(None, map(str.strip, (methods or usual.methods).split(","))))
    known = (*operation.methods, *filter(None, (operation.first,)))
    if strangers := [name for name in wanted if name not in known]:
        raise SpecError(unknown("method", strangers[0], known))
    arguments = [op, "--cases", case, "--methods", ",".join(wanted), "--measure", usual.measures]
    arguments += ["--repeats", str(usual.repeats), "--warmup", str(usual.warmup), "--seconds", str(usual.seconds)]
    partial = out.with_name(f".{out.name}.partial")
    _rows_there(out, op, case)
    before = out.stat().st_mtime_ns if out.is_file() else None
    with held(out.with_name(f".{out.name}.lock"), f"{op}, {case}"):
        there = _rows_there(out, op, case)
        if there and out.stat().st_mtime_ns != before and _are(there, wanted, device, size):
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


def _rows_there(out: Path, op: str, case: str) -> list[rows.Row]:
    """Rows of the case in a file that is to be replaced; none without a file. SpecError if others would be lost."""
    if not out.is_file():
        return []
    try:
        found = rows.read(out)
    except ValueError as error:
        raise SpecError(f"{error}; or name another --out, for this file is replaced") from None
    others = {f"{row['op']}, {row['case']}" for row in found} - {f"{op}, {case}"}
    if others:
        raise SpecError(f"{out} has rows of {'; '.join(sorted(others))}, which would be lost: name another --out")
    return found


def _are(found: list[rows.Row], methods: list[str], device: str, size: str) -> bool:
    """Whether rows of a case are those of these methods, on a device of this kind and in this size."""
    like = [row for row in found if row["scale"] == size and row["device"].startswith("cpu") == (device == "cpu")]
    return {*methods} <= {row["name"] for row in like}
