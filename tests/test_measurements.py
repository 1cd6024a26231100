"""What a table makes of measurement rows: of which card, run, seed and behaviour they are, and whether kernels ran."""

from __future__ import annotations

import json

import pytest
from support_cce import Bench, verdicts
from test_neuzip_throughput import ON_A_CARD, TABLE, written

from paperlm.figures.base import write_figure
from paperlm.plan.project import Project
from paperlm.tables.build import table_contents
from paperlm.tables.verdicts import claim_rows

BASELINE = ("5) Baseline", "Loss+Gradient Time (ms)")
FAILED = "failed: its loss is wrong"


# -- whether kernels ran ----


@pytest.fixture
def on_a_cpu(paper, tmp_path):
    """Contents of Table 1 at tiny, measured as printed; ours by the reference."""

    def contents(settings: dict):
        bench = Bench(paper, "tiny_cpu", "cpu (a processor, 1 thread)")
        for row in Bench(paper).printed(Project({"scale": "gpu"}), "cce_table1").rows:
            own = {"settings": settings} if row["name"].startswith("ours") else {}
            bench.add(row["name"], row["metric"], row["value"], measure=row["measure"], **own)
        bench.add("ours", "error", 1e-6, measure="dE").add("eager", "error", 1e-5, measure="dE")
        return table_contents(Project({"scale": "tiny"}), "cce_table1", bench.write(tmp_path))

    return contents


def test_memory_of_the_reference_judges_no_claim_about_our_kernels(on_a_cpu):
    project, contents = Project({"scale": "tiny"}), on_a_cpu({"memory": "lean", "backend": "reference"})
    rows = {row["claim"]: row for row in claim_rows(project, "cce_table1", contents) if not row["part"]}
    of_ours = ("CCE-T1-1", "CCE-T1-1b", "CCE-T1-2", "CCE-T1-2b", "CCE-T1-3", "CCE-T1-10b", "CCE-T1-12")
    assert {rows[claim]["verdict"] for claim in of_ours} == {"not tested"}
    assert rows["CCE-T1-1b"]["reason"] == "PyTorch reference, not the kernels: 1) CCE (Ours), 1b) Our default"
    assert rows["CCE-T1-8"]["verdict"] == "holds", "about the baseline and the bound alone"
    kernels = verdicts(project, "cce_table1", on_a_cpu({"memory": "lean"}))
    assert {kernels[claim] for claim in of_ours} <= {"holds", "fails"}, "the control: the same numbers of kernels"


def test_every_cell_of_a_method_that_ran_as_the_reference_says_so(on_a_cpu):
    cells = on_a_cpu({"backend": "reference"}).cells
    said = {
        key
        for key, cell in cells.items()
        if cell.regenerated and "PyTorch reference, not the kernels" in cell.labels.split("; ")
    }
    assert ("8) CCE-Kahan", "Loss+Gradient Memory (MB)") in said and ("1b) Our default", "dE Error") in said
    assert not said & {BASELINE, ("5) Baseline", "dE Error"), ("Lower bound", "Loss+Gradient Memory (MB)")}


# -- a newer failure ----


def test_a_failure_of_a_later_run_takes_the_place_of_the_number_before_it(project, paper, tmp_path):
    bench = Bench(paper).add("eager", "time", 67.0, measure="both").add("eager", "time", 9.0, measure="loss")
    bench.add("eager", "outcome", None, outcome=FAILED, date="2026-01-02")
    bench.add("chunked", "time", 50.0, measure="both").add("chunked", "time", 5.0, measure="loss")
    bench.add("chunked", "outcome", None, outcome="out of memory", measure="both", commit="1")
    cells = table_contents(project, "cce_table1", bench.write(tmp_path)).cells
    assert (cells[BASELINE].regenerated, cells[BASELINE].reason) == ("not run", FAILED)
    assert cells["5) Baseline", "Loss Time (ms)"].regenerated == "not run"
    assert cells["3) Torch Tune (8 chunks)", "Loss+Gradient Time (ms)"].regenerated == "out of memory"
    assert cells["3) Torch Tune (8 chunks)", "Loss Time (ms)"].regenerated == "5.00", "another part did not fail"


