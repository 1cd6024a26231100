"""The benchmark of packed weights: its floors, cases, methods and rows."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import types

import pytest
import torch
from paperlm_kernels.bench import ops, rows
from paperlm_kernels.bench.command import main
from paperlm_kernels.bench.operation import Task
from paperlm_kernels.bench.ops.neuzip import declared, methods, on_file, task
from paperlm_kernels.bench.ops.neuzip.checkpoint import digest, weights_of
from paperlm_kernels.bench.ops.neuzip.coder import TOKENS, Inputs
from paperlm_kernels.bench.peers import AbsentError
from paperlm_kernels.neuzip import entropy_report
from safetensors.torch import save_file

from paperlm.plan.project import ROOT


def test_the_floors_are_those_of_bytes_read_and_written():
    # 2^27 weights: 10.69 bits are 179 MB, bfloat16 268 MB
    assert declared.CASES["w2e27"].floor(10.69) == pytest.approx(105.1, abs=0.1)
    assert 2 * 2**27 / declared.CASES["w2e27"].floor(10.69) / 1e3 == pytest.approx(2554, abs=1)  # GB/s
    assert [declared.CASES[f"figure4_{i:02d}"].weights * 2 for i in (0, 12)] == [10**5, 10**8]


@pytest.mark.parametrize("part", ["decode", "gemv", "gemv16"])
def test_a_product_has_the_floor_of_the_packed_weights_alone(part, monkeypatch):
    case, device = declared.CASES["w2e27"], torch.device("cuda")
    monkeypatch.setattr(task, "cold_times", lambda *given, **options: [100.0])
    monkeypatch.setattr(task, "copies_of", lambda *given: 1)
    monkeypatch.setattr(task.clocks, "clock_and_power", lambda: None)
    coder = types.SimpleNamespace(inputs=types.SimpleNamespace(device=device), case=case, call=lambda part: None)
    asked = Task("neuzip", case.name, "ours_fix4", (part,))
    row = task._time(ops.operation("neuzip"), asked, coder, part, 12.0, "NVIDIA H200")
    written = 2 if part == "decode" else 0  # bytes a weight
    assert row["floor_us"] == pytest.approx(1e6 * 2**27 * (1.5 + written) / declared.BANDWIDTH, rel=1e-4)
    assert row["over_floor"] == pytest.approx(100 / row["floor_us"], rel=1e-4)


def test_the_floors_of_committed_products_are_those_of_products():
    found = rows.read(ROOT / "paper_tables/records/bench/neuzip.jsonl")
    products = [row for row in found if row.get("measure") in TOKENS]
    assert len(products) == 71
    for row in products:
        floor = declared.Case("", "", row["shape"]["weights"]).product_floor(row["bits"])
        assert (row["floor_us"], row["over_floor"]) == pytest.approx((floor, row["value"] / floor), rel=2e-5)


def test_every_method_and_case_that_is_declared_is_there():
    assert list(declared.METHODS) == list(methods.METHODS)
    assert {name for names in declared.GROUPS.values() for name in names} == set(declared.CASES)


def test_the_listing_needs_no_card_and_says_why_a_peer_cannot_run(capsys):
    assert main(["neuzip", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "[absent: needs a CUDA GPU]" in listed and "10.69 bits" in listed
    assert "[absent: zipnn is not installed]" in listed
    assert all(name in listed for name in ops.operation("neuzip").methods)


def test_a_run_on_a_cpu_gives_times_bits_and_no_error_where_nothing_is_lost(tmp_path, capsys):
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
    lacking = [(row["name"], row["measure"]) for row in found if row.get("outcome") == "absent: has no such part"]
    assert lacking == [("copy", "update")], "a copy keeps nothing of the one before"
    assert "copy: decode" in (said := capsys.readouterr()).err and "update absent: has no such part" in said.err
    assert "| - |" in next(line for line in said.out.splitlines() if line.startswith("| copy"))
    assert all(row["gb_per_s"] > 0 for row in found if row["metric"] == "time")
    assert all(row["value"] == 1 for row in found if row["metric"] == "determinism")
    assert [row["outcome"] for row in found if row["name"] == "dfloat11"] == ["absent: needs a CUDA GPU"]


@pytest.mark.parametrize("case", ["figure4_02", "cpu_w2e20"])
def test_the_reference_of_the_papers_code_has_exact_bytes_near_the_entropy_and_no_time(case, tmp_path):
    out = tmp_path / "rows.jsonl"
    chosen = ["--methods", "rans", "--device", "cpu", "--measure", "decode,encode,bits,error"]
    assert main(["neuzip", "--cases", case, *chosen, "--out", str(out)]) == 0
    lacking = [row["measure"] for row in rows.read(out) if row["metric"] == "outcome"]
    assert lacking == ["decode", "encode"]
    found = {row["metric"]: row["value"] for row in rows.read(out) if row["metric"] != "outcome"}
    assert found.keys() == {"bits", "error"} and found["error"] == 0
    # of the exponents of a normal distribution 2.5453 bits, and the table of shares; the second is whole chunks
    assert 0 < found["bits"] - 8 - 2.5453 - 16 * 256 / declared.CASES[case].weights < 0.03
    assert methods.METHODS["rans"].absent("cuda") == "codes on a CPU: ask for --device cpu"


def test_products_are_timed_where_the_weights_are_a_matrix(tmp_path):
    out = tmp_path / "rows.jsonl"
    given = ["--device", "cpu", "--repeats", "1", "--scale", "small", "--measure", "gemv,gemv8", "--out", str(out)]
    assert main(["neuzip", "--cases", "cpu_w2e20,figure4_07", "--methods", "ours_fix4,copy", *given]) == 0
    found = rows.read(out)
    timed = [(row["case"], row["name"], row["measure"]) for row in found if row["metric"] == "time"]
    assert timed == [("cpu_w2e20", name, part) for name in ("ours_fix4", "copy") for part in ("gemv", "gemv8")]
    why = "absent: 351463 weights are no rows of 8192"
    assert [row["outcome"] for row in found if row["case"] == "figure4_07"] == [why] * 4


def test_files_are_packed_and_unpacked_on_one_core_and_the_method_without_files_says_so(tmp_path):
    out = tmp_path / "rows.jsonl"
    given = ["--device", "cpu", "--repeats", "1", "--scale", "small", "--out", str(out)]
    chosen = ["--methods", "ours,ours_fix4_k3,copy,zipnn", "--measure", "pack_file,unpack_file,bits"]
    assert main(["neuzip", "--cases", "cpu_w2e20", *chosen, *given]) == 0
    found = rows.read(out)
    fast = {(row["name"], row["measure"]): row for row in found if row["metric"] == "throughput"}
    assert set(fast) == {(name, part) for name in ("ours", "ours_fix4_k3") for part in ("pack_file", "unpack_file")}
    lacking = [(row["name"], row["measure"]) for row in found if row.get("outcome") == "absent: has no such part"]
    assert lacking == [("copy", "pack_file"), ("copy", "unpack_file")]
    for row in fast.values():
        assert row["value"] > 0 and row["unit"] == "MB/s" and row["cores"] == 1 and "1 thread)" in row["device"]
    bits = {row["name"]: row["value"] for row in found if row["metric"] == "bits"}
    assert bits["copy"] == 16 and bits["ours_fix4_k3"] == pytest.approx(8 + 8 / 512, abs=0.1)
    assert [row["outcome"] for row in found if row["name"] == "zipnn"] == ["absent: zipnn is not installed"]


def _file_task(case: str = "cpu_w2e20", **given) -> Task:
    return Task("neuzip", case, "ours", ("pack_file", "unpack_file"), repeats=1, small=True, device="cpu", **given)


def test_the_cores_and_threads_of_a_process_that_packed_files_are_what_they_were():
    before = os.sched_getaffinity(0), torch.get_num_threads()
    with on_file.one_core():
        assert len(os.sched_getaffinity(0)) == torch.get_num_threads() == 1
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before


def test_a_codec_that_gives_another_file_fails(monkeypatch):
    monkeypatch.setattr(methods.Ours, "unpack_file", lambda self, source, target: target.write_bytes(b"other"))
    outcomes = [row.get("outcome") for row in ops.operation("neuzip").run(_file_task())]
    assert outcomes == [None, "failed: the file that was unpacked is not the one that was packed"]


def test_files_that_cannot_be_are_absent_with_what_helps(monkeypatch):
    coder = methods.Ours(Inputs(declared.CASES["cpu_w2e20"].small(), torch.device("cpu"), 0))
    with pytest.raises(AbsentError, match="ask for --device cpu"):
        on_file.speeds(coder, "pack_file", dataclasses.replace(_file_task(), device="cuda"))
    monkeypatch.setattr(on_file.shutil, "disk_usage", lambda place: types.SimpleNamespace(free=1000))
    outcomes = [row["outcome"] for row in ops.operation("neuzip").run(_file_task())]
    need = "absent: its files need 1,048,576 bytes in /dev/shm, or in a folder that TMPDIR names: make room"
    assert outcomes == [need, need]


def test_a_gpu_is_not_asked_for_every_profile_with_loss_unless_it_is_named():
    operation = ops.operation("neuzip")
    left = set(operation.methods) - set(operation.defaults("cuda").methods.split(","))
    assert left == {f"ours_{profile}_k{bits}" for profile in ("dense", "fast", "fix4") for bits in (3, 1, 0)}
    assert operation.defaults("cpu").methods.split(",") == list(operation.methods)
    assert methods.METHODS["ours_dense_k1"].options == {"profile": "dense", "mant_bits": 1, "block_norm": 512}


def test_weights_of_students_t_have_its_quantiles_and_normal_ones_are_drawn_as_before():
    device = torch.device("cpu")
    case = declared.CASES["student_t"].small()
    weights = Inputs(case, device, 0).weights.float() / 0.02
    assert [(weights.abs() > x).float().mean().item() for x in (0.7267, 2.5706, 4.0321)] == pytest.approx(
        [0.5, 0.05, 0.01], rel=0.02
    )
    found = entropy_report(Inputs(case, device, 0).weights)
    assert (found.exponent, found.joint) == pytest.approx((2.674, 10.61), abs=2e-3), "of Llama-3 8B"
    assert ops.operation("neuzip").identity(Task("neuzip", "student_t", "ours", (), small=True))["shape"] == {
        "weights": 2**21, "degrees_of_freedom": 5
    }  # fmt: skip
    normal = dataclasses.replace(case, degrees=None)
    drawn = torch.randn(2**21, generator=torch.Generator().manual_seed(0)) * 0.02
    assert torch.equal(Inputs(normal, device, 0).weights, drawn.bfloat16())


def test_bits_of_several_cases_stand_beside_each_other_and_other_tables_stay(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    given = ["--device", "cpu", "--scale", "small", "--out", str(out), "--methods", "ours,ours_fix4,zipnn"]
    assert main(["neuzip", "--cases", "distributions", "--measure", "bits", *given]) == 0
    capsys.readouterr()
    assert main(["show", str(out)]) == 0
    caption, _, head, _, *lines = capsys.readouterr().out.splitlines()
    assert caption.startswith("**w2e24 and student_t** (small, to try the benchmark): bits per weight, cpu (")
    assert head == "| method | w2e24 | student_t |"
    first, second = (line.strip("| ").split(" | ") for line in lines[:2])
    assert (first[0], second[0]) == ("ours", "ours_fix4") and float(first[1]) + 0.1 < float(first[2]) < 10.9
    assert lines[3].startswith("w2e24: Not measured on cpu (")
    assert lines[3].endswith("): zipnn (absent: zipnn is not installed).")
    assert main(["neuzip", "--cases", "w2e24", "--measure", "error", *given]) == 0
    capsys.readouterr()
    assert main(["show", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "**w2e24** (small" in shown and "**student_t** (small" in shown and "w2e24 and" not in shown


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A checkpoint whose matrices have as many weights as the case is given here, and one more."""
    monkeypatch.setattr(declared, "CHECKPOINT", declared.Case("checkpoint", "of a trained model", 2**16))
    monkeypatch.setitem(declared.CASES, "checkpoint", declared.CHECKPOINT)
    torch.manual_seed(0)
    own = torch.randn(2**16 + 1).bfloat16()
    path = tmp_path / "model.safetensors"
    others = {
        name: torch.zeros(64, 64, dtype=torch.bfloat16)
        for name in ("model.embed_tokens.weight", "lm_head.weight", "shared.weight", "wte.weight")
    }
    save_file(
        others | {"a.weight": own[: 2**15].view(-1, 64).clone(), "b.weight": own[2**15 :].view(-1, 1).clone(),
                  "norm.weight": torch.zeros(64, dtype=torch.bfloat16), "c.weight": torch.zeros(64, 64)}, path
    )  # fmt: skip
    return path, own[: 2**16]


