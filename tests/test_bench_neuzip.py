"""The benchmark of packed weights: its floors, cases, methods and rows."""

from __future__ import annotations

import pytest
from paperlm_kernels.bench import ops, rows
from paperlm_kernels.bench.command import main
from paperlm_kernels.bench.ops.neuzip import declared, methods


def test_the_floors_are_those_of_bytes_read_and_written():
    # 2^27 weights: 10.69 bits are 179 MB, bfloat16 268 MB
    assert declared.CASES["w2e27"].floor(10.69) == pytest.approx(105.1, abs=0.1)
    assert 2 * 2**27 / declared.CASES["w2e27"].floor(10.69) / 1e3 == pytest.approx(2554, abs=1)  # GB/s
    assert [declared.CASES[f"figure4_{i:02d}"].weights * 2 for i in (0, 12)] == [10**5, 10**8]


def test_every_method_and_case_that_is_declared_is_there():
    assert list(declared.METHODS) == list(methods.METHODS)
    assert {name for names in declared.GROUPS.values() for name in names} == set(declared.CASES)


def test_the_listing_needs_no_card_and_says_why_a_peer_cannot_run(capsys):
    assert main(["neuzip", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "[absent: needs a CUDA GPU]" in listed and "10.69 bits" in listed
    assert "[absent: zipnn is not installed]" in listed
    assert "[absent: the project of that name is on GitHub only;" in listed  # PyPI's splitzip is never imported
    assert all(name in listed for name in ops.operation("neuzip").methods)


def test_a_run_on_a_cpu_gives_times_bits_and_no_error_where_nothing_is_lost(tmp_path):
    out = tmp_path / "rows.jsonl"
    given = ["--device", "cpu", "--repeats", "1", "--scale", "small", "--out", str(out)]
    measures = "decode,encode,update,bits,error,determinism"
    chosen = ["--methods", "ours,ours_fix4,ours_k3,copy,dfloat11", "--measure", measures]
    assert main(["neuzip", "--cases", "cpu_w2e20", *chosen, *given]) == 0
    found = rows.read(out)
    errors = {row["name"]: row["value"] for row in found if row["metric"] == "error"}
    assert errors["ours"] == errors["ours_fix4"] == errors["copy"] == 0 and 0.02 < errors["ours_k3"] < 0.03
    bits = {row["name"]: row["value"] for row in found if row["metric"] == "bits"}
    assert bits["copy"] == 16 and 12 < bits["ours_fix4"] < 12.1 and 10.5 < bits["ours"] < 10.8
    timed = [(row["name"], row["measure"]) for row in found if row["metric"] == "time"]
    assert {("ours", "decode"), ("ours", "encode"), ("ours_fix4", "update")} <= set(timed)
    assert ("copy", "update") not in timed, "a copy keeps nothing of the one before"
    assert all(row["gb_per_s"] > 0 for row in found if row["metric"] == "time")
    assert all(row["value"] == 1 for row in found if row["metric"] == "determinism")
    assert [row["outcome"] for row in found if row["name"] == "dfloat11"] == ["absent: needs a CUDA GPU"]


def test_products_are_timed_where_the_weights_are_a_matrix(tmp_path):
    out = tmp_path / "rows.jsonl"
    given = ["--device", "cpu", "--repeats", "1", "--scale", "small", "--measure", "gemv,gemv8", "--out", str(out)]
    assert main(["neuzip", "--cases", "cpu_w2e20,figure4_07", "--methods", "ours_fix4,copy", *given]) == 0
    found = rows.read(out)
    timed = [(row["case"], row["name"], row["measure"]) for row in found if row["metric"] == "time"]
    assert timed == [("cpu_w2e20", name, part) for name in ("ours_fix4", "copy") for part in ("gemv", "gemv8")]
    why = "absent: 351463 weights are no rows of 8192"
    assert [row["outcome"] for row in found if row["case"] == "figure4_07"] == [why] * 4
