"""What can be checked before a job is checked before any job: wrong declarations, tables and settings are refused with
the file, the place, the nearest name and the remedy."""

from __future__ import annotations

import json
import re
import time

import pytest
from support import copy_tracked
from support_declarations import refused, write
from support_workflow import slower, snakemake

from paperlm.checks import open_project
from paperlm.errors import SpecError
from paperlm.figures import figure_kinds
from paperlm.figures.options import FigureOptions, options_class
from paperlm.jobs import job_from, job_kinds
from paperlm.jobs.pretrain import BY_WORD
from paperlm.plan.project import ROOT, Project, configuration
from paperlm.plan.workflow import Workflow

# -- printed tables ----

PRINTED = "paper_tables/published/mixln_table1.csv"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Post-LN,35.18", "Post-LN,35.18,7", ":3: has 6 cells, the first line 5"),
        ("DeepNorm,", "Post-LN,", "row 'Post-LN' stands twice"),
        ("35.18", "35.l8", "row 'Post-LN', column 'LLaMA-71M': '35.l8' is no number"),
        ("35.18", '"35,18"', "'35,18' is no number"),
        ("35.18", "nan", "'nan' is no number"),
        ("Pre-LN,", "\nPre-LN,", ":5: an empty line; delete it"),
        ("Pre-LN,", ",,,,\nPre-LN,", ":5: an empty line; delete it"),
        ("Post-LN,35.18", '"Post-LN,35.18', "a quote may not be closed"),
    ],
)
def test_a_printed_table_with_a_mistake_is_refused_with_its_place(root, old, new, message):
    text = (ROOT / PRINTED).read_text()
    assert old in text
    write(root, PRINTED, text.replace(old, new, 1))
    refused(root, rf"mixln_table1\.csv:?.*{message}")


def test_a_printed_table_that_no_paper_declares_is_read_all_the_same(root):
    write(root, "paper_tables/published/new.csv", ",a\nx,1,2\n")
    refused(root, r"new\.csv:2: has 3 cells, the first line 2")


def test_a_byte_order_mark_and_words_for_no_number_are_no_mistake(root):
    text = (ROOT / PRINTED).read_text()
    write(root, PRINTED, "\ufeff" + text.replace("35.18", "OOM").replace("34.87", "-").replace("34.77", "~35"))
    assert "mixln_table1" in open_project({"scale": "tiny"}, root).tables


# -- configuration ----


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sale": "tiny"}, "--config: unknown key 'sale'; did you mean 'scale'"),
        ({"seeds": 0}, "--config: seeds: Input should be a valid list"),
        ({"seeds": [-1]}, "--config: seeds.0: .* greater than or equal to 0"),
        ({"seeds": [0, 0]}, "a seed is named twice"),
        ({"seeds": [True]}, "--config: seeds.0 is a truth value; give a number"),
        ({"checkpoint_seconds": float("inf")}, "--config: checkpoint_seconds: .*finite"),
    ],
)
def test_a_wrong_value_of_the_command_line_is_told_from_one_of_the_file(root, given, message):
    with pytest.raises(SpecError, match=message):
        configuration(root, given)
    assert configuration(root, {"scale": "gpu"}).scale == "gpu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scale: tiny\nscale: gpu\n", "key 'scale' is written twice"),
        ("seads: [0]\n", "unknown key 'seads'; did you mean 'seeds'"),
        ("tiny\n", "has to be a mapping"),
    ],
)
def test_a_mistake_in_the_configuration_file_is_refused_naming_it(root, text, message):
    write(root, "config.yaml", text)
    with pytest.raises(SpecError, match=rf"config\.yaml: .*{message}"):
        configuration(root)


def test_a_folder_of_local_data_that_is_not_there_is_refused_at_once():
    with pytest.raises(SpecError, match="local_data: /no/such: no such folder"):
        open_project({"local_data": "/no/such"})


# -- what kinds say of themselves ----


def test_every_kind_of_job_says_which_metrics_and_series_its_records_have():
    """The committed records, which other code wrote, have exactly those, or all but what the kind told only later."""
    later = {"pretrain": (set(BY_WORD), "2026-11-27")}  # and the last day of records without
    seen = set()
    for path in sorted((ROOT / "paper_tables/records").glob("*/*/*.json")):
        record = json.loads(path.read_bytes())
        if record["outcome"] not in ("trained", "measured"):
            continue
        job = job_from(record["job"])
        seen.add(job.kind)
        missing = set(job.metrics()) - set(record["metrics"])
        assert set(record["metrics"]) <= set(job.metrics()), path
        if missing:
            untold, until = later[job.kind]
            assert missing == untold and record["environment"]["date"] <= until, path
        columns = {name: list(series["columns"]) for name, series in record["series"].items()}
        assert {name: list(found) for name, found in job.series().items()} == columns, path
    assert {"pretrain", "sft", "block_removal"} <= seen
    silent = [name for name, kind in job_kinds().items() if kind.metrics.__qualname__.startswith("Job.")]
    assert silent == []


@pytest.mark.parametrize("kind", figure_kinds())
def test_a_kind_of_figure_declares_its_options_and_refuses_others(kind):
    declared = options_class(kind)
    assert issubclass(declared, FigureOptions)
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        declared.model_validate({"no_option": 1})


def test_a_metric_of_a_kind_that_does_not_say_what_it_measures_is_not_checked(toy_kinds, root):
    from support_jobs import TOY_PAPER

    text = TOY_PAPER.replace("metric: value", "metric: anything")
    (root / "workflow/papers/toy.yaml").write_text(text)
    assert "toy_table1" in open_project({"scale": "smoke"}, root).tables


def test_opening_a_project_with_all_its_checks_takes_less_than_two_seconds_of_the_reference_machine():
    started = time.process_time()
    open_project({"scale": "paper"})
    assert (time.process_time() - started) / slower() < 2


# -- targets of Snakemake ----


@pytest.mark.parametrize(
    ("target", "near"),
    [
        ("paper_tables/mixln_tabel1.csv", "paper_tables/mixln_table1.csv"),
        ("mixln_table1.csv", "paper_tables/mixln_table1.csv"),
        ("mixln_table1", "paper_tables/mixln_table1.csv"),
        ("paper_tables/mixln_figure5.scg", "paper_tables/mixln_figure5.svg"),
        ("mixnl", "mixln"),
    ],
)
def test_a_target_that_no_rule_makes_has_the_nearest_one_in_its_message(target, near):
    plan = Workflow(Project({"scale": "smoke"}))
    message = plan.unknown_target(target, ["all", *plan.project.papers])
    assert f"no rule makes {target!r}; did you mean {near!r}?" in message


# -- what Snakemake reads ----


@pytest.mark.parametrize("line", ["x: 2026-13-45", "x: &x [*x]", "x: " + "[" * 3000])
def test_a_configuration_that_no_parser_reads_stops_snakemake_with_file_and_line(tmp_path, line):
    clone = copy_tracked(tmp_path / "clone")
    (clone / "config.yaml").open("a").write(f"{line}\n")
    out = snakemake(clone, "-n", expect=1)
    assert re.search(r"config\.yaml: not valid YAML: .* line \d+", out) and "Traceback" not in out