@pytest.mark.parametrize(
    "outcome",
    [
        {"outcome": FAILED},
        {"outcome": FAILED, "date": "2025-12-31"},
        {"outcome": "absent: not installed", "date": "2026-01-02"},
    ],
)
def test_a_failure_of_the_same_run_or_an_older_one_and_an_absent_method_leave_the_number(
    project, paper, tmp_path, outcome
):
    bench = Bench(paper).add("eager", "time", 67.0, measure="both").add("eager", "outcome", None, **outcome)
    assert table_contents(project, "cce_table1", bench.write(tmp_path)).cells[BASELINE].regenerated == "67.0"


def test_a_number_that_was_measured_after_a_failure_counts_wherever_it_stands(project, paper, tmp_path):
    bench = Bench(paper).add("eager", "time", 67.0, measure="both", date="2026-01-03")
    bench.add("eager", "outcome", None, outcome=FAILED, date="2026-01-02").add("eager", "time", 1.0, measure="both")
    assert table_contents(project, "cce_table1", bench.write(tmp_path)).cells[BASELINE].regenerated == "67.0"


# -- several seeds ----


def test_a_cell_of_several_seeds_names_the_circumstances_of_all_of_them(project, paper, tmp_path):
    bench = Bench(paper).add("eager", "time", 60.0, measure="both", commit="a" * 40)
    other = {"date": "2030-01-01", "commit": "b" * 40 + "+changes", "versions": {"torch": "9.9", "triton": "3.6.0"}}
    bench.add("eager", "time", 70.0, measure="both", seed=1, **other)
    label = table_contents(project, "cce_table1", bench.write(tmp_path)).cells[BASELINE].labels
    assert label == (
        "NVIDIA H200, torch 2.11.0 and 9.9, triton 3.6.0, 2026-01-01 and 2030-01-01, synthetic data, "
        "N=8192, V=256000, D=2304, commit aaaaaaa and bbbbbbb+changes"
    )


def test_claims_are_judged_on_seeds_by_their_own_numbers(project, paper, tmp_path):
    """Two measurements of different seeds have none in common."""
    bench = Bench(paper).add("ours_published_scheme", "time", 30.0, measure="loss", seed=0)
    bench.add("torch.compile", "time", 48.0, measure="loss", seed=1)
    contents = table_contents(project, "cce_table1", bench.write(tmp_path))
    assert contents.samples["4) torch.compile", "Loss Time (ms)"].seeds == (1,)
    row = next(r for r in claim_rows(project, "cce_table1", contents) if r["claim"] == "CCE-T1-5")
    assert (row["verdict"], row["true_in_seeds"]) == ("holds", "")
    assert contents.samples["Lower bound", "Loss Memory (MB)"].seeds == (0,), "which is computed"


# -- another card ----


def test_what_another_card_alone_has_measured_is_not_called_unmeasured(project, paper, tmp_path):
    bench = Bench(paper).add("ours", "time", 20.0, measure="both").add("ours", "time", 20.0, measure="loss")
    bench.add("eager", "time", 208.0, measure="both", device="NVIDIA A100")
    cells = table_contents(project, "cce_table1", bench.write(tmp_path)).cells
    cell = cells[BASELINE]
    assert (cell.regenerated, cell.verdict) == ("not run", "not run")
    assert cell.reason == "measured on NVIDIA A100 only; this table is of NVIDIA H200"
    assert cells["5) Baseline", "Loss Time (ms)"].reason.startswith("no measurement row; needs a GPU")


# -- earlier rules ----


def test_rows_of_a_behaviour_that_is_not_todays_are_of_earlier_rules(tmp_path):
    from paperlm_kernels.behaviour import NEUZIP
    from paperlm_kernels.bench.rows import append

    (path,) = written(tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    old, row = "figure4_00", "NeuZip, lossless"
    append(path, [
        line | {"behaviour": NEUZIP["codec"] - (line["case"] == old and line["name"] == "ours")} for line in lines
    ])  # fmt: skip
    contents = table_contents(ON_A_CARD, TABLE, [path])
    label = f"earlier rules: neuzip {NEUZIP['codec'] - 1} -> {NEUZIP['codec']}"
    drifted = {key for key, cell in contents.cells.items() if label in cell.labels.split("; ")}
    assert (
        drifted
        == contents.drifted_cells
        == {(f"100 kB: {row}", f"{c} (GiB/s)") for c in ("Compression", "Decompression")}
    )
    write_figure(ON_A_CARD, "neuzip_figure4", [path], tmp_path / "neuzip_figure4.svg")
    assert f"100 kB: {row}: {label}" in (tmp_path / "neuzip_figure4.notes.txt").read_text().splitlines()
