"""A number that an exhibit shows changes its digest, so that Snakemake builds it again; another one does not."""

from __future__ import annotations

import pytest
from support_tables import edited

from paperlm.plan.project import Project
from paperlm.plan.workflow import Workflow

EDITS = [
    ("mixln", "mixln_table7", lambda p: p["sizes"]["7B"]["jobs"]["pretrain"]["steps"].update(value=14000)),
    ("mixln", "mixln_table7", lambda p: p["tables"]["mixln_table7"]["constants"]["real_tokens"].update(value=200)),
    ("mixln", "mixln_table1", lambda p: p["sizes"]["71M"]["values"]["published_batches"].update(value=400)),
    ("cce", "cce_tableA3", lambda p: p["models"]["Gemma 2 (2B)"].update(vocab=256001)),
    ("cce", "cce_table1", lambda p: p["cases"]["gemma2_2b"].update(tokens=4096)),
    ("cce", "cce_table1", lambda p: p["cases"]["tiny_cpu"].update(tokens=512)),
    ("cce", "cce_tableA1", lambda p: p["cases"]["gemma2_2b_invalids"].update(counting=0.5)),
    ("cce", "cce_figure1a", lambda p: p["models"]["Gemma 2 (2B)"].update(layers=27)),
]


@pytest.mark.parametrize(("paper", "exhibit", "edit"), EDITS)
def test_a_changed_number_rebuilds_the_exhibit_that_shows_it_and_leaves_another_alone(tmp_path, paper, exhibit, edit):
    root = edited(tmp_path, paper, edit)
    before, after = (Workflow(Project({"scale": "tiny"}, r)) for r in (Project().root, root))
    assert before.exhibit_digest(exhibit) != after.exhibit_digest(exhibit)
    assert before.exhibit_digest("lns_figure1") == after.exhibit_digest("lns_figure1")
