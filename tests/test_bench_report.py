"""Which rows of a benchmark stand in a table together, and what its caption says of them."""

from __future__ import annotations

import pytest
from paperlm_kernels.bench import ops, report
from paperlm_kernels.bench.command import shown
from paperlm_kernels.bench.ops.cross_entropy import chart

NEW = {"date": "2026-02-02", "commit": "b" * 40, "versions": {"torch": "2.13", "triton": "4"}}


def row(name: str, value: float | None = None, measure: str = "", metric: str = "time", **extra: object) -> dict:
    return {
        "op": "neuzip", "case": "w2e24", "method": name, "name": name, "metric": metric, "unit": "us", "value": value,
        "low": value, "high": value, "n": 5, "device": "Card", "order": "natural", "scale": "full", "seed": 0,
        "source": "synthetic", "shape": {"weights": 8}, "versions": {"torch": "2.8", "triton": "3"},
        "date": "2026-01-01", "commit": "a" * 40,
        **({"measure": measure} if measure else {}), **extra,
    }  # fmt: skip


def lost(name: str, reason: str, measure: str = "", **extra: object) -> dict:
    return row(name, None, measure, "outcome", outcome=reason, **extra)


def cells_of(*rows: dict) -> list[tuple[str, str]]:
    (methods,) = report.latest(rows).values()
    (cells,) = methods.values()
    return list(cells)


NUMBERS = [row("ours", 10.0, "decode"), row("ours", 20.0, "encode"), row("ours", 10.7, metric="bits")]


@pytest.mark.parametrize("other", [NEW, {"date": "2026-02-02"}, {"commit": None}], ids=["both", "date", "commit"])
def test_an_outcome_of_another_run_replaces_the_numbers_of_its_part_or_of_the_whole_method(other):
    assert cells_of(*NUMBERS, lost("ours", "failed: wrong", **other)) == [("outcome", "")]
    left = cells_of(*NUMBERS, lost("ours", "out of memory", "encode", **other))
    assert left == [("time", "decode"), ("bits", ""), ("outcome", "encode")]
    others = report.latest([*NUMBERS, row("copy", 1.0, "decode"), lost("ours", "failed: wrong", **other)])
    assert [list(methods["copy"]) for methods in others.values()] == [[("time", "decode")]]


def test_a_method_that_another_run_did_not_have_keeps_its_numbers_and_is_not_said_to_be_missing():
    whole, half = lost("ours", "absent: not installed", **NEW), lost("ours", "absent: no card", "decode", **NEW)
    assert cells_of(*NUMBERS, whole, half) == [("time", "decode"), ("time", "encode"), ("bits", "")]
    assert cells_of(*NUMBERS[1:], half)[-1] == ("outcome", "decode")


def test_an_outcome_and_numbers_of_one_run_stay_together_and_a_later_number_replaces_an_outcome():
    memory = row("ours", 100.0, "decode", "peak_memory")
    assert cells_of(memory, lost("ours", "out of memory", "decode")) == [
        ("peak_memory", "decode"), ("outcome", "decode")
    ]  # fmt: skip
    assert cells_of(*NUMBERS, lost("ours", "failed: at the end"))[-1] == ("outcome", "")
    assert cells_of(lost("ours", "failed: wrong"), row("ours", 1.0, "decode", **NEW)) == [("time", "decode")]
    # of the run that failed some numbers are left, of the one before none
    half = [row("ours", 11.0, "decode", **NEW), lost("ours", "failed: wrong", **NEW)]
    assert cells_of(*NUMBERS, *half) == [("time", "decode"), ("outcome", "")]


@pytest.mark.parametrize(
    "other,says",
    [
        ({"seed": 7}, "Card, seed 7, torch"), ({"source": "a.safetensors"}, "Card, data a.safetensors, torch"),
        ({"shape": {"weights": 9}}, "weights 9, Card, torch"),
    ],
)  # fmt: skip
def test_rows_of_other_data_stand_in_a_table_of_their_own_whose_caption_says_which(other, says):
    first, second = report.tables([row("ours", 10.0, "decode"), row("copy", 1.0, "decode", **other)]).split("\n\n**")
    assert first.startswith("**w2e24**: weights 8, Card, torch 2.8") and "| ours | 10 |" in first
    assert says in second and "| copy | 1 |" in second and "ours" not in second


