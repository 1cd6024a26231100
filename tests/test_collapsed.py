"""Numbers of models whose training collapsed say so, wherever they stand."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import copy_declarations
from support_tables import pretrained, record_of

from paperlm.figures.base import labels_of
from paperlm.jobs import Job
from paperlm.plan.project import Project
from paperlm.record.record import write_record
from paperlm.tables.build import table_contents
from paperlm.tables.results import Ancestors

UNIGRAM = 1400.0
"What `pretrained` writes into its records."
SAYS = "learned how frequent tokens are and no more"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Project:
    return Project({"scale": "gpu"}, copy_declarations(tmp_path_factory.mktemp("root")))


def put(project: Project, job: Job, record) -> Path:
    path = project.root / project.places.committed(job)
    write_record(path, record)
    return path


def trained(project: Project, name: str, ppl: dict[str, float]) -> dict[str, Job]:
    """Row -> the exhibit's job, whose training has a record with that perplexity."""
    found = {}
    for cell in project.cells(name):
        for row, value in ppl.items():
            if row in cell.row and row not in found:
                found[row] = cell.jobs[0]
                (first,) = (job for job in cell.jobs[0].ancestors() if job.kind == "pretrain")
                put(project, first, pretrained(first, value))
    return found


def test_a_table_says_which_of_its_numbers_are_of_models_that_collapsed(project):
    """Fine-tuned ones too, two steps behind the training; at nine tenths of the unigrams' perplexity a model counts."""
    ppl = {"130M, Post-LN": 0.901 * UNIGRAM, "130M, Mix-LN": 0.899 * UNIGRAM}
    jobs = trained(project, "mixln_table2", ppl)
    paths = [
        put(project, job, record_of(job, {metric: 0.5 for metric in job.metrics() if "/acc" in metric}))
        for job in jobs.values()
    ]
    contents = table_contents(project, "mixln_table2", paths)
    said = {row: contents.cells[f"LLaMA-{row}", "BoolQ"].labels for row in ppl}
    assert f"{SAYS} (perplexity 1261.4, unigrams' 1400)" in said["130M, Post-LN"]
    assert SAYS not in said["130M, Mix-LN"]


def test_the_first_thing_under_a_figure_is_which_of_its_models_collapsed(project):
    jobs = trained(project, "mixln_figure5", {"Pre-LN": 40.0, "Post-LN": 1500.0})
    paths = [put(project, job, record_of(job)) for job in jobs.values()]
    first, *others = labels_of(project, "mixln_figure5", paths)
    assert first.startswith("Post-LN: ") and SAYS in first and not any(SAYS in label for label in others)


def test_of_a_state_before_the_end_nothing_is_said(project):
    job = next(job for job in project.jobs_of("lns_figure1") if job.snapshot("of") is not None)
    put(project, job.of, pretrained(job.of, 1500.0))
    assert Ancestors(project).collapsed(job) == []
    assert SAYS in "".join(Ancestors(project).collapsed(job.model_copy(update={"at": "end"})))


def test_without_a_record_of_the_training_nothing_is_said(tmp_path):
    project = Project({"scale": "gpu"}, copy_declarations(tmp_path))
    assert Ancestors(project).collapsed(project.jobs_of("mixln_table2")[0]) == []
