"""Cells of tables whose jobs are evaluations: means of columns, percentages, outcomes, records of earlier rules."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from support_tables import edited, pretrained, record_of, write_records

from paperlm.errors import SpecError
from paperlm.plan.exhibit import DivergedRule
from paperlm.plan.project import Project
from paperlm.record.record import Record, behaviours_of_ancestors, drift, write_record
from paperlm.tables.build import table_contents, write_table
from paperlm.tables.contents import Contents, DiffRow
from paperlm.tables.jobs import printed_diverged
from paperlm.tables.metrics import DERIVED
from paperlm.tables.results import collect

TABLE = "mixln_table2"
ROW = "LLaMA-1B, Mix-LN"
TASKS = {
    "MMLU": ("mmlu", 0.2799, 0.004), "BoolQ": ("boolq", 0.6193, 0.0085), "ARC-e": ("arc_easy", 0.4811, 0.0103),
    "PIQA": ("piqa", 0.685, 0.0108), "Hellaswag": ("hellaswag", 0.3135, 0.0046),
    "OBQA": ("openbookqa", 0.188, 0.0175), "Winogrande": ("winogrande", 0.5593, 0.014),
}  # fmt: skip
"Column -> task, accuracy as printed, standard error that such a set has."
ACCURACIES = {f"{task}/acc": value for task, value, _ in TASKS.values()}
ERRORS = {f"{task}/acc": error for task, _, error in TASKS.values()}


@pytest.fixture
def project() -> Project:
    return Project({"scale": "paper"})


def evaluated(project: Project, folder: Path, change=lambda record, seed: record, table: str = TABLE) -> list[Path]:
    """Records of row LLaMA-1B, Mix-LN with the printed accuracies, one a seed, as `change` leaves them."""
    cell = next(c for c in project.cells(table) if (c.row, c.column) == (ROW, "MMLU"))
    paths = []
    for seed, job in enumerate(cell.jobs):
        record = change(record_of(job, dict(ACCURACIES), standard_errors=dict(ERRORS)), seed)
        if record is not None:
            paths.append(folder / f"{seed}.json")
            write_record(paths[-1], record)
    return paths


def row_of(project: Project, records: list[Path]) -> dict[str, DiffRow]:
    cells = table_contents(project, TABLE, records).cells
    return {column: cell for (row, column), cell in cells.items() if row == ROW and "5-shot" not in column}


def with_(**fields: object):
    return lambda record, seed: record.model_copy(update=fields)


# -- numbers ----


def test_percentages_are_the_metric_times_the_tables_factor(project, tmp_path):
    cells = row_of(project, evaluated(project, tmp_path))
    assert [cells[c].regenerated for c in TASKS] == ["27.99", "61.93", "48.11", "68.50", "31.35", "18.80", "55.93"]
    assert {cells[c].verdict for c in TASKS} == {"match"} and cells["ARC-e"].metric == "arc_easy/acc"
    assert cells["ARC-e"].spread == "standard error 1" and cells["MMLU"].spread == "standard error 0.4"


def test_a_mean_of_columns_is_that_of_their_numbers_with_errors_in_quadrature(project, tmp_path):
    cell = row_of(project, evaluated(project, tmp_path))["Avg."]
    mean = 100 * sum(ACCURACIES.values()) / 7
    error = 100 * math.sqrt(sum(e * e for e in ERRORS.values())) / 7
    assert float(cell.judged_on) == pytest.approx(mean, abs=0.005) and cell.metric == "mean of 7 columns"
    assert (cell.regenerated, cell.verdict) == ("44.66", "match"), "the print's own average"
    assert cell.spread == f"standard error {error:.2g}" and error == pytest.approx(0.41, abs=0.01)
    result = collect(project, TABLE, evaluated(project, tmp_path)).cells[ROW, "Avg."]
    assert result.standard_error("mmlu/acc") == pytest.approx(error, rel=1e-12)
    assert result.noise("mmlu/acc", 0.5) == pytest.approx(error / mean), "its own error, not the scale's"


def test_without_the_error_of_one_column_the_mean_has_the_scales_noise(project, tmp_path):
    few = {key: e for key, e in ERRORS.items() if key != "piqa/acc"}
    files = evaluated(project, tmp_path, with_(standard_errors=few))
    result = collect(project, TABLE, files).cells[ROW, "Avg."]
    assert result.standard_error("mmlu/acc") is None and result.noise("mmlu/acc", 0.5) == 0.5
    assert row_of(project, files)["Avg."].spread == "" and row_of(project, files)["BoolQ"].spread != ""


def test_a_difference_within_two_standard_errors_is_within_seeds(project, tmp_path):
    def moved(by: float) -> str:
        shifted = {**ACCURACIES, "boolq/acc": ACCURACIES["boolq/acc"] + by * ERRORS["boolq/acc"]}
        return row_of(project, evaluated(project, tmp_path, with_(metrics=shifted)))["BoolQ"].verdict

    assert [moved(by) for by in (0.0, 1.8, -1.8, 2.3, -2.3)] == [
        "match", "within seeds", "within seeds", "differs", "differs",
    ]  # fmt: skip


def test_what_the_noise_of_one_seed_rests_on_is_said(project, tmp_path):
    said = [
        table_contents(project, TABLE, evaluated(project, tmp_path / name, change)).one_sample
        for name, change in (("with", with_()), ("without", with_(standard_errors={})))
    ]
    assert said[0].endswith("standard errors are of the items, seeds of training are not in them")
    assert said[1].startswith("one seed; seed noise ")


def test_several_seeds_show_their_spread_in_the_tables_unit(tmp_path):
    project = Project({"scale": "paper", "seeds": [0, 1, 2]})

    def seeded(record: Record, seed: int) -> Record:
        return record.model_copy(update={"metrics": {**ACCURACIES, "boolq/acc": 0.60 + 0.01 * seed}})

    cell = row_of(project, evaluated(project, tmp_path, seeded))["BoolQ"]
    assert (cell.regenerated, cell.spread, cell.seeds) == ("61.00", "1", 3)


def test_a_number_belongs_to_the_seed_of_the_model_that_it_is_about(tmp_path):
    """Evaluations have no seed of their own; records come in any order, and one is missing."""
    project = Project({"scale": "paper", "seeds": [3, 5, 8]})
    files = evaluated(project, tmp_path, lambda record, index: record if index != 1 else None)
    assert collect(project, TABLE, reversed(files)).cells[ROW, "BoolQ"].seeds == (3, 8)


def test_a_printed_zero_is_compared_without_a_ratio(tmp_path):
    root = edited(tmp_path / "root", "mixln", lambda p: None)
    path = root / f"paper_tables/published/{TABLE}.csv"
    path.write_text(path.read_text().replace("27.99", "0.0"))
    project = Project({"scale": "paper"}, root)
    cell = row_of(project, evaluated(project, tmp_path))["MMLU"]
    assert (cell.published, cell.difference, cell.relative_difference) == ("0.0", "+28", "")
    assert cell.verdict == "differs"


def test_a_mean_over_columns_of_different_jobs_or_over_a_mean_is_refused(tmp_path):
    def another_job(paper: dict) -> None:
        paper["jobs"]["five"] = paper["jobs"]["tasks"] | {
            "settings": paper["jobs"]["tasks"]["settings"] | {"few_shot": {"value": 5, "source": "a test"}}
        }
        paper["tables"][TABLE]["columns"]["BoolQ"]["job"] = "five"

    def of_a_mean(paper: dict) -> None:
        columns = paper["tables"][TABLE]["columns"]
        columns["Both"] = {"mean_of": ["Avg.", "MMLU"], "in_print": False}

    for edit, wrong in (
        (another_job, "MMLU, BoolQ, .* one has another job"),
        (of_a_mean, "Avg..* a mean itself"),
    ):
        project = Project({"scale": "paper"}, edited(tmp_path / edit.__name__, "mixln", edit))
        with pytest.raises(SpecError, match=wrong):
            table_contents(project, TABLE, [])


def test_a_mean_takes_the_metric_that_the_row_gives_its_cells(tmp_path):
    def edit(paper: dict) -> None:
        table = paper["tables"][TABLE]
        table["rows"][ROW]["metric"] = "boolq/acc"
        for column in ("MMLU", "PIQA"):
            table["columns"][column] = {}
        table["columns"]["Avg."]["mean_of"] = ["MMLU", "PIQA"]

    project = Project({"scale": "paper"}, edited(tmp_path / "root", "mixln", edit))
    cells = row_of(project, evaluated(project, tmp_path))
    assert cells["MMLU"].regenerated == cells["PIQA"].regenerated == cells["Avg."].regenerated == "61.93"


def test_an_unknown_metric_is_refused_with_the_nearest_one(tmp_path):
    root = edited(tmp_path / "root", "mixln", lambda p: p["tables"][TABLE]["columns"]["PIQA"].update(metric="piqa/ac"))
    project = Project({"scale": "paper"}, root)
    with pytest.raises(SpecError, match="unknown metric 'piqa/ac'; did you mean 'piqa/acc'"):
        table_contents(project, TABLE, evaluated(project, tmp_path))


def test_columns_of_ours_stand_behind_the_printed_ones_and_are_compared_with_nothing(tmp_path):
    project, name = Project({"scale": "paper"}), "mixln_table3"
    metrics = {"final_reward": 1.32, "reward_before": -0.01, "reward_after": 1.2, "judge_after": 0.9, "kl": 12.5}
    metrics |= {"reward_gain": 1.21, "judge_gain": 0.7}
    files = []
    for job in project.jobs_of(name):
        files.append(tmp_path / f"{job.job_id}.json")
        write_record(files[-1], record_of(job, metrics))
    write_table(project, name, files, tmp_path / f"{name}.csv")
    lines = list(csv.reader((tmp_path / f"{name}.csv").read_text().splitlines()))
    assert lines[0][:4] == ["scale", "Method", "Model", "Final Reward"] and len(lines[0]) == 10
    assert lines[2] == ["paper", "Mix-LN", "LLaMA-1B", "1.32", "-0.01", "1.20", "0.90", "1.21", "0.70", "12.50"]
    verdicts = {d.column: d.verdict for d in table_contents(project, name, files).diff if d.row == "Mix-LN, LLaMA-1B"}
    assert verdicts.pop("Final Reward") == "not comparable at this scale" and set(verdicts.values()) == {"not printed"}


# -- outcomes ----


def test_a_blocked_cell_says_why_and_has_no_number(project, tmp_path):
    why = "the model that it works on ended not_finite"
    blocked = with_(outcome="blocked", metrics={}, standard_errors={}, reason=why)
    files = evaluated(project, tmp_path, blocked)
    cells = row_of(project, files)
    assert {(c.regenerated, c.verdict, c.reason) for c in cells.values()} == {("blocked", "blocked", why)}
    assert {c.seeds for c in cells.values()} == {0}
    assert not table_contents(project, TABLE, files).samples


def test_a_blocked_seed_is_left_out_and_counted(tmp_path):
    project = Project({"scale": "paper", "seeds": [0, 1, 2]})

    def second(record: Record, seed: int) -> Record:
        blocked = {"outcome": "blocked", "reason": "tried", "metrics": {}, "standard_errors": {}}
        return record.model_copy(update=blocked) if seed == 1 else record

    cell = row_of(project, evaluated(project, tmp_path, second))["MMLU"]
    assert (cell.regenerated, cell.seeds, cell.verdict) == ("27.99", 2, "match")
    assert cell.labels == "1 of 3 seeds have no honest number"


@pytest.mark.parametrize(
    ("printed", "verdict"), [("27.99", "differs"), ("OOM", "out of memory as published"), ("-", "not printed")]
)
def test_out_of_memory_is_compared_as_an_outcome(tmp_path, printed, verdict):
    root = edited(tmp_path / "root", "mixln", lambda p: None)
    path = root / f"paper_tables/published/{TABLE}.csv"
    path.write_text(path.read_text().replace("27.99", printed))
    project = Project({"scale": "paper"}, root)
    files = evaluated(project, tmp_path, with_(outcome="out_of_memory", metrics={}, standard_errors={}))
    cell = row_of(project, files)["MMLU"]
    assert (cell.regenerated, cell.verdict, cell.difference) == ("out of memory", verdict, "")
    number = row_of(project, evaluated(project, tmp_path))["MMLU"]
    assert number.verdict == {"27.99": "match", "OOM": "differs", "-": "not printed"}[printed]


def test_a_count_of_a_column_leaves_out_jobs_without_numbers(tmp_path):
    project = Project({"scale": "gpu", "seeds": [0, 1]})
    files = write_records(project, tmp_path, lambda r, c, s: 30.0 if c == "LLaMA-71M" else None, "mixln_table1")
    job = next(c for c in project.cells("mixln_table1") if c.jobs).jobs[1]
    write_record(tmp_path / f"{job.job_id}.json", record_of(job, outcome="out_of_memory"))
    cells = table_contents(project, "mixln_table1", files).cells
    assert cells["Training Tokens", "LLaMA-71M"].regenerated == "1.10B"
    assert cells["Post-LN", "LLaMA-71M"].regenerated == "out of memory"


# -- what has to stand beside a number ----


def test_a_record_of_earlier_rules_is_marked_with_what_has_changed(project, tmp_path):
    cells = row_of(project, evaluated(project, tmp_path, with_(behaviour={"lm_eval": 0})))
    assert cells["MMLU"].regenerated == "27.99"
    assert cells["MMLU"].labels.startswith("earlier rules: lm_eval 0 -> ")


def test_a_record_on_a_model_of_earlier_rules_names_the_ancestor(project, tmp_path):
    cell = next(c for c in project.cells(TABLE) if c.row == ROW)
    sft, pretrain = cell.jobs[0].ancestors()
    then = {sft.job_id: sft.behaviours(), pretrain.job_id: {"pretrain": 0}}
    labels = row_of(project, evaluated(project, tmp_path, with_(ancestors=then)))["MMLU"].labels
    assert labels == f"earlier rules: {pretrain.job_id}: pretrain 0 -> {pretrain.behaviour}"
    assert row_of(project, evaluated(project, tmp_path))["MMLU"].labels == ""


def test_cells_of_several_trainings_of_one_model_say_so_and_others_do_not(tmp_path):
    """As a card gives them, which does not train a job twice to the same bits."""
    project, table = Project({"scale": "tiny"}), "bitnet_table3"
    cells = [c for c in project.cells(table) if c.column == "PPL" and c.row.endswith("3B")][:3]
    labels = {}
    for name, digests in {"one": ["a", "a", "a"], "two": ["a", "b", "a"], "unknown": ["a", "", ""]}.items():
        paths = []
        for cell, weights in zip(cells, digests, strict=True):
            (job,) = cell.jobs
            of = {job.of.job_id: weights} if weights else {}
            paths.append(tmp_path / name / f"{job.job_id}.json")
            paths[-1].parent.mkdir(exist_ok=True)
            write_record(paths[-1], record_of(job, dict.fromkeys(job.metrics(), 1.0), weights=of))
        found = table_contents(project, table, paths).cells
        labels[name] = [found[cell.row, "PPL"].labels for cell in cells]
    said = f"cells here are of 2 trainings of {cells[0].jobs[0].of.job_id}"
    assert all(said in one for one in labels["two"])
    assert not any("trainings of" in one for one in labels["one"] + labels["unknown"])


def test_a_record_that_does_not_say_its_rules_or_those_of_its_model_is_of_earlier_ones(project):
    job = next(c for c in project.cells(TABLE) if c.row == ROW).jobs[0]
    parts = [("", job), *((f"{ancestor.job_id}: ", ancestor) for ancestor in job.ancestors())]
    said = [f"{who}{one.kind} none -> {one.behaviour}" for who, one in parts]
    assert drift(job, {}, {}) == said and len(said) == 3
    assert drift(job, job.behaviours(), {}) == said[1:]
    assert drift(job, job.behaviours(), behaviours_of_ancestors(job)) == []


def test_labels_of_records_and_missing_seeds_stand_beside_the_number(tmp_path):
    project = Project({"scale": "paper", "seeds": [0, 1]})
    cut = "boolq: 3 % of requests cut on the left to 256 tokens"
    files = evaluated(project, tmp_path, lambda r, s: r.model_copy(update={"labels": [cut]}) if s == 0 else None)
    assert row_of(project, files)["BoolQ"].labels == f"1 of 2 seeds have a record; {cut}"


def test_a_cell_has_the_labels_of_its_own_tasks_and_those_of_no_task(project, tmp_path):
    of_tasks = [f"{task}: a subset of 100 items" for task, _, _ in TASKS.values()]
    of_none = ["arc: no task of this record", "leaks the future", "a reward: not on the paper's scale"]
    cells = row_of(project, evaluated(project, tmp_path, with_(labels=[*of_tasks, *of_none])))
    for column, (task, _, _) in TASKS.items():
        assert cells[column].labels.split("; ") == sorted([f"{task}: a subset of 100 items", *of_none])
    assert cells["Avg."].labels.split("; ") == sorted([*of_tasks, *of_none]), "a mean rests on all of its tasks"


def test_a_table_at_another_scale_says_once_that_it_cannot_be_compared_and_what_its_models_are(tmp_path):
    project = Project({"scale": "gpu"})
    contents: Contents = table_contents(project, TABLE, evaluated(project, tmp_path))
    assert contents.notes[0].startswith("not comparable at this scale: ")
    assert contents.cells[ROW, "MMLU"].verdict == "not comparable at this scale"
    assert contents.cells[ROW, "MMLU"].difference == contents.cells[ROW, "MMLU"].reason == ""


# -- divergence ----


def test_the_rule_of_the_table_and_not_the_record_says_what_diverged(tmp_path):
    project = Project({"scale": "gpu"})
    job = project.cells("mixln_table1")[-1].jobs[0]
    for perplexity, diverged in ((1261.0, True), (1260.0, False), (1259.0, False), (math.inf, True)):
        write_record(tmp_path / "r.json", pretrained(job, perplexity))
        cell = next(c for c in collect(project, "mixln_table1", [tmp_path / "r.json"]).cells.values() if c.records)
        assert cell.diverged == [diverged], "0.9 x 1,400 is the edge at this scale"


def test_a_printed_number_is_one_of_a_run_that_diverged_above_the_rules_limit_and_not_at_it():
    above, within = DivergedRule(above=1000, source="a test"), DivergedRule(unigram_within=0.1, source="a test")
    assert [printed_diverged(above, value) for value in (999.5, 1000.0, 1000.5, None)] == [False, False, True, False]
    assert not printed_diverged(within, 1e9) and not printed_diverged(None, 1e9), "only a number can tell"


def test_a_rule_about_divergence_needs_the_perplexities(tmp_path):
    def edit(paper: dict) -> None:
        paper["tables"][TABLE]["diverged"] = {"above": 1000, "source": "a test"}

    project = Project({"scale": "paper"}, edited(tmp_path / "root", "mixln", edit))
    with pytest.raises(SpecError, match="unknown metric 'ppl_true'"):
        table_contents(project, TABLE, evaluated(project, tmp_path))


def test_the_papers_perplexity_is_that_of_its_batch_counter_and_none_without_a_loss():
    paper, needs, metric = DERIVED["ppl_paper"]
    assert (needs, metric) == (("published_batches",), "loss_batches")
    assert paper({"loss_batches": 2.2}, {"published_batches": 10}) == pytest.approx(math.exp(2))
    assert paper({"loss_batches": None}, {"published_batches": 10}) is None


def test_a_table_without_noise_of_its_evaluation_has_none():
    project = Project({"scale": "smoke"})
    noisy = {name for name, (_, table) in project.tables.items() if getattr(table, "print_noise", None)}
    assert noisy and "mixln_table4" in project.tables and "mixln_table4" not in noisy
    assert table_contents(project, "mixln_table4", []).print_noise == 0.0
    assert all(table_contents(project, name, []).print_noise > 0 for name in sorted(noisy)[:1])
