"""What is there and what has to be made: records of earlier rules, records without their models, jobs by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support_jobs import commit, made, maker, model, number, write_paper

from paperlm.errors import SpecError
from paperlm.jobs import job_kinds
from paperlm.plan.project import ROOT, Project
from paperlm.plan.state import State
from paperlm.record.record import drift
from paperlm.run import run_named


@pytest.fixture(autouse=True)
def _toys(toy_kinds):
    """Every test here has the toy kinds."""


# -- earlier rules ----


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """The toy paper at the smoke scale."""
    shutil.copytree(ROOT / "workflow/scales", tmp_path / "workflow/scales")
    return Project({"scale": "smoke"}, write_paper(tmp_path))


def make_all(project: Project) -> None:
    for name in project.exhibits:
        run_named(project, name, maker(project.root).machine, with_parents=True, again=False)


def test_a_record_of_earlier_rules_is_drift_and_made_again_where_that_is_cheap(project, monkeypatch):
    make_all(project)
    job = project.jobs_of("toy_table1")[0]
    parent = job.parents()["of"]
    assert not State(project).todo()
    monkeypatch.setattr(job_kinds()["toy_model"], "behaviour", 2)
    state = State(project)
    assert state.stored(parent).drifted == ("toy_model 1 -> 2",)
    assert state.stored(job).drifted == (f"{parent.job_id}: toy_model 1 -> 2",)
    assert state.todo().keys() == project.jobs.keys(), "children too, and the model they work on"
    make_all(project)
    assert not State(project).todo() and made(project.root, job).ancestors == {parent.job_id: {"toy_model": 2}}


@pytest.mark.parametrize(("remake", "wanted"), [("no", "have"), ("drifted", "make")])
def test_whether_earlier_rules_are_made_again_is_a_wish_of_the_configuration(project, monkeypatch, remake, wanted):
    make_all(project)
    monkeypatch.setattr(job_kinds()["toy_model"], "behaviour", 2)
    state = State(Project({"scale": "smoke", "remake": remake}, project.root))
    assert {state.want(job) for job in project.jobs_of("toy_table1")} == {wanted}


def test_a_record_says_under_which_rules_the_model_was_made_that_it_worked_on(tmp_path, monkeypatch):
    maker(tmp_path).make(model())
    monkeypatch.setattr(job_kinds()["toy_model"], "behaviour", 2)
    maker(tmp_path).make(number())
    record = made(tmp_path, number())
    assert record.ancestors == {model().job_id: {"toy_model": 1}}
    assert drift(number(), record.behaviour, record.ancestors) == [f"{model().job_id}: toy_model 1 -> 2"]


def test_a_job_is_made_again_from_the_start_when_its_rules_change(tmp_path, monkeypatch):
    maker(tmp_path).make(model())
    monkeypatch.setattr(job_kinds()["toy_model"], "behaviour", 2)
    monkeypatch.setenv("TOY_ERROR", "1")
    maker(tmp_path).make(model())
    assert made(tmp_path, model()).metrics["count"] == 4 and made(tmp_path, model()).behaviour == {"toy_model": 2}


# -- records and models are two things ----


def test_a_committed_record_needs_no_model_until_a_child_asks_for_one(project):
    parent, child = project.jobs_of("toy_table2")[0], project.jobs_of("toy_table1")[0]
    commit(project.root, parent)
    state = State(project)
    assert state.want(parent) == "have" and not state.todo("toy_table2")
    assert parent.job_id in state.todo("toy_table1"), "its model is missing"
    commit_path = project.places.committed(parent)
    assert state.record(parent) == commit_path and state.record(child) == project.places.made(child)


def test_a_model_without_the_snapshot_that_a_child_asks_for_is_made_again(project):
    parent = project.jobs_of("toy_table2")[0]
    maker(project.root).make(parent)
    assert not State(project).has_model(parent) and project.keep == {parent.job_id: (2,)}
    maker(project.root, keep=project.keep).make(parent)
    assert State(project).has_model(parent)


def test_without_the_wish_to_make_what_is_missing_nothing_is_to_be_done(project):
    absent = State(Project({"scale": "smoke", "run_missing": "no"}, project.root))
    assert not absent.todo() and absent.records("toy_table1") == []


# -- by name ----


def test_a_table_is_made_by_name_and_what_is_there_is_left(project, capsys):
    make_all(project)
    job = project.jobs_of("toy_table1")[0]
    stamp = (project.root / project.places.made(job)).stat().st_mtime_ns
    make_all(project)
    run_named(project, job.job_id, maker(project.root).machine, with_parents=False, again=False)
    assert "has a record" in capsys.readouterr().err
    assert (project.root / project.places.made(job)).stat().st_mtime_ns == stamp
    run_named(project, job.job_id, maker(project.root).machine, with_parents=False, again=True)
    assert (project.root / project.places.made(job)).stat().st_mtime_ns > stamp


def test_an_unknown_name_is_refused_with_the_nearest(project):
    with pytest.raises(SpecError, match="unknown job, table or figure 'toy_tabel1'; did you mean 'toy_table1'"):
        run_named(project, "toy_tabel1", maker(project.root).machine, with_parents=False, again=False)


def test_only_a_scale_of_gpus_counts_this_machines_cards(monkeypatch):
    monkeypatch.setattr("paperlm.plan.state.visible_gpus", lambda: ["0", "1"])
    found = {scale: State(Project({"scale": scale})).gpus for scale in ("smoke", "tiny", "gpu", "paper")}
    assert found == {"smoke": [], "tiny": [], "gpu": ["0", "1"], "paper": ["0", "1"]}
