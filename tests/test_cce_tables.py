"""Cut Cross-Entropy's tables of measurements: verdicts from handmade rows, and the benchmark that makes real ones."""

from __future__ import annotations

import csv
import re

import pytest
from support_cce import Bench, verdicts
from support_tables import edited

from paperlm.cost.loss import gradient_bytes
from paperlm.errors import RecordError, SpecError
from paperlm.plan.project import ROOT, Project
from paperlm.plan.workflow import Workflow
from paperlm.tables.build import table_contents, write_table
from paperlm.tables.contents import Contents
from paperlm.tables.verdicts import Reading, claim_rows, holds_in_print


@pytest.fixture
def as_printed(project, paper, tmp_path) -> Contents:
    """Table 1 of the ICLR edition, measured here to the printed digit (row 8 is measured as `ours`)."""
    return table_contents(project, "cce_table1", Bench(paper).printed(project, "cce_table1").write(tmp_path))


def test_memory_of_the_declared_rows_is_compared_by_value_and_the_rest_is_environment_bound(as_printed):
    seen = {}
    for (row, column), cell in as_printed.cells.items():
        if cell.published:
            seen.setdefault(("Memory" in column, cell.verdict), set()).add(row)
    assert seen[True, "match"] == {
        "Lower bound", "1) CCE (Ours)", "6) CCE (No Vocab Sorting)", "7) CCE (No Grad. Filter)",
    }  # fmt: skip
    assert {row for row in seen[True, "environment-bound"] if row[0] in "345"} == {
        "3) Torch Tune (8 chunks)", "4) torch.compile", "5) Baseline",
    }  # fmt: skip
    assert {verdict for memory, verdict in seen if not memory} == {"environment-bound"}
    slip = as_printed.cells["Lower bound", "Loss Memory (MB)"]
    assert slip.verdict == "misprint" and "units of kB" in slip.reason


@pytest.mark.parametrize(
    ("value", "verdict"), [(1164.4, "match"), (1175.0, "within 1 %"), (1152.5, "within 1 %"), (1200.0, "differs")]
)
def test_memory_within_one_percent_of_the_print_is_told_from_a_match_and_from_a_difference(
    project, paper, tmp_path, value, verdict
):
    rows = Bench(paper).add("ours_published_scheme", "peak_memory", value, measure="both").write(tmp_path)
    cell = table_contents(project, "cce_table1", rows).cells["1) CCE (Ours)", "Loss+Gradient Memory (MB)"]
    assert cell.verdict == verdict and cell.labels.startswith("NVIDIA H200, torch 2.11.0, triton 3.6.0, 2026-01-01")
    assert cell.labels.endswith("commit 0")


def test_the_lower_bound_is_computed_without_a_measurement(project):
    cells = table_contents(project, "cce_table1", []).cells
    bound = cells["Lower bound", "Loss+Gradient Memory (MB)"]
    assert (bound.regenerated, bound.verdict) == ("1161", "match")
    assert gradient_bytes(8192, 256_000, 2304) == (8192 + 256_000) * 2304 * 2
    assert cells["1) CCE (Ours)", "Loss Time (ms)"].verdict == "not run"
    models = table_contents(project, "cce_tableA2", []).cells
    column = "Gradient Memory (MB)"
    bounds = [d.regenerated for (row, c), d in models.items() if row.endswith(": Lower bound") and c == column]
    assert bounds == ["1806", "2322", "1066", "1360", "236", "1096"]


def test_the_printed_numbers_decide_the_claims_as_the_paper_does(project, as_printed):
    """But for those about rows that the paper does not print, and for sorting, whose condition is not measured. What
    the print says of rows 8 to 10 against row 1 is said here of rows that differ in one thing alone."""
    found = verdicts(project, "cce_table1", as_printed)
    _, table = project.table("cce_table1")
    decided = {c.id: found[c.id] for c in table.claims if c.published and c.given is None}
    elsewhere = {c.id for c in table.claims if c.expression_in_print}
    assert elsewhere == {"CCE-T1-10", "CCE-T1-11"} and decided.pop("CCE-T1-10") == "not tested"
    assert set(decided.values()) == {"holds"} and len(decided) == 10
    assert found["CCE-T1-4b"] == found["CCE-T1-13"] == found["CCE-T1-7"] == "not tested"


