"""The committed measurements of linear cross-entropy: of the commands beside them, and in the README of the kernels."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys

from paperlm_kernels.bench.__main__ import MEASURES
from paperlm_kernels.bench.methods import METHODS
from paperlm_kernels.bench.rows import read
from paperlm_kernels.bench.worker import BOUND
from paperlm_kernels.cross_entropy.data import CASES

from paperlm.spec.project import ROOT


def test_every_committed_measurement_is_of_a_command_in_the_script_beside_it():
    records = ROOT / "paper_tables/records/bench"
    command = ["sh", records / "cross_entropy.sh", "new.jsonl"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "BENCH": "echo"})
    commanded = set()
    for line in said.stdout.splitlines():
        words = shlex.split(line)
        given = dict(itertools.pairwise(words))
        cases, methods = given["--cases"].split(","), given.get("--methods", ",".join(METHODS)).split(",")
        assert given["--out"] == "new.jsonl" and set(cases) <= CASES.keys() and set(methods) <= METHODS.keys()
        assert set(given["--measure"].split(",")) <= set(MEASURES)
        order = "permuted" if "--permute" in words else "natural"
        commanded |= set(itertools.product(cases, [order], [*methods, BOUND], given["--measure"].split(",")))
    of_metric = {"error": "error", "norm": "error", "determinism": "determinism", "kernel": "kernels"}
    for row in read(records / "cross_entropy.jsonl"):
        if row["name"] == BOUND:
            assert any(name == BOUND and tuple(place) == (row["case"], row["order"]) for *place, name, _ in commanded)
        elif row["metric"] != "outcome":
            measure = of_metric.get(row["metric"], row.get("measure"))
            assert (row["case"], row["order"], row["name"], measure) in commanded


def test_the_readme_of_the_kernels_shows_the_committed_measurements():
    measured = ROOT / "paper_tables/records/bench/cross_entropy.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "kernels")}
    command = [sys.executable, "-m", "paperlm_kernels.bench", "show", str(measured)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()
    readme = (ROOT / "kernels/README.md").read_text()
    assert readme.split("cross_entropy.jsonl -->")[1].split("<!-- end -->")[0].strip() == shown
