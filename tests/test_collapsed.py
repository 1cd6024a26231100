"""Numbers of models whose training collapsed say so, in tables and under figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import copy_declarations
from support_tables import pretrained, record_of

from paperlm.figures.base import labels_of
from paperlm.jobs import Job
from paperlm.plan.project import Cell, Project
from paperlm.plan.state import State
from paperlm.record.record import write_record
from paperlm.tables.build import table_contents

UNIGRAM = 1400.0
"What `pretrained` writes into its records."
SAYS = "pre-training ended no better than token frequencies"


@pytest.fixture
def project(tmp_path) -> Project:
    return Project({"scale": "gpu", "seeds": [0, 1], "run_missing": "no"}, copy_declarations(tmp_path))


def put(project: Project, job: Job, record, committed: bool = True) -> None:
    place = project.places.committed(job) if committed else project.places.made(job)
    write_record(project.root / place, record)


def training(job: Job) -> Job:
    (first,) = (one for one in job.worked_on() if one.kind == "pretrain")
    return first


def cell_of(project: Project, name: str, row: str, column: str = "") -> Cell:
    return next(c for c in project.cells(name) if row in c.row and column in (c.column, ""))


def answered(project: Project, job: Job) -> None:
    put(project, job, record_of(job, {metric: 0.5 for metric in job.metrics() if "/acc" in metric}))


def inputs(project: Project, name: str) -> list[Path]:
    return [project.root / path for path in State(project).records(name)]


def labels(project: Project, row: str) -> str:
    contents = table_contents(project, "mixln_table2", inputs(project, "mixln_table2"))
    return contents.cells[f"LLaMA-{row}", "BoolQ"].labels


def test_a_table_says_which_of_its_numbers_are_of_models_that_collapsed(project):
    """Fine-tuned ones too, two steps behind the training; at nine tenths of the unigrams' perplexity it has. Records
    that were made here say it as committed ones do."""
    for row, value, committed in (
        ("130M, Post-LN", 0.901, True),
        ("130M, Mix-LN", 0.899, True),
        ("71M, Pre-LN", 9, False),
    ):
        for job in cell_of(project, "mixln_table2", row, "BoolQ").jobs:
            put(project, training(job), pretrained(training(job), value * UNIGRAM), committed)
            answered(project, job)
    assert f"{SAYS} in 2 of 2 seeds (perplexity 1261.4, 1261.4, unigrams 1400)" in labels(project, "130M, Post-LN")
    assert SAYS not in labels(project, "130M, Mix-LN")
    assert f"{SAYS} in 2 of 2 seeds (perplexity 12600, 12600, unigrams 1400)" in labels(project, "71M, Pre-LN")


def test_seeds_that_collapsed_are_counted(project):
    for job, value in zip(cell_of(project, "mixln_table2", "71M, Post-LN", "BoolQ").jobs, (40.0, 1500.0), strict=True):
        put(project, training(job), pretrained(training(job), value))
        answered(project, job)
    assert f"{SAYS} in 1 of 2 seeds (perplexity 1500, unigrams 1400)" in labels(project, "71M, Post-LN")


def test_the_first_thing_under_a_figure_is_which_of_its_models_collapsed(project):
    for row, value in (("Pre-LN", 40.0), ("Post-LN", 1500.0)):
        job = cell_of(project, "mixln_figure5", row).jobs[0]
        put(project, training(job), pretrained(training(job), value))
        put(project, job, record_of(job))
    first, *others = labels_of(project, "mixln_figure5", inputs(project, "mixln_figure5"))
    assert first == f"Post-LN: {SAYS} (perplexity 1500, unigrams 1400)"
    assert not any(SAYS in label for label in others)


def test_a_judge_that_collapsed_is_no_model_of_the_policy(project):
    """A row's model is what its field `of` leads to; a reward model serves all rows."""
    job = cell_of(project, "mixln_table3", "Mix-LN").jobs[0]
    assert {one.kind for one in job.ancestors()} > {one.kind for one in job.worked_on()}
    assert [one.norm["name"] for one in job.worked_on() if one.kind == "pretrain"] == ["mix_ln"]


def test_behind_a_state_before_the_end_no_training_is_named(project):
    job = next(job for job in project.jobs_of("lns_figure1") if job.snapshot("of") is not None)
    assert list(job.worked_on()) == []
    assert list(job.model_copy(update={"at": "end"}).worked_on()) == [job.of]


def test_a_record_of_the_training_is_an_input_so_that_a_table_is_built_again_when_it_comes(project):
    job = cell_of(project, "mixln_table2", "130M, Post-LN").jobs[0]
    answered(project, job)
    path = project.root / project.places.committed(training(job))
    assert path not in inputs(project, "mixln_table2")
    put(project, training(job), pretrained(training(job), 1500.0))
    assert path in inputs(project, "mixln_table2")


def test_what_is_made_for_a_table_is_an_input_of_it_before_and_after(tmp_path):
    """Else a second call would build the table once more."""
    root = copy_declarations(tmp_path)
    project = Project({"scale": "tiny"}, root)
    name, before = "mixln_table2", State(project).records("mixln_table2")
    (job,) = cell_of(project, name, "250M, Post-LN").jobs
    assert project.places.made(training(job)) in before
    for one in (job, *job.worked_on()):
        write_record(
            root / project.places.made(one), pretrained(one, 50.0) if one.kind == "pretrain" else record_of(one)
        )
    after = State(Project({"scale": "tiny"}, root)).records(name)
    assert sorted(after) == sorted(before)