def test_slow_kernels_make_the_claims_fail(project, paper, tmp_path):
    """The control: CCE as slow as the baseline, in the baseline's memory."""
    bench = Bench(paper).printed(project, "cce_table1")
    for row in bench.rows:
        if row["name"] == "ours_published_scheme":
            like = next(r for r in bench.rows if (r["name"], r["metric"], r["measure"]) == (
                "eager", row["metric"], row["measure"]))  # fmt: skip
            row.update({key: like[key] for key in ("value", "low", "high")})
    contents = table_contents(project, "cce_table1", bench.write(tmp_path))
    found = verdicts(project, "cce_table1", contents)
    for claim in ("CCE-T1-1", "CCE-T1-2", "CCE-T1-3", "CCE-T1-4", "CCE-T1-5", "CCE-T1-6b", "CCE-T1-12"):
        assert found[claim] == "fails", claim
    assert contents.cells["1) CCE (Ours)", "Loss+Gradient Memory (MB)"].verdict == "differs"


def test_a_difference_of_times_within_the_spread_of_the_repetitions_is_undecided(project, paper, tmp_path):
    bench = Bench(paper)
    for name, value in (("ours_published_scheme", 100.0), ("torch.compile", 100.3)):
        bench.add(name, "time", value, measure="loss")
    contents = table_contents(project, "cce_table1", bench.write(tmp_path))
    assert verdicts(project, "cce_table1", contents)["CCE-T1-5"] == "undecided"


@pytest.mark.parametrize(("alive", "verdict"), [(0.25, "holds"), (0.5, "not tested"), (None, "not tested")])
def test_a_claim_about_the_filter_is_tested_only_on_data_whose_alive_share_was_measured_and_is_low(
    project, paper, tmp_path, alive, verdict
):
    bench = Bench(paper).add("ours", "time", 20.0, measure="both").add("torch.compile", "time", 48.0, measure="both")
    if alive is not None:
        bench.add("lower_bound", "alive_share", alive, tiles="128x128")
    contents = table_contents(project, "cce_table1", bench.write(tmp_path))
    row = next(r for r in claim_rows(project, "cce_table1", contents) if r["claim"] == "CCE-T1-15")
    assert row["verdict"] == verdict
    if alive == 0.5:
        assert "more than 26 %" in row["reason"]
    if alive is None:
        assert "not run: T1[Lower bound, Alive Tiles]" in row["reason"]


def test_sorting_is_judged_only_where_it_leaves_fewer_tiles_alive(project, paper, tmp_path):
    def judged(natural: float, ordered: float) -> str:
        bench = Bench(paper).add("ours_lean", "time", 115.0, measure="gradient")
        bench.add("ours_published_scheme", "time", 100.0, measure="gradient")
        bench.add("lower_bound", "alive_share", natural, tiles="128x128")
        bench.add("lower_bound", "alive_share", ordered, tiles="128x128 sorted")
        contents = table_contents(project, "cce_table1", bench.write(tmp_path))
        return verdicts(project, "cce_table1", contents)["CCE-T1-7"]

    assert judged(0.26, 0.20) == "holds" and judged(0.26, 0.25) == "not tested"


def test_the_newest_row_counts_other_cards_permuted_ids_and_small_sizes_do_not(project, paper, tmp_path):
    bench = Bench(paper).add("eager", "time", 70.0, measure="both").add("eager", "time", 67.0, measure="both")
    bench.add("eager", "time", 1.0, measure="both", device="NVIDIA H100 80GB HBM3")
    bench.add("eager", "time", 2.0, measure="both", order="permuted")
    bench.add("eager", "time", 3.0, measure="both", scale="small")
    bench.add("eager", "time", 4.0, measure="both_cold")
    cell = table_contents(project, "cce_table1", bench.write(tmp_path)).cells["5) Baseline", "Loss+Gradient Time (ms)"]
    assert (cell.regenerated, cell.spread, cell.seeds) == ("67.0", "66.33 to 67.67", 1)


