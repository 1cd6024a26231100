"""The benchmarks of products with ternary weights and of quantized caches: their ceilings, cases, methods and rows."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from paperlm_kernels.bench import cold, ops, rows
from paperlm_kernels.bench.command import main
from paperlm_kernels.bench.operation import Task
from paperlm_kernels.bench.ops.kv_attention import declared as kv
from paperlm_kernels.bench.ops.kv_attention.methods import METHODS as KV_METHODS
from paperlm_kernels.bench.ops.kv_attention.methods import Inputs as KVInputs
from paperlm_kernels.bench.ops.rmsnorm_quantize import declared as norms
from paperlm_kernels.bench.ops.rmsnorm_quantize.methods import METHODS as NORM_METHODS
from paperlm_kernels.bench.ops.ternary_linear import OPERATION, declared, methods, swept
from paperlm_kernels.bench.peers import AbsentError
from paperlm_kernels.bench.report import NO_PART

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "case,right",
    [
        ("700m_qkv_m1", (3.29, 1.65, 0.41)), ("1.3b_down_m1", (5.20, 2.60, 0.65)),
        ("7b_gate_up_m1", (42.0, 21.0, 5.25)),
        ("700m_o_m16", (1.12, 0.57, 0.15)), ("7b_qkv_m16", (23.5, 11.8, 3.03)), ("3b_down_m16", (13.0, 6.49, 1.66)),
        ("3b_gate_up_m256", (35.8, 17.9, 17.9)), ("7b_down_m256", (29.2, 14.6, 14.6)),
        ("1.3b_gate_up_m4096", (232, 116, 116)), ("7b_gate_up_m4096", (935, 468, 468)),
    ],
)  # fmt: skip
def test_the_ceilings_are_those_worked_out_for_an_h200(case, right):
    for bits, microseconds in zip((16, 8, 2), right, strict=True):
        assert declared.CASES[case].floor(bits) == pytest.approx(microseconds, rel=0.005, abs=0.0051)


def test_a_cache_of_7b_takes_250_64_and_49_microseconds_at_batch_16_and_4096_positions():
    case = kv.CASES["7b_b16_c4096"]
    assert [round(case.floor(bits)) for bits in (16, 4, 3)] == [250, 64, 49]
    assert [kv.CASES["3b_b1_c2048"].token_bytes(bits) for bits in (16, 4, 3)] == [12800, 3328, 2560]


@pytest.mark.parametrize("case,right", [("700m_b158_m4096", 4.4), ("7b_b158_m4096", 11.7), ("7b_b158_m1", 0.0048)])
def test_the_floor_of_a_norm_with_a_quantizer_is_that_of_reading_once_and_writing_bytes(case, right):
    assert norms.CASES[case].floor() == pytest.approx(right, rel=0.01)
    one, more = (norms.CASES[name].bytes() for name in ("7b_b158_m4096", "7b_qkv_m4096"))
    assert more - one == 4096 * 4096 * 2 * 2, "a residual is read and its sum written"


@pytest.mark.parametrize("module,made", [(declared, methods.METHODS), (kv, KV_METHODS), (norms, NORM_METHODS)])
def test_every_method_and_case_that_is_declared_is_there(module, made):
    assert list(module.METHODS) == list(made)
    assert {name for names in module.GROUPS.values() for name in names} <= set(module.CASES)


def test_a_host_is_kept_awake_for_so_long_before_calls_are_timed():
    begin, ends = time.perf_counter(), []
    cold.stay_awake(lambda: ends.append(time.perf_counter()), CPU, 0.02)
    assert len(ends) > 3 and 0.02 <= time.perf_counter() - begin < 1.0
    assert ends == sorted(ends) and ends[-1] > begin + 0.01


def test_copies_are_together_larger_than_a_cache_and_a_cpu_has_two():
    card = torch.device("cuda")
    for size in (590_000, 22_500_000, 180_400_000):
        number = cold.copies_of(size, card)
        assert number * size >= cold.TOGETHER or number == cold.MOST_COPIES
    assert cold.copies_of(10**9, card) == 2 and cold.copies_of(1, CPU) == 2


def test_each_call_of_a_round_is_timed_and_the_mean_is_told():
    seen = []
    calls = [lambda i=i: seen.append(i) for i in range(3)]
    taken = cold.cold_times(calls, CPU, graph=False, repeats=10, warmup=2, seconds=10)
    assert len(taken) == 10 and all(0 < t < 1e5 for t in taken)
    assert seen == [0, 1, 2] * 13  # two to warm up, one to see how long it takes, ten that count


@pytest.mark.parametrize("operation", ["ternary_linear", "kv_attention", "rmsnorm_quantize"])
def test_the_listing_needs_no_card_and_says_why_a_peer_cannot_run(operation, capsys):
    assert main([operation, "--list"]) == 0
    listed = capsys.readouterr().out
    assert "[absent: needs a CUDA GPU]" in listed and "at least" in listed
    told = listed.split("methods:")[1].splitlines()
    assert all(any(line.startswith(f"  {name}  ") for line in told) for name in ops.operation(operation).methods)


def test_a_run_on_a_cpu_gives_times_and_our_products_are_within_a_rounding_of_float64(tmp_path):
    out = tmp_path / "rows.jsonl"
    given = ["--device", "cpu", "--repeats", "1", "--out", str(out)]
    chosen = ["--methods", "ours,ours_int4,ours_sparse,torch unpacked,gemlite", "--measure", "product,layer,error"]
    assert main(["ternary_linear", "--cases", "tiny_cpu_m1", *chosen, *given]) == 0
    found = rows.read(out)
    errors = {row["name"]: row["value"] for row in found if row["metric"] == "error"}
    assert set(errors) == {"ours", "ours_int4", "ours_sparse", "torch unpacked"}
    # bfloat16 rounds by at most 2^-9 of a value
    assert all(errors[name] < 2**-9 for name in ("ours", "ours_int4", "ours_sparse"))
    timed = [(row["name"], row["measure"], row["copies"]) for row in found if row["metric"] == "time"]
    assert ("ours", "product", 2) in timed and ("ours", "layer", 2) in timed
    assert {row["behaviour"] for row in found} == {1}
    assert [row["outcome"] for row in found if row["name"] == "gemlite"] == ["absent: needs a CUDA GPU"]


def test_a_part_that_a_method_does_not_have_leaves_a_row_that_says_so(monkeypatch):
    monkeypatch.setattr(methods.METHODS["ours"], "parts", ("layer",))
    given = Task("ternary_linear", "tiny_cpu_m1", "ours", ("product", "layer", "error"), repeats=1, device="cpu")
    found = list(OPERATION.run(given))
    assert [(row["metric"], row.get("measure"), row.get("outcome")) for row in found] == [
        ("outcome", "product", NO_PART), ("time", "layer", None), ("outcome", "error", NO_PART)
    ]  # fmt: skip


def test_a_peer_that_has_not_what_is_measured_says_so_before_it_tunes_itself():
    from paperlm_kernels.bench.ops.ternary_linear.task import rows_of

    given = Task("ternary_linear", "tiny_cpu_m1", "gemlite", ("product", "error"), device="cpu")
    (row,) = rows_of(ops.operation("ternary_linear"), given)  # gemlite is not installed: nothing of it was asked
    assert row["outcome"].startswith("absent: it quantizes its input itself")


def test_codes_for_quack_are_three_bits_of_magnitude_under_one_of_sign_even_columns_low():
    packed = methods.sign_magnitude(torch.tensor([[1, -1, 0, 1], [-1, 0, -1, -1]], dtype=torch.int8))
    assert packed.tolist() == [[0x91, 0x10], [0x09, 0x99]]


def test_a_run_of_the_cache_on_a_cpu_gives_its_bytes_and_errors(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    chosen = ["--measure", "decode,append,error", "--device", "cpu", "--repeats", "1", "--out", str(out)]
    assert main(["kv_attention", *chosen]) == 0
    found = {(row["name"], row["metric"], row.get("measure")): row["value"] for row in rows.read(out)}
    assert found["ours_4bit", "bytes_per_token", None] == 2 * 4 * (32 + 2)
    assert found["ours_3bit", "bytes_per_token", None] == 2 * 4 * (24 + 2)
    assert all(found[name, "error", None] < 2**-8 for name in ("ours_4bit", "ours_3bit", "ours_3bit_q4", "torch"))
    assert found["ours_4bit", "time", "append"] > 0
    lacking = [row["name"] for row in rows.read(out) if row.get("outcome") == NO_PART and row["measure"] == "append"]
    assert lacking == ["ours_3bit_q4", "torch"]
    assert re.search(r"^\| torch \| [^|]+ \| [^|]+ \| - \|", capsys.readouterr().out, re.MULTILINE)


def test_a_run_of_norms_on_a_cpu_gives_the_integers_of_float64_and_says_how_many_others_pytorch_gives(tmp_path):
    out = tmp_path / "rows.jsonl"
    chosen = ["--methods", "ours,torch,liger-kernel", "--measure", "quantize,error,determinism"]
    assert main(["rmsnorm_quantize", *chosen, "--device", "cpu", "--repeats", "1", "--out", str(out)]) == 0
    found = {(row["case"], row["name"], row["metric"]): row for row in rows.read(out)}
    for site in norms.SITES:
        case = f"tiny_cpu_{site}"
        assert found[case, "ours", "error"]["value"] < 1e-4, "float32 rounds a tie the other way now and then"
        # the norm's result, rounded to 8 bits, moves a code of 8 bits now and then, never most of them
        assert 0 < found[case, "torch", "error"]["value"] < 0.1
        assert found[case, "ours", "time"]["value"] > 0 and found[case, "ours", "determinism"]["value"] == 1
        assert found[case, "ours", "time"]["measure"] == "quantize"
        assert found[case, "liger-kernel", "outcome"]["outcome"] == "absent: needs a CUDA GPU"


def test_heads_that_are_filled_up_give_the_same_attention_and_others_need_none():
    inputs = KVInputs(kv.Case("", "", batch=2, context=16, heads=2, head_dim=100), CPU, seed=0)
    padded = KV_METHODS["torch padded"](inputs)
    y, exact = padded.call("decode")().double(), padded.truth()
    assert y.shape == exact.shape and (y - exact).norm() < 2**-8 * exact.norm()
    with pytest.raises(AbsentError, match="multiple of 8"):
        KV_METHODS["torch padded"](KVInputs(kv.CASES["tiny_cpu"], CPU, seed=0))


def test_the_tiles_that_are_tried_fit_a_program_and_leave_no_split_of_a_sum_without_a_step():
    sweep = pytest.importorskip("paperlm_kernels.bench.ops.ternary_linear.sweep", exc_type=ImportError)
    cases = sweep.cases_of([f"{size}_m{tokens}" for tokens in (16, 1, 4, 64, 256, 4096) for size in ("7b", "700m")])
    assert [case.name for case in cases[:2]] == ["7b_qkv_m16", "7b_o_m16"] and cases[-1].name == "700m_down_m4096"
    assert [case.tokens for case in sweep.cases_of(["3b_o_m5", "3b_o_m5"])] == [5]
    with pytest.raises(SystemExit, match="did you mean '7b_gate_up_m8'"):
        sweep.cases_of(["7b_gateup_m8"])
    for case in cases:
        tried, width = sweep.all_candidates(case, 132), -(-case.columns // 128) * 32
        assert len(tried) == len(set(tried)) > 10
        for tiles in tried:
            step = {sweep.FewTiles: "words", sweep.Tiles: "step", sweep.StreamTiles: "chunks"}[type(tiles)]
            step = getattr(tiles, step) * {"words": 4, "step": 1, "chunks": 32}[step]
            assert 1 <= tiles.splits <= -(-width // step)
            if not isinstance(tiles, sweep.FewTiles):
                # packed weights and four times as many activations, in each buffer; H200: 227 KiB
                assert tiles.stages * (tiles.rows * step + 4 * tiles.tokens * step) <= 227 * 1024
                assert tiles.tokens * tiles.rows // (32 * tiles.warps) <= 128


@pytest.mark.parametrize("tokens", [1, 16])
def test_the_tiles_that_hopper_takes_are_among_those_that_are_tried(tokens):
    sweep = pytest.importorskip("paperlm_kernels.bench.ops.ternary_linear.sweep", exc_type=ImportError)
    from paperlm_kernels.ternary_linear import hopper, launch

    for case in sweep.cases_of([f"{size}_m{tokens}" for size in ("7b", "3b", "700m")]):
        width = -(-case.columns // 128) * 32
        if tokens == 1:
            chosen = dataclasses.replace(launch.token_tiles_of(case.rows, width, 132), splits=1)
        else:
            chosen = hopper.stream_tiles_of(tokens, case.rows, width, 132)
        tried = {dataclasses.replace(tiles, splits=chosen.splits) for tiles in sweep.all_candidates(case, 132)}
        assert chosen in tried, case.name


class SlowPool:
    """A pool that is done with six jobs in time."""

    def __init__(self, *given):
        self.asked = []

    def submit(self, do, tiles, case):
        self.asked.append(case.name)
        future = Future()
        if len(self.asked) <= 6:
            future.set_result(None)
        return future

    def shutdown(self, **how):
        assert how == {"wait": True, "cancel_futures": True}


def test_tiles_are_compiled_for_each_case_in_turn_and_only_those_are_timed(monkeypatch, capsys, tmp_path):
    sweep = pytest.importorskip("paperlm_kernels.bench.ops.ternary_linear.sweep", exc_type=ImportError)
    pool, cases = SlowPool(), sweep.cases_of(["7b_o_m1", "1.3b_gate_up_m16"])
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", lambda *given: pool)
    ready = sweep.compile_all(cases, 132, 2, 0.1)
    first = pool.asked[:6]  # in turn, but what differs in the number of splits alone is compiled once
    assert first[:2] == ["7b_o_m1", "1.3b_gate_up_m16"] and {first.count(case.name) for case in cases} <= {2, 3, 4}
    assert len(ready) == 6 and f"6 of {len(pool.asked)} forms of tiles" in capsys.readouterr().out
    monkeypatch.setattr(sweep, "timed", lambda calls: float(len([call() for call in calls])))
    monkeypatch.setattr(sweep, "copies_of", lambda *given: 1)
    monkeypatch.setattr(sweep, "call_of", lambda inputs, tiles: lambda tiles=tiles: torch.zeros(1))
    monkeypatch.setattr(
        sweep,
        "Inputs",
        lambda case, *rest: SimpleNamespace(weight=torch.ones(1, 1), x=torch.ones(1, 1).bfloat16(), device=CPU),
    )
    out = tmp_path / "sweep.jsonl"
    for case in cases:
        rows = list(sweep.sweep(case, 132, 60.0, ready))
        with out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        assert [row["tiles"] for row in rows[:2]] == ["bf16", "chosen"]
        kinds = {"FewTiles": sweep.FewTiles, "Tiles": sweep.Tiles, "StreamTiles": sweep.StreamTiles}
        timed = {sweep.form_of(kinds[row["kind"]](**row["tiles"]), case) for row in rows[2:]}
        assert len(timed) == first.count(case.name) and timed <= ready and all(row["same"] for row in rows[2:])
    table = swept.table(swept.read(out))  # as they are
    assert "| 7b_o_m1 |" in table and "| 1.3b_gate_up_m16 |" in table and f"torch {torch.__version__}" in table


def test_a_summary_names_the_best_tiles_and_those_with_other_bits():
    sweep = pytest.importorskip("paperlm_kernels.bench.ops.ternary_linear.sweep", exc_type=ImportError)
    about = {"case": "7b_o_m16", "floor_us": 1.0}
    tiles = {"tokens": 16, "rows": 64, "step": 128, "warps": 4, "stages": 4, "splits": 1}
    found = [
        about | {"tiles": "bf16", "us": 8.0}, about | {"tiles": "chosen", "us": 4.0},
        about | {"tiles": tiles, "kind": "Tiles", "us": 2.0, "same": True},
        about | {"tiles": tiles | {"step": 64}, "kind": "Tiles", "us": 3.0, "same": False},
        about | {"tiles": tiles | {"step": 32}, "kind": "Tiles", "failed": "OutOfResources: shared memory"},
    ]  # fmt: skip
    line = sweep.summary(sweep.cases_of(["7b_o_m16"])[0], found)
    assert "chosen 4.00 (2.00x)" in line and "best of 2 (4.00x): 2.00 64x16 step 128 warps 4 stages 4 splits 1" in line
    assert "FAILED: 1, the last 64x16 step 32 warps 4 stages 4 splits 1: OutOfResources: shared memory" in line
    assert line.endswith("WRONG: ['64x16 step 64 warps 4 stages 4 splits 1']")


def _send_two_and_die(case, seconds, into):
    into.send({"tiles": "bf16", "us": 8.0})
    into.send({"tiles": "chosen", "us": seconds, "case": case.name})
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_rows_of_a_case_whose_process_dies_are_kept():
    sweep = pytest.importorskip("paperlm_kernels.bench.ops.ternary_linear.sweep", exc_type=ImportError)
    case = sweep.cases_of(["7b_o_m16"])[0]
    assert sweep.rows_apart(_send_two_and_die, case, 4.0) == [
        {"tiles": "bf16", "us": 8.0}, {"tiles": "chosen", "us": 4.0, "case": "7b_o_m16"}
    ]  # fmt: skip
    assert "before the chosen tiles were timed" in sweep.summary(case, [])


HEAD = "floor in 2 bits, what sets it, share of ours"
FLOOR = f"{declared.Case('', '', 1, 64, 32).floor(2):.3g}"


def product(case, method, value, device="NVIDIA H200", commit="a" * 40, **more):
    tokens, rows, columns = 1, 64, 32
    return {
        "op": "ternary_linear", "case": case, "method": method, "name": method, "metric": "time", "unit": "us",
        "value": value, "low": value, "high": value, "device": device, "order": "natural", "scale": "full",
        "versions": {"torch": "2"}, "date": "2026-01-01", "commit": commit, "measure": "product", "floor_us": 2.5,
        "shape": {"tokens": tokens, "rows": rows, "columns": columns},
    } | more  # fmt: skip


def test_products_are_one_table_a_card_with_the_ratio_to_cublas():
    rows = [product("a", "ours", 4.0), product("a", "torch", 10.0), product("b", "ours", 3.0, "other")]
    rows += [product("b", "torch", 30.0), product("b", "ours", 5.0)]
    first, second = OPERATION.tables(rows).split("**other**")
    lines = first.splitlines()
    assert lines[0] == "**NVIDIA H200**: microseconds of a product, torch 2, 2026-01-01, commit aaaaaaa."
    assert lines[2] == f"| case | tokens | matrix | {HEAD} | ours | torch | torch / ours |"
    assert lines[4:6] == [
        f"| a | 1 | 64 x 32 | {FLOOR}, bytes, 0% | 4 | 10 | 2.50 |",
        f"| b | 1 | 64 x 32 | {FLOOR}, bytes, 0% | 5 | 30 | 6.00 |",
    ]
    assert second.endswith(
        "| b | 1 | 64 x 32 | 3 |"
    )  # without a peer no ratio, of a card that no copy was timed on no floor


def test_what_limits_a_product_is_bytes_for_few_tokens_and_operations_for_many():
    """gate_up of 7B: 22016 x 4096 weights in 2 bits are 22.5 MB; 4,096 tokens multiply 739 billion times."""
    shape = {"rows": 22016, "columns": 4096}
    rows = [product("a", "ours", 11.0, shape={"tokens": 1} | shape)]
    rows.append(product("b", "ours", 600.0, shape={"tokens": 4096} | shape))
    few, many = OPERATION.tables(rows).splitlines()[4:6]
    moved = (22016 * 4096 / 4 + 4096 + 2 * 22016) / 4.3e6
    assert f"| {moved:.3g}, bytes, {moved / 11:.0%} | 11 |" in few
    took = 2 * 4096 * 22016 * 4096 / 1580e6
    assert f"| {took:.3g}, operations, {took / 600:.0%} | 600 |" in many


def test_below_times_of_attention_stands_what_reading_the_cache_alone_would_take():
    kind = ops.operation("kv_attention")
    row = product("7b_b1_c4096", "ours_4bit", 12.0, op="kv_attention", measure="decode", floor_us=4.0, over_floor=3.0)
    other = product("7b_b1_c4096", "ours_4bit", 3.0, op="kv_attention", measure="append")
    said = kind.tables([row, other]).splitlines()[-1]
    assert said.endswith("share of decoding that is: ours_4bit 4 us, 33%.")
    assert "cache alone" not in kind.tables([other])


def test_a_table_of_rows_of_several_commits_says_of_which_each_is():
    changed = "b" * 40 + "+changes"
    rows = [product("a", "ours", 4.0), product("b", "ours", 4.0, commit=changed), product("b", "torch", 2.0)]
    table = OPERATION.tables(rows)
    assert table.splitlines()[4].endswith("| aaaaaaa |") and table.splitlines()[5].endswith(
        "| 0.50 | bbbbbbb+changes aaaaaaa |"
    )


def test_what_is_no_product_and_what_was_not_measured_stand_below():
    rows = [product("a", "ours", 4.0), product("a", "ours", 9.0, measure="layer")]
    rows.append(product("a", "bitblas", 0, metric="outcome", outcome="absent: it is not installed", measure=""))
    table = OPERATION.tables(rows)
    assert f"| a | 1 | 64 x 32 | {FLOOR}, bytes, 0% | 4 |" in table and f"| {FLOOR}, bytes, 0% | 9 |" in table
    assert table.index("microseconds of a product") < table.index("microseconds of a layer") < table.index("bitblas")
    assert "a: Not measured on NVIDIA H200: bitblas (absent: it is not installed)." in table
    assert OPERATION.tables(rows[2:]) == "a: Not measured on NVIDIA H200: bitblas (absent: it is not installed)."


@pytest.mark.parametrize(
    "card,right", [("NVIDIA H200", 1.0), ("NVIDIA H100 80GB HBM3", 130.0 / 180.7), ("a CPU", None)]
)
def test_floors_are_of_the_card_that_ran_and_there_is_none_of_a_card_whose_copy_was_not_timed(card, right):
    from paperlm_kernels.bench.cards import bandwidth_of

    found = bandwidth_of(card, 4.3e12)
    assert found is None if right is None else found == pytest.approx(4.3e12 * right, rel=1e-3)
    case = declared.CASES["7b_down_m1"]
    if right:
        assert case.floor(2, found) == pytest.approx(case.floor(2) / right, rel=1e-3)