def test_weights_of_a_checkpoint_are_those_of_its_matrices_in_bfloat16_in_the_order_of_the_file(trained):
    path, own = trained
    assert torch.equal(weights_of(path, 2**16), own)
    with pytest.raises(ValueError, match=r"65,537 weights in matrices .* 65,538 are needed: name a larger checkpoint"):
        weights_of(path, 2**16 + 2)
    operation = ops.operation("neuzip")
    given = argparse.Namespace(cases="w2e24, trained", weights=path, scale="full")
    options = operation.options(given)
    task = Task("neuzip", "checkpoint", "copy", ("bits",), device="cpu", options=options)
    wanted = hashlib.sha256(own.view(torch.int16).numpy().tobytes()).hexdigest()[:12]
    assert operation.identity(task)["source"] == f"model.safetensors, sha256 {wanted} of its first 65,536 weights"
    other = dataclasses.replace(task, case="w2e24")
    assert operation.identity(other)["source"] == "synthetic"
    rows = list(operation.run(dataclasses.replace(task, measures=("decode", "bits"), repeats=1)))
    assert {row["metric"] for row in rows} == {"time", "bits"}
    on_file = dataclasses.replace(_file_task("checkpoint", options=options), small=False)
    assert [(row["metric"], row["source"]) for row in operation.run(on_file)] == [
        ("throughput", operation.identity(task)["source"])
    ] * 2


