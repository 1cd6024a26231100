"""Rows, tables and the command line of the benchmark of linear cross-entropy, and its committed rows."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from paperlm_kernels.bench import ops, peers, rows
from paperlm_kernels.bench.command import main
from paperlm_kernels.bench.operation import Task
from paperlm_kernels.bench.ops.cross_entropy import BOUND, chart
from paperlm_kernels.bench.ops.cross_entropy.declared import CASES
from paperlm_kernels.bench.ops.cross_entropy.methods import METHODS
from paperlm_kernels.bench.ops.cross_entropy.report import tables
from paperlm_kernels.bench.run import run

from paperlm.bench import with_ours
from paperlm.plan.project import ROOT

# -- rows and tables ----


def test_a_row_has_the_keys_of_the_committed_measurements():
    task = Task("cross_entropy", "tiny_cpu", "ours", ())
    values = [3.0, 1.0, 2.0, 5.0, 4.0, 6.0]
    row = ops.operation("cross_entropy").row(task, "cpu", "time", "ms", values, mean=3.5)
    for path in sorted((ROOT / "paper_tables/records/bench").glob("*.jsonl")):
        for committed in rows.read(path):
            assert committed["op"] == re.sub("_(h100|kernels|64|cpu|student_t|second|third|gemlite)$", "", path.stem)
            common = set(rows.row("", "", "", "", "", [], "")) | {"name", "order", "scale", "seed", "shape"}
            assert common <= set(row) and common <= set(committed)
    assert (row["value"], row["low"], row["high"], row["n"], row["mean"]) == (3.5, 2.0, 5.0, 6, 3.5)


def test_without_a_repository_the_commit_comes_from_the_environment(monkeypatch):
    def no_git(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    monkeypatch.setenv("PAPERLM_COMMIT", "abc")
    rows.commit_id.cache_clear()
    assert rows.commit_id() == "abc"
    rows.commit_id.cache_clear()


def test_the_commit_of_a_repository_around_the_package_is_not_taken_for_its_own(monkeypatch, tmp_path):
    copy = tmp_path / "site" / "rows.py"
    copy.parent.mkdir()
    copy.write_text(Path(rows.__file__).read_text())
    (tmp_path / "beside.py").touch()
    (tmp_path / "record.jsonl").touch()
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "of something else"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.delenv("PAPERLM_COMMIT", raising=False)
    monkeypatch.setattr(rows, "__file__", str(copy))
    rows.commit_id.cache_clear()
    assert rows.commit_id() is None
    for words in (["add", "."], ["commit", "-q", "-m", "of this file too"]):
        subprocess.run([*git, *words], check=True)
    rows.commit_id.cache_clear()
    found = rows.commit_id()
    assert len(found) == 40 and rows.short_commit(found) == found[:7]
    (tmp_path / "new.py").touch()
    (tmp_path / "record.jsonl").write_text("a row that is there\n")
    rows.commit_id.cache_clear()
    assert rows.commit_id() == found, "what git does not know, and what is no code, changes nothing"
    (tmp_path / "beside.py").write_text("# changed\n")
    rows.commit_id.cache_clear()
    assert rows.commit_id() == f"{found}+changes" and rows.short_commit(rows.commit_id()) == f"{found[:7]}+changes"
    told = subprocess.run

    def slow(command, **given):
        if "status" in command:
            raise subprocess.TimeoutExpired(command, 10)
        return told(command, **given)

    monkeypatch.setattr(subprocess, "run", slow)
    rows.commit_id.cache_clear()
    assert rows.commit_id() == found
    rows.commit_id.cache_clear()


def test_a_commit_is_shortened_with_what_is_said_of_changes():
    assert rows.short_commit(None) == "" and rows.short_commit("a" * 40) == "aaaaaaa"
    assert rows.short_commit("abc+changes") == "abc+changes" and rows.short_commit("a" * 40, 9) == "a" * 9


def test_rows_of_a_call_are_of_the_commit_it_began_with(monkeypatch, tmp_path):
    """Processes of the benchmark are told it: the record that is written to may lie in the repository."""
    monkeypatch.setattr("paperlm_kernels.bench.run.commit_id", lambda: "begun")
    monkeypatch.delenv("PAPERLM_COMMIT", raising=False)
    out = tmp_path / "rows.jsonl"
    command = "cross_entropy --device cpu --cases tiny_cpu --scale small --repeats 1 --methods eager --measure loss"
    assert main([*command.split(), "--out", str(out)]) == 0
    assert {row["commit"] for row in rows.read(out)} == {"begun"}


def test_rows_behind_a_line_that_was_cut_off_are_lines_of_their_own(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"op": "half')
    rows.append(path, [{"a": 1}])
    rows.append(path, [{"a": 2}])
    first, *lines = path.read_text().splitlines()
    assert first == '{"op": "half' and [json.loads(line)["a"] for line in lines] == [1, 2]


def test_a_peers_name_in_a_row_has_its_version(monkeypatch):
    monkeypatch.setattr(peers, "version", lambda name: "1.2")
    label = ops.operation("cross_entropy").label
    assert label("cut-cross-entropy exact") == "cut-cross-entropy 1.2 (exact)"
    assert label("liger-kernel") == "liger-kernel 1.2"
    assert label("ours_exact") == "ours_exact"


def _row(name: str, metric: str, value: float | None, **extra: object) -> dict:
    return {
        "op": "cross_entropy", "case": "toy", "method": extra.pop("method", name), "name": name, "metric": metric,
        "value": value, "low": value, "high": value, "n": 50, "device": "Card", "order": "natural", "scale": "full",
        "source": "synthetic", "seed": 0, "lower_bound_mib": 1161.0, "versions": {"torch": "2", "triton": "3"},
        "commit": "abc", "date": "2026-01-02",
        "shape": {"tokens": 8, "counting": 0.36, "vocab": 16, "width": 4, "softcap": 30.0, "dtype": "bfloat16"},
        **extra,
    }  # fmt: skip


def test_rows_become_a_table_of_memory_and_time_and_one_of_accuracy():
    same = {"loss": True, "dE": True, "dC": False}
    speed = {"floor_ms": 12.23, "matmul_tflops": 800.0}
    text = tables([
        _row("lower_bound", "peak_memory", 4 / 2**20, measure="loss"),
        _row("lower_bound", "alive_share", 0.271, tiles="128x128"),
        _row("lower_bound", "alive_share", 0.2, tiles="128x128 sorted"),
        _row("lower_bound", "product", 14.02, measure="logits"),
        _row("lower_bound", "product", 9.876, measure="dE"),
        _row("ours", "time", 99.0, measure="both", over_floor=9.0, **speed),
        _row("ours", "time", 24.94, measure="both", over_floor=2.039, **speed),
        _row("ours", "peak_memory", 1219.4, measure="both", over_bound=1.0503),
        _row("eager", "outcome", None, measure="both", outcome="out of memory"),
        _row("peer", "outcome", None, outcome="absent: peer is not installed"),
        _row("eager", "time", 30.0, measure="loss", floor_ms=12.23, matmul_tflops=787.4, commit="def"),
        _row("ours", "error", 0.0271, measure="dE"),
        _row("ours", "norm", 0.98765, measure="dE"),
        _row("ours", "kernel", 13.0, measure="forward_kernel", launches=1.0),
        _row("ours", "kernel", 13.5, measure="others", launches=4.4),
        _row("eager", "kernel", 14.0, measure="gemm", launches=3.0),
        _row("peer exact", "determinism", 0.0, parts=same, method="peer 1.0 (exact)"),
    ])  # fmt: skip
    assert (
        text
        == """\
