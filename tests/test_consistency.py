"""Printed numbers against each other: what paper_tables/published_consistency.csv says."""

from __future__ import annotations

import csv
import statistics

import pytest
from support_tables import edited

from paperlm.checks import open_project
from paperlm.errors import SpecError
from paperlm.plan.project import ROOT, Project
from paperlm.tables.consistency import consistency_rows, write_consistency


def found(project: Project) -> dict[tuple[str, str], dict[str, str]]:
    return {(row["check"], row["part"]): row for row in consistency_rows(project)}


def lines(name: str) -> list[list[str]]:
    with (ROOT / f"paper_tables/published/{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_every_contradiction_in_print_is_explained_and_nothing_else():
    for row in consistency_rows(Project({})):
        assert (row["holds"] == "false") == bool(row["known"]), row["check"]


def test_averages_are_recomputed_from_the_file_itself():
    """A second reading of the CSV: the one mean that does not round to the printed digits is 31.967, printed 31.96."""
    rows = found(Project({}))
    for check, name in (("MIX-C-1", "mixln_table2"), ("LNS-C-1", "lns_table3")):
        for model, method, *cells in lines(name)[1:]:
            *tasks, average = map(float, cells)
            agrees = f"{statistics.fmean(tasks):.2f}" == f"{average:.2f}"
            assert rows[check, f"{model}, {method}"]["holds"] == str(agrees).lower(), (name, model, method)
            assert agrees == ((model, method) != ("LLaMA-1B", "Post-LN"))


def test_cells_that_two_papers_print_are_compared_digit_by_digit():
    rows = found(Project({}))
    mix, lns = ({line[0]: dict(zip(t[0][1:], line[1:], strict=True)) for line in t[1:]} for t in map(lines, TABLES))
    for method in ("Post-LN", "DeepNorm", "Pre-LN", "Mix-LN"):
        for size in ("LLaMA-130M", "LLaMA-250M", "LLaMA-1B"):
            row = rows["LNS-C-2", f"{method}, {size}"]
            assert row["holds"] == str(mix[method][size] == lns[method][size]).lower()
            assert f"M1[{method}, {size}] {mix[method][size]}" in row["cells"]


TABLES = ("mixln_table1", "lns_table1")


def test_the_printed_data_of_1B_and_7B_are_not_those_of_their_updates():
    rows = found(Project({}))
    assert {part: rows["MIX-C-7", part]["holds"] for part in ("71M", "130M", "250M", "1B", "7B")} == {
        "71M": "true", "130M": "true", "250M": "true", "1B": "false", "7B": "false",
    }  # fmt: skip
    assert rows["MIX-C-8", ""]["holds"] == "true", "13,000 updates of 512 x 256 are 1.70B slots"


def test_a_changed_digit_changes_the_answer(tmp_path):
    root = edited(tmp_path, "mixln", lambda paper: None)
    path = root / "paper_tables/published/mixln_table5.csv"
    path.write_text(path.read_text().replace("18.65", "18.66"))
    write_consistency(Project({}, root), tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = {row["check"]: row for row in csv.DictReader(file)}
    assert rows["MIX-C-2"]["holds"] == "false" and "M5[Perplexity, Pre-LN, 0] 18.66" in rows["MIX-C-2"]["cells"]


def test_a_printed_number_is_a_number_and_none_that_diverged(tmp_path):
    diverged = {"expression": "div(M1['Post-LN','LLaMA-1B'])"}
    rows = found(Project({}, edited(tmp_path, "mixln", lambda paper: paper["consistency"][1].update(diverged))))
    assert rows["MIX-C-2", ""]["holds"] == "false", "however high it is"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expression": "M1['Pre-LM','LLaMA-1B'] == 1"}, "did you mean 'Pre-LN | LLaMA-1B'"),
        ({"expression": "M9['Pre-LN','LLaMA-1B'] == 1"}, "unknown exhibit 'M9'"),
        ({"expression": "M1['Pre-LN','LLaMA-1B'] =="}, "invalid syntax"),
        (
            {"expression": "M8['Pre-LN, ✓','Perplexity'] > 0", "known": "a reading"},
            "holds in every part: leave `known`",
        ),
        ({"id": "MIX-C-2"}, "'MIX-C-2' stands in mixln.yaml, consistency already"),
        ({"known": 3}, "known"),
    ],
)
def test_a_check_that_cannot_be_made_is_refused_at_the_start(tmp_path, change, message):
    root = edited(tmp_path, "mixln", lambda paper: paper["consistency"][0].update(change))
    with pytest.raises(SpecError, match=r"workflow/papers/mixln\.yaml") as error:
        open_project({}, root)
    assert message in str(error.value)