def test_a_checkpoint_is_of_its_case_alone_and_others_beside_it_have_normal_weights(trained):
    path, own = trained
    options = {"weights": str(path), "sha256": digest(own[: declared.CHECKPOINT.small().weights])}
    task = Task("neuzip", "figure4_00", "ours", ("bits",), device="cpu", small=True, options=options)
    operation = ops.operation("neuzip")
    beside, alone = (list(operation.run(dataclasses.replace(task, options=given))) for given in (options, {}))
    own = list(operation.run(dataclasses.replace(task, case="checkpoint")))
    assert beside[0]["value"] == alone[0]["value"] != own[0]["value"]


def test_a_checkpoint_that_changes_between_methods_is_refused(trained):
    path, own = trained
    options = ops.operation("neuzip").options(argparse.Namespace(cases="trained", weights=path, scale="full"))
    asked = Task("neuzip", "checkpoint", "copy", ("bits",), device="cpu", options=options)
    save_file({"a.weight": -own.view(-1, 64)}, path)
    with pytest.raises(ValueError, match=r"model.safetensors has changed since the call began: .* measure again"):
        list(ops.operation("neuzip").run(asked))


def test_a_checkpoint_is_asked_for_and_refused_where_nothing_would_read_it(tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes(b"8")
    assert main(["neuzip", "--device", "cpu", "--cases", "checkpoint"]) == 2
    assert "the case checkpoint needs --weights FILE" in capsys.readouterr().err
    assert main(["neuzip", "--device", "cpu", "--weights", str(tmp_path / "model.safetensors")]) == 2
    assert "--weights is of the case checkpoint: add --cases checkpoint" in capsys.readouterr().err
    given = ["neuzip", "--device", "cpu", "--cases", "trained", "--weights"]
    assert main([*given, str(tmp_path / "model.safetensors")]) == 2
    assert "no safetensors file" in capsys.readouterr().err
    assert main([*given, str(tmp_path / "none")]) == 2
    assert "no such file" in capsys.readouterr().err
