"""The command line. In a file of its own, which processes of the pool do not run as theirs."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from paperlm_kernels.bench.ops.ternary_linear import sweep

PROGRAMS = 132
"Multiprocessors of an H200."


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=sweep.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", default="7b_m16,7b_m1,7b_m256,7b_m4096", help="matrices and numbers of tokens, the first ones first"
    )
    parser.add_argument("--compile-seconds", type=float, default=600.0, help="0: only what is chosen is timed")
    parser.add_argument("--seconds", type=float, default=600.0, help="of timing, after which no case is begun")
    parser.add_argument("--each", type=float, default=600.0, help="of a case, after which no tiles are timed")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--out", type=Path, help="a file of rows, JSON")
    given = parser.parse_args()
    cases = sweep.cases_of(given.cases.split(","))
    sweep.APART.set_forkserver_preload([sweep.__name__])
    ready = set()
    if given.compile_seconds > 0:
        ready = sweep.compile_all(cases, PROGRAMS, given.workers, given.compile_seconds)
    end = time.monotonic() + given.seconds
    for case in cases:
        left = end - time.monotonic()
        if left < 0:
            print(f"no time for {case.name} and what follows")
            break
        found = sweep.rows_apart(sweep.send_rows, case, min(left, given.each), ready)
        print(sweep.summary(case, found), flush=True)
        if given.out:
            with given.out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)


if __name__ == "__main__":
    main()