@pytest.mark.parametrize("op", ["neuzip", "ternary_linear"])
@pytest.mark.parametrize("other", [{"seed": 7}, {"source": "a.safetensors"}])
def test_no_table_of_several_cases_mixes_data(op, other):
    kind = {"metric": "bits"} if op == "neuzip" else {"measure": "product"}
    shape = {"tokens": 1, "rows": 64, "columns": 32}
    rows = [
        row("ours", value, op=op, case=case, shape=shape, **kind, **which)
        for value, (case, which) in enumerate([("a", {}), ("b", {}), ("a", other), ("b", other)], 1)
    ]
    first, second = (line for line in shown(rows).splitlines() if line.startswith("**"))
    assert "seed" not in first and "data" not in first and ("seed 7" in second or "data a.safetensors" in second)


def test_a_caption_has_every_version_of_its_rows_and_a_method_every_version_that_gave_one():
    rows = [row("zipnn", 10.0, "decode", method="zipnn 0.1"), row("zipnn", 9.0, "encode", method="zipnn 0.5", **NEW)]
    table = report.tables(rows)
    assert "torch 2.8 and 2.13, triton 3 and 4, 2026-01-01 and 2026-02-02" in table
    assert "| zipnn 0.1 and zipnn 0.5 | 10 | 9 |" in table
    assert "commit aaaaaaa and" not in report.tables([rows[0], {**rows[1], "commit": None}])
    changed = report.tables([rows[0], {**rows[1], "commit": "b" * 40 + "+changes"}])
    assert "commit aaaaaaa and bbbbbbb+changes" in changed and "| aaaaaaa and bbbbbbb+changes |" in changed


def test_bits_of_two_versions_of_a_peer_are_two_lines():
    rows = [
        row("zipnn", 10.0, metric="bits", method="zipnn 0.1"),
        row("zipnn", 12.0, metric="bits", case="student_t", method="zipnn 0.5"),
    ]
    table = ops.operation("neuzip").tables(rows).splitlines()
    assert table[-2:] == ["| zipnn 0.1 | 10 |  |", "| zipnn 0.5 |  | 12 |"]


def test_products_of_two_versions_of_a_peer_are_two_columns_and_need_no_commit():
    shape = {"shape": {"tokens": 1, "rows": 64, "columns": 32}, "op": "ternary_linear"}
    rows = [
        row("gemlite", 4.0, "product", method="gemlite 1", case="a", **shape),
        row("gemlite", 5.0, "product", method="gemlite 2", case="b", **shape, **NEW | {"commit": None}),
    ]
    table = ops.operation("ternary_linear").tables(rows).splitlines()
    assert table[2].endswith("| gemlite 1 | gemlite 2 | commit |")
    assert table[-2:] == ["| a | 1 | 64 x 32 | 4 |  | aaaaaaa |", "| b | 1 | 64 x 32 |  | 5 |  |"]


def entropy_row(value: float, **extra: object) -> dict:
    shape = {"tokens": 8, "counting": 1.0, "vocab": 16, "width": 4, "softcap": None, "dtype": "bfloat16"}
    return row("eager", value, op="cross_entropy", case="toy", lower_bound_mib=1.0, **{"shape": shape, **extra})


def test_shares_of_tiles_are_of_one_device_and_scale():
    rows = [
        entropy_row(share, metric="alive_share", tiles=tiles, **other)
        for share, other in ((0.1, {}), (0.2, {"scale": "small"}), (0.3, {"device": "Other"}))
        for tiles in ("128x128", "128x128 sorted")
    ]
    table = ops.operation("cross_entropy").tables(rows).splitlines()
    assert table[-3:] == [
        "| toy, Card | natural | 10.0% | 10.0% |", "| toy (small), Card | natural | 20.0% | 20.0% |",
        "| toy, Other | natural | 30.0% | 30.0% |",
    ]  # fmt: skip


def test_a_chart_tells_devices_and_seeds_of_a_case_apart():
    rows = [entropy_row(1.0, measure="both"), entropy_row(2.0, measure="both", seed=3)]
    assert [point["case"] for point in chart.points(rows)] == ["toy", "toy, seed 3"]
    rows = [entropy_row(1.0, measure="both"), entropy_row(2.0, measure="both", device="Other")]
    assert [point["case"] for point in chart.points(rows)] == ["toy, Card", "toy, Other"]
