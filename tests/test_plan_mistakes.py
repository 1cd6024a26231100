"""Mistakes in an exhibit's declaration that are refused when the project is opened, without a traceback."""

from __future__ import annotations

import pytest
from support_tables import edited

from paperlm.errors import SpecError
from paperlm.plan.project import Project


def along(**changes: object):
    return lambda p: p["figures"]["lns_figure1"]["along"].update(changes)


def averages_itself(p: dict) -> None:
    p["tables"]["mixln_table2"]["columns"]["Avg."]["mean_of"].append("Avg.")


@pytest.mark.parametrize(
    ("paper", "exhibit", "edit", "message"),
    [
        ("lns", "lns_figure1", along(share="1/0"), "share 1/0 is no part of a run"),
        ("lns", "lns_figure1", along(share="3/2"), "share 3/2 is no part of a run"),
        ("lns", "lns_figure1", along(points={"smoke": 0}), "points: give at least one"),
        ("lns", "lns_figure1", along(points={"smoke": 1}), "neither tiny nor default"),
        ("mixln", "mixln_table2", averages_itself, "mean_of names 'Avg.', which is a mean itself"),
    ],
)
def test_a_mistake_in_columns_is_refused_with_the_fix(tmp_path, paper, exhibit, edit, message):
    root = edited(tmp_path, paper, edit)
    with pytest.raises(SpecError, match=message):
        Project({"scale": "tiny"}, root).cells(exhibit)
