"""A number here where the paper ran out of memory: outcomes are compared, and of models of another size not at all."""

from __future__ import annotations

import pytest
from support_tables import record_of

from paperlm.plan.project import Project
from paperlm.record.record import write_record
from paperlm.tables.build import table_contents

GIB = 2**30


def cell(folder, scale, table, row, column, metric, gib):
    """The cell of a table of which this one record is there."""
    project = Project({"scale": scale})
    (job,) = next(c.jobs for c in project.cells(table) if (c.row, c.column) == (row, column))[:1]
    path = folder / f"{job.job_id}.json"
    write_record(path, record_of(job, dict.fromkeys(job.metrics(), 1.0) | {metric: gib * GIB}))
    return table_contents(project, table, [path]).cells[row, column]


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_a_count_of_the_printed_model_is_held_against_the_memory_of_the_papers_card(scale, tmp_path):
    row, column = "Vanilla", "Yi-1.5 34B Mem"
    for gib, verdict, said in ((64.05, "out of memory as published", "more than"), (47.4, "differs", "not more than")):
        found = cell(tmp_path, scale, "neuzip_table3a_full", row, column, "weight_bytes", gib)
        assert found.verdict == verdict and said in found.reason and "47.5" in found.reason


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_a_smaller_model_says_nothing_about_whether_the_printed_one_fits(scale, tmp_path):
    for gib in (0.9, 60.0):
        found = cell(tmp_path, scale, "neuzip_table3a", "Vanilla", "Yi-1.5 34B Mem", "weight_bytes", gib)
        assert found.verdict == "not comparable at this scale" and found.published == "OOM"


def test_a_measured_number_at_the_published_scale_differs_from_out_of_memory(tmp_path):
    found = cell(tmp_path, "paper", "neuzip_table3a", "Vanilla", "Yi-1.5 34B Mem", "weight_bytes", 40.0)
    assert found.verdict == "differs" and "out of memory in the paper" in found.reason
