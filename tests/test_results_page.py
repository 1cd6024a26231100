"""docs/results.md is what the committed reference says, and nothing more."""

from __future__ import annotations

import json

import pytest

from paperlm.checks import open_project
from paperlm.errors import RecordError
from paperlm.figures.base import write_figure
from paperlm.plan.project import ROOT, Project
from paperlm.plan.workflow import Workflow
from paperlm.results_page import REFERENCE, page, reference_part, take_reference
from paperlm.tables.build import write_table

SCALES = tuple(sorted(path.name for path in (ROOT / REFERENCE).iterdir() if path.is_dir()))


def test_the_page_of_results_is_generated_from_the_reference():
    assert (ROOT / "docs/results.md").read_text() == page(Project(), SCALES)


def test_what_failed_stands_before_what_held_and_every_proxy_is_named():
    text = page(Project(), SCALES)
    for table in text.split("| claim | verdict | why |")[1:]:
        verdicts = [line.split(" | ")[1] for line in table.splitlines() if line.startswith("| ") and " | " in line]
        known = [v for v in verdicts if v in ("fails", "undecided", "holds", "not tested")]
        assert known == sorted(known, key=("fails", "undecided", "holds", "not tested").index)
    assert "a proxy of phi3.5-mini: the shape of gpt2" in text


@pytest.fixture
def copy(root):
    """The declarations alone."""
    return Project({"scale": "gpu", "run_missing": "no"}, root)


def test_a_reference_of_nothing_is_refused(copy):
    with pytest.raises(RecordError, match="no exhibit of scale gpu has been built"):
        take_reference(copy)


def test_an_exhibit_without_a_number_and_one_of_another_scale_are_no_reference(copy):
    folder = copy.root / "paper_tables"
    for name, scale, value in (("mixln_table1", "gpu", "not run"), ("mixln_table5", "tiny", "90.1")):
        (folder / f"{name}.diff.csv").write_text(f"scale,regenerated\n{scale},{value}\n")
        (folder / f"{name}.claims.csv").write_text("claim,verdict\n")
    with pytest.raises(RecordError):
        take_reference(copy)


def test_a_table_that_no_reference_has_is_named_with_the_command_that_makes_it(copy):
    with pytest.raises(RecordError, match="paperlm results --take --config scale=gpu"):
        reference_part(copy, "gpu", "mixln_table2")


@pytest.mark.parametrize("name", ["mixln_table1", "cce_figure3"])
def test_the_reference_of_the_committed_records_is_what_they_give_today(tmp_path, name):
    folder = ROOT / REFERENCE / "gpu"
    made = json.loads((folder / "made.json").read_text())
    project = open_project({"scale": "gpu", "run_missing": "no", "seeds": made["seeds"]})
    files = [ROOT / path for path in Workflow(project).inputs(name)]
    if name in project.tables:
        write_table(project, name, files, tmp_path / f"{name}.csv")
    else:
        write_figure(project, name, files, tmp_path / f"{name}.svg")
    for kind in ("diff", "claims"):
        assert (tmp_path / f"{name}.{kind}.csv").read_text() == (folder / f"{name}.{kind}.csv").read_text()
