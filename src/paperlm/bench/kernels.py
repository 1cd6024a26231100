"""`paperlm measure`: the benchmarks of paperlm_kernels, as a job of the workflow."""

from __future__ import annotations

from pathlib import Path

QUANTITIES = {"cuda": "loss,gradient,both,both_cold,error,determinism", "cpu": "loss,gradient,both,error"}
REPETITIONS = {"cuda": ["--repeats", "50", "--warmup", "3"], "cpu": ["--repeats", "3", "--warmup", "1"]}
"On a CPU only so many that the table shows something: its times are compared with nothing."


def measure(op: str, case: str, methods: str, device: str, size: str, out: Path) -> int:
    """Append the rows of every method on a case to `out`; returns the exit status. `size`: full, or small to try it.

    A method that fails or is not installed leaves a row that says so, and the table prints `not run` with its reason:
    that is no failure of the job.
    """
    from paperlm_kernels.bench.__main__ import main

    arguments = [op, "--cases", case, "--device", device, "--measure", QUANTITIES[device], "--out", str(out)]
    arguments += ["--scale", size, *REPETITIONS[device]]
    status = main([*arguments, "--methods", methods] if methods else arguments)
    return 0 if status == 1 and out.is_file() else status