**toy**: 8 tokens, 36% of them counting, 16 ids, width 4, softcap 30, bfloat16, synthetic data with ids in natural \
order, 27% of the 128 x 128 tiles alive. Both gradients take 1,161 MiB, one matrix product 12.23 ms at 790 TFLOP/s \
(measured beside: 787-800 TFLOP/s). The products of these data by cuBLAS alone, ms: logits 14.0, dE 9.88. \
Times: median (20th-80th percentile) of 50 repetitions. Card, torch 2, triton 3, \
2026-01-02, commit abc and def.

| method | loss, MiB | loss, ms | loss+gradient, MiB | loss+gradient, ms | memory / gradients | time / product |
|---|---|---|---|---|---|---|
| lower bound | < 0.01 |  |  |  |  |  |
| ours |  |  | 1,219 | 24.9 (24.9-24.9) | 1.05 | 2.04 |
| eager |  | 30.0 (30.0-30.0) | out of memory | out of memory |  |  |

| method | dE, relative error | norm of dE / exact | same bits in every run |
|---|---|---|---|
| ours | 2.7e-02 | 0.9877 |  |
| peer 1.0 (exact) |  |  | not dC |

| kernel: ms (launches) | ours | eager |
|---|---|---|
| gemm |  | 14.00 (3) |
| forward_kernel | 13.00 (1) |  |
| others | 13.50 (4.4) |  |