def test_another_card_is_used_where_there_is_no_other(project, paper, tmp_path):
    rows = Bench(paper, device="NVIDIA A100").add("eager", "time", 208.0, measure="both").write(tmp_path)
    cell = table_contents(project, "cce_table1", rows).cells["5) Baseline", "Loss+Gradient Time (ms)"]
    assert cell.regenerated == "208" and cell.labels.startswith("NVIDIA A100")


def test_several_seeds_of_the_data_are_averaged_and_claims_need_all_of_them(project, paper, tmp_path):
    bench = Bench(paper)
    for seed, time in enumerate((30.0, 60.0)):
        bench.add("ours_published_scheme", "time", time, measure="loss", seed=seed)
        bench.add("torch.compile", "time", 48.0, measure="loss", seed=seed)
    contents = table_contents(project, "cce_table1", bench.write(tmp_path))
    cell = contents.cells["1) CCE (Ours)", "Loss Time (ms)"]
    assert (cell.regenerated, cell.seeds, cell.spread) == ("45.0", 2, "21.2")
    row = next(r for r in claim_rows(project, "cce_table1", contents) if r["claim"] == "CCE-T1-5")
    assert (row["verdict"], row["true_in_seeds"]) == ("undecided", "1 of 2")


def test_why_a_method_has_no_number_is_printed(project, paper, tmp_path):
    bench = Bench(paper).add("liger-kernel", "outcome", None, outcome="absent: liger-kernel is not installed")
    bench.add("eager", "outcome", None, outcome="both: out of memory")
    bench.add("chunked", "time", 50.0, measure="both")
    cells = table_contents(project, "cce_table1", bench.write(tmp_path)).cells
    liger = cells["2) Liger Kernels", "Loss Memory (MB)"]
    assert (liger.regenerated, liger.reason) == ("not run", "absent: liger-kernel is not installed")
    memory = cells["5) Baseline", "Loss+Gradient Memory (MB)"]
    assert (memory.regenerated, memory.verdict) == ("out of memory", "differs")
    assert cells["3) Torch Tune (8 chunks)", "Loss Time (ms)"].regenerated == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["shape"].update(vocab=32000), r"case gemma2_2b: measured as .*32000.*measure it again"),
        (lambda r: r.update(unit="s"), "time in s, not in ms"),
        (lambda r: r.pop("seed"), r"rows\.jsonl:1: the row has no seed"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_by_name(project, paper, tmp_path, change, message):
    bench = Bench(paper).add("eager", "time", 1.0, measure="both")
    change(bench.rows[0])
    with pytest.raises(RecordError, match=message):
        table_contents(project, "cce_table1", bench.write(tmp_path))


def test_a_truncated_file_of_rows_is_named_with_its_line(project, paper, tmp_path):
    (path,) = Bench(paper).add("eager", "time", 1.0, measure="both").write(tmp_path)
    path.write_text(path.read_text() + '{"op": "cross')
    with pytest.raises(RecordError, match=r"rows\.jsonl:2: not a row of JSON"):
        table_contents(project, "cce_table1", [path])


def test_on_a_cpu_the_small_case_is_shown_with_its_shape_and_compared_with_nothing(paper, tmp_path):
    project = Project({"scale": "tiny"})
    bench = Bench(paper, "tiny_cpu", "cpu (a processor, 1 thread)").add("eager", "time", 9.0, measure="both")
    bench.add("ours", "time", 12.0, measure="both")
    contents = table_contents(project, "cce_table1", bench.write(tmp_path))
    cell = contents.cells["5) Baseline", "Loss+Gradient Time (ms)"]
    assert cell.verdict == "not comparable at this scale" and cell.labels.endswith("N=1024, V=32768, D=128, commit 0")
    assert contents.cells["1b) Our default", "Loss+Gradient Time (ms)"].regenerated == "12.0"
    assert set(verdicts(project, "cce_table1", contents).values()) == {"not tested"}
    further = table_contents(project, "cce_tableA2", bench.write(tmp_path)).cells
    assert {d.regenerated for (row, _), d in further.items() if "Lower bound" not in row} == {"not run", ""}


def test_on_a_cpu_claims_on_memory_alone_are_judged_and_those_that_read_a_time_are_not(project, paper, tmp_path):
    bench = Bench(paper, "tiny_cpu", "cpu (a processor, 1 thread)")
    for row in Bench(paper).printed(project, "cce_table1").rows:
        bench.add(row["name"], row["metric"], row["value"], measure=row["measure"])
    contents = table_contents(Project({"scale": "tiny"}), "cce_table1", bench.write(tmp_path))
    found = verdicts(Project({"scale": "tiny"}), "cce_table1", contents)
    judged = {claim for claim, verdict in found.items() if verdict != "not tested"}
    claims = {c.id: c.expression for c in paper.tables["cce_table1"].claims}
    assert judged and not [c for c in judged if "Time" in claims[c]]
    assert all("Memory" in claims[c] for c in judged) and {found[c] for c in judged} <= {"holds", "fails"}


@pytest.mark.parametrize(
    ("table", "case", "row", "proxy"),
    [
        ("cce_table1", "tiny_cpu", "5) Baseline", "on a CPU, 1024 tokens, 32768 ids, width 128"),
        ("cce_tableA1", "tiny_cpu_invalids", "5) Baseline", "on a CPU, 1024 tokens, 32768 ids, width 128"),
        ("cce_tableA2", "gemma2_27b_cpu", "Gemma 2 (27B): Baseline", "on a CPU, 1024 tokens, 32000 ids, width 144"),
    ],
)
def test_every_measured_table_has_a_cpu_size_that_its_rows_name_as_a_proxy(paper, tmp_path, table, case, row, proxy):
    bench = Bench(paper, case, "cpu (a processor, 1 thread)").add("eager", "time", 12.0, measure="both")
    out = tmp_path / f"{table}.csv"
    write_table(Project({"scale": "tiny"}), table, bench.write(tmp_path), out, html=tmp_path)
    lines = {line[1]: line for line in csv.reader(out.read_text().splitlines())}
    assert lines[row][0] == f"tiny: {proxy}" and "12.0" in lines[row]
    assert proxy in (tmp_path / f"{table}.html").read_text()
    name = next(label for label in lines if "Liger" in label)
    assert lines[name][0] == "tiny" and "not run" in lines[name]


# -- Table A1 and A2 ----


def test_the_gain_from_leaving_out_ignored_tokens_is_judged_against_all_tokens(project, paper, tmp_path):
    claims = [c for c in paper.tables["cce_tableA1"].claims if c.id in ("CCE-TA1-1", "CCE-TA1-1b")]
    methods = ["ours_published_scheme", "ours", "chunked", "torch.compile", "eager"]

    def judged(gain: float) -> list[str]:
        every, counting = Bench(paper), Bench(paper, "gemma2_2b_invalids")
        for name in methods:
            every.add(name, "time", 100.0, measure="both")
            counting.add(name, "time", 100.0 / gain, measure="both")
        files = every.write(tmp_path / "all") + counting.write(tmp_path / "counting")
        found = verdicts(project, "cce_tableA1", table_contents(project, "cce_tableA1", files))
        return [found[c.id] for c in claims]

    assert judged(208 / 75) == ["holds", "holds"]
    assert judged(1.5) == ["fails", "fails"]
    assert judged(4.0) == ["holds", "fails"]


def test_what_was_not_found_of_tables_a1_and_a2_stays_empty_and_says_so(project, paper, tmp_path):
    a1 = table_contents(project, "cce_tableA1", []).cells
    assert {k: d.published for k, d in a1.items() if d.published} == {
        ("1) CCE (Ours)", "Loss+Gradient Time (ms)"): "54",
        ("2) Liger Kernels", "Loss+Gradient Time (ms)"): "~300",
        ("5) Baseline", "Loss+Gradient Time (ms)"): "75",
    }
    rows = Bench(paper, "phi35_mini").add("eager", "peak_memory", 3006.0, measure="both").write(tmp_path)
    cell = table_contents(project, "cce_tableA2", rows).cells["Phi 3.5 Mini: Baseline", "Loss+Gradient Memory (MB)"]
    assert (cell.published, cell.regenerated, cell.verdict) == ("", "3006", "not found")
    ours = table_contents(project, "cce_tableA2", rows).cells["Phi 3.5 Mini: Our default", "Loss Time (ms)"]
    assert ours.verdict == "not run"


def test_the_ratio_of_times_over_models_is_judged_by_its_rank_correlation(project, paper, tmp_path):
    def judged(grows: bool) -> str:
        files = []
        for case in paper.tables["cce_tableA2"].cases:
            _, vocab, width = paper.shape(case)
            ratio = vocab / width if grows else width / vocab
            bench = Bench(paper, case).add("ours_published_scheme", "time", ratio, measure="both")
            files += bench.add("torch.compile", "time", 1.0, measure="both").write(tmp_path / case)
        contents = table_contents(project, "cce_tableA2", files)
        return verdicts(project, "cce_tableA2", contents)["CCE-TA2-2"]

    assert judged(grows=False) == "holds" and judged(grows=True) == "fails"


# -- editions ----


def test_the_edition_that_is_compared_is_a_choice(tmp_path, paper):
    for editions, gradient, kahan in (({}, "100", "2326"), ({"cce_table1": "arXiv v1"}, "95", "")):
        project = Project({"scale": "gpu", "editions": editions})
        cells = table_contents(project, "cce_table1", []).cells
        assert cells["1) CCE (Ours)", "Gradient Time (ms)"].published == gradient
        assert cells["8) CCE-Kahan", "Loss+Gradient Memory (MB)"].published == kahan


def test_claims_hold_in_print_in_both_editions_where_both_print_their_cells():
    for edition in ("ICLR 2025", "arXiv v1"):
        project = Project({"scale": "gpu", "editions": {"cce_table1": edition}})
        reading = Reading(project, "cce_table1", table_contents(project, "cce_table1", []))
        truths = {c.id: holds_in_print(reading, c) for c in project.table("cce_table1")[1].claims}
        wrong = [k for k, v in truths.items() if v is False]
        # Row 7 prints less than 3 times the gradient of row 6. Version 1: 104 ms without sorting, 9 % more than 95 ms.
        assert wrong == (["CCE-T1-6", "CCE-T1-10b"] if edition == "ICLR 2025" else ["CCE-T1-7"])


def test_an_unknown_edition_or_one_of_a_table_without_editions_is_refused():
    project = Project({"editions": {"cce_table1": "ICLR 2024"}})
    with pytest.raises(SpecError, match="unknown edition 'ICLR 2024'; did you mean 'ICLR 2025'"):
        table_contents(project, "cce_table1", [])
    with pytest.raises(SpecError, match="'cce_tableA1' has one edition only"):
        Project({"editions": {"cce_tableA1": "arXiv v1"}})


# -- the benchmark that makes the rows ----


def test_cases_and_methods_of_the_tables_are_those_of_the_benchmark(paper):
    from paperlm_kernels.bench.ops.cross_entropy import BOUND
    from paperlm_kernels.bench.ops.cross_entropy.declared import CASES, ITEM_BYTES
    from paperlm_kernels.bench.ops.cross_entropy.methods import METHODS

    for name, case in paper.cases.items():
        made = CASES[name]
        assert paper.shape(name) == (made.tokens, made.vocab, made.width)
        assert (case.counting, paper.softcap(name)) == (made.counting, made.softcap)
        assert case.element_bytes == ITEM_BYTES[made.dtype]
        assert gradient_bytes(*paper.shape(name), case.element_bytes) / 2**20 == made.lower_bound
    for table in paper.tables.values():
        if table.kind == "measurements":
            assert {row.method for row in table.rows.values()} <= {*METHODS, BOUND}


def test_every_column_of_table_one_is_filled_by_what_the_benchmark_writes(paper, tmp_path, monkeypatch, capfd):
    """Runs it on a CPU at an eighth of the small case. Two columns are measured on a GPU only."""
    from paperlm.bench import measure_case

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "rows.jsonl"
    assert measure_case("cross_entropy", "tiny_cpu", "eager", "cpu", "small", out) == 0
    contents = table_contents(Project({"scale": "smoke"}), "cce_table1", [out])
    for label, column in paper.tables["cce_table1"].columns.items():
        row = "Lower bound" if column.only else "5) Baseline"
        on_a_gpu = column.field == "over_floor" or "L2 flushed" in label
        assert contents.cells[row, label].regenerated or on_a_gpu, label
    assert "N=128, V=4096, D=16" in contents.cells["5) Baseline", "Loss Time (ms)"].labels


# -- the workflow's view ----


def test_committed_rows_are_readable_measured_on_the_declared_shapes_and_fill_table_one(project):
    path = ROOT / "paper_tables/records/bench/cross_entropy.jsonl"
    for name in ("cce_table1", "cce_tableA1", "cce_tableA2"):
        cells = table_contents(project, name, [path]).cells
        if name == "cce_table1":
            assert cells["1b) Our default", "Loss+Gradient Time (ms)"].labels.startswith("NVIDIA H200")


def test_committed_rows_are_the_record_on_a_gpu_and_cases_without_one_are_measured(tmp_path, paper, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    root = edited(tmp_path, "cce", lambda p: None)
    committed = root / "paper_tables/records/bench"
    Bench(paper).add("eager", "time", 67.0, measure="both").write(committed)
    (committed / "rows.jsonl").rename(committed / "cross_entropy.jsonl")
    workflow = Workflow(Project({"scale": "gpu", "run_missing": "yes"}, root))
    record = "paper_tables/records/bench/cross_entropy.jsonl"
    assert workflow.inputs("cce_table1") == [record]
    invalids = "results/gpu/bench/cross_entropy/gemma2_2b_invalids.jsonl"
    assert set(workflow.inputs("cce_tableA1")) == {record, invalids}
    assert len(workflow.inputs("cce_tableA2")) == 6 and workflow.inputs("cce_tableA3") == []
    methods = set(workflow.measurements["cross_entropy", "gemma2_2b"])
    assert {"ours", "torch.compile", "cut-cross-entropy exact"} <= methods
    nothing = Workflow(Project({"scale": "gpu", "run_missing": "no"}, root))
    assert nothing.inputs("cce_tableA2") == []
    small = Workflow(Project({"scale": "tiny"}, root))
    assert small.inputs("cce_table1") == ["results/tiny/bench/cross_entropy/tiny_cpu.jsonl"]
    assert len(small.inputs("cce_tableA2")) == 6 and {"ours", "eager"} <= set(
        small.measurements["cross_entropy", "tiny_cpu"]
    )


def test_show_leads_to_the_constants_the_measurement_and_the_figure(paperlm):
    out = paperlm("show", "cce_tableA3", "--cell", "Gemma 2 (2B),Increase").stdout
    for expected in ("9.5x", "paperlm.cost.memory.quantities", "google/gemma-2-2b", "caption of Figure 1"):
        assert expected in out
    out = paperlm("show", "cce_table1", "--cell", "5) Baseline,Loss Time (ms)", "--config", "scale=gpu").stdout
    assert re.search(r"published +82 .*ICLR 2025", out) and "workflow/rules/measure.smk" in out and "eager" in out
    assert "Lower bound" in paperlm("show", "cce_tableA2").stdout
    assert "paperlm.figures.access_patterns.draw" in paperlm("show", "cce_figure2").stdout
    done = paperlm("show", "cce_figure3a")
    assert done.returncode == 2 and "unknown table or figure" in done.stderr