Not measured on Card: peer (absent: peer is not installed).

Share of tiles alive, tokens x ids; sorted: ids by their mean logit.

| case | order of the ids | 128x128 | 128x128 sorted |
|---|---|---|---|
| toy | natural | 27.1% | 20.0% |"""
    )


def test_a_method_that_was_absent_and_is_measured_later_is_no_longer_called_absent():
    text = tables([
        _row("peer", "outcome", None, outcome="absent: peer is not installed"),
        _row("peer", "time", 5.0, measure="loss", method="peer 1.0"),
    ])  # fmt: skip
    assert "absent" not in text
    assert "| peer 1.0 | 5.00 (5.00-5.00) |" in text


def test_the_chart_shows_both_ratios_of_every_method_and_case(tmp_path):
    pytest.importorskip("seaborn")
    found = [
        _row("ours", "time", 24.9, measure="both", over_floor=2.04),
        _row("ours", "peak_memory", 1219.0, measure="both", over_bound=1.05),
        _row("eager", "time", 67.0, measure="both", over_floor=5.5, case="other"),
    ]
    points = [(p["case"], p["method"], p.get("over_floor"), p.get("over_bound")) for p in chart.points(found)]
    assert points == [("toy", "ours", 2.04, 1.05), ("other", "eager", 5.5, None)]
    chart.draw(found, tmp_path / "chart.svg")
    assert "<svg" in (tmp_path / "chart.svg").read_text()
    with pytest.raises(ValueError, match="no row has a time or memory of loss and gradient"):
        chart.draw([_row("ours", "time", 1.0, measure="loss")], tmp_path / "none.svg")


# -- command line ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "gema2_2b"], "unknown case 'gema2_2b'; did you mean 'gemma2_2b'"),
        (["--cases", "tabel1"], "unknown case 'tabel1'; did you mean 'table1'"),
        (["--methods", "eagre"], "unknown method 'eagre'; did you mean 'eager'"),
        (["--measure", "los"], "unknown measure 'los'; did you mean 'loss'"),
        (["--methods", ","], "no method given; known: ours,"),
        (["--repeats", "0"], "--repeats: '0' is no whole number of 1 or more"),
    ],
)
def test_a_wrong_argument_is_refused_with_the_nearest_name(arguments, message, capsys):
    assert main(["cross_entropy", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_showing_a_file_without_rows_says_how_to_get_some(tmp_path, capsys):
    (tmp_path / "rows.jsonl").touch()
    assert main(["show", str(tmp_path / "rows.jsonl")]) == 2
    assert "cross_entropy --out" in capsys.readouterr().err


def test_a_run_on_a_cpu_measures_each_method_in_a_process_and_appends_its_rows(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    command = ["cross_entropy", "--device", "cpu", "--cases", "tiny_cpu", "--scale", "small", "--repeats", "2"]
    command += [
        "--methods",
        "ours,eager,liger-kernel",
        "--measure",
        "both,error,determinism,kernels",
        "--out",
        str(out),
    ]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "[4/4] tiny_cpu liger-kernel: absent: " in shown.err
    found = {(r["name"], r["metric"], r.get("measure", "")): r for r in rows.read(out) if "tiles" not in r}
    case = CASES["tiny_cpu"].small()
    logits = case.tokens * case.vocab * 4 / 2**20
    assert found["eager", "peak_memory", "both"]["value"] == pytest.approx(4 * logits, rel=0.01)
    assert found["lower_bound", "peak_memory", "both"]["value"] == pytest.approx(case.lower_bound, rel=1e-5)
    for name in ("ours", "eager"):
        row = found[name, "time", "both"]
        assert row["n"] == 2
        assert 0 < row["low"] <= row["value"] <= row["high"]
        assert row["device"].startswith("cpu (")
        assert row["alive_share"] == 1
        assert found[name, "error", "dE"]["value"] < 1e-4
        assert found[name, "norm", "dE"]["value"] == pytest.approx(1, abs=1e-4)
        assert found[name, "kernel", "mm"]["launches"] >= 3
        assert found[name, "error", "lse"]["value"] < 1e-4
        assert found[name, "determinism", ""]["value"] == 1
    assert main(["show", str(out)]) == 0
    assert capsys.readouterr().out.strip() == tables(rows.read(out))


def test_a_method_that_fails_leaves_a_row_with_the_reason():
    collected = []
    task = Task("cross_entropy", "tiny_cpu", "eager", ("loss",), small=True, device="cpu", seed="no number")
    found = run(ops.operation("cross_entropy"), [task], lambda _, r: collected.append(r))
    assert collected == [found]
    assert [row["metric"] for row in found] == ["outcome"]
    assert found[0]["outcome"].startswith("failed: RuntimeError: manual_seed")


# -- committed rows ----


FEW_BITS = (
    "neuzip", "ternary_linear", "ternary_linear_gemlite", "ternary_linear_second", "rmsnorm_quantize", "kv_attention",
    "decode", "descent",
)  # fmt: skip
OF_METRIC = {
    "memory": "memory", "resident": "memory", "kernel": "kernels", "loss": "update", "weights_hash": "update",
    "bits_per_weight": "update", "bytes_per_token": "decode", "throughput": "decode",
}  # fmt: skip
"Metric of a row -> the measure that gives it; others have their own name, or say their measure."


def test_every_committed_row_of_few_bits_is_of_a_command_in_the_script_beside_it():
    records, known = ROOT / "paper_tables/records/bench", with_ours()
    given = {**os.environ, "BENCH": "echo", "WEIGHTS": "w.safetensors", "LOCAL": "texts"}
    said = subprocess.run(["sh", records / "few_bits.sh", "new"], capture_output=True, text=True, check=True, env=given)
    commanded: dict[str, set] = {}
    for line in said.stdout.splitlines():
        name, *words = line.replace("--", "\t--").split("\t")
        operation, options = known.operation(name.strip()), dict(word.strip().split(" ", 1) for word in words)
        assert options["--out"] == f"new/{operation.name}.jsonl"
        groups = [operation.groups.get(case, (case,)) for case in options["--cases"].split(",")]
        cases, methods = {case for group in groups for case in group}, set(options["--methods"].split(","))
        measures = set(options["--measure"].split(","))
        assert cases <= set(operation.cases) and methods <= set(operation.methods)
        assert measures <= set(operation.measures)
        commanded.setdefault(operation.name, set()).update(itertools.product(cases, methods, measures))
    for name in FEW_BITS:
        for row in rows.read(records / f"{name}.jsonl"):
            if row["metric"] != "outcome":
                metric = row["metric"]
                measure = row.get("measure") if metric == "time" else OF_METRIC.get(metric, metric)
                assert (row["case"], row["name"], measure) in commanded[row["op"]], row
    assert {name.removesuffix("_gemlite").removesuffix("_second") for name in FEW_BITS} == set(commanded)


def test_the_committed_measurements_are_those_of_the_commands_in_the_script_beside_them():
    records = ROOT / "paper_tables/records/bench"
    command = ["sh", records / "cross_entropy.sh", "new.jsonl"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "BENCH": "echo"})
    commanded, measures = set(), ops.operation("cross_entropy").measures
    for line in said.stdout.splitlines():
        words = shlex.split(line)
        given = dict(itertools.pairwise(words))
        cases, methods = given["--cases"].split(","), given.get("--methods", ",".join(METHODS)).split(",")
        assert given["--out"] == "new.jsonl" and set(cases) <= CASES.keys() and set(methods) <= METHODS.keys()
        assert set(given["--measure"].split(",")) <= set(measures)
        order = "permuted" if "--permute" in words else "natural"
        commanded |= set(itertools.product(cases, [order], [*methods, BOUND], given["--measure"].split(",")))
    of_metric = {"error": "error", "norm": "error", "determinism": "determinism", "kernel": "kernels"}
    for name in ("cross_entropy.jsonl", "cross_entropy_h100.jsonl"):
        measured, absent = set(), set()
        for row in rows.read(records / name):
            place = row["case"], row["order"], row["name"]
            if row["name"] == BOUND:
                assert any(tuple(found) == place for *found, _ in commanded)
            elif row["metric"] == "outcome":  # of one measure, or of the whole method
                absent.add((*place, row.get("measure")))
            else:
                measured.add((*place, of_metric.get(row["metric"], row.get("measure"))))
        assert measured <= commanded
        if name == "cross_entropy.jsonl":
            left = {c for c in commanded - measured if c[2] != BOUND}
            # Liger's loss computes its gradients at once, so that there is no step of the gradient alone
            left -= {c for c in left if c[2:] == ("liger-kernel", "gradient")}
            assert all(c in absent or (*c[:3], None) in absent for c in left), left
