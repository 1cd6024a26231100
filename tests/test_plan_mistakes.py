"""Mistakes in an exhibit's declaration that are refused when the project is opened, without a traceback."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from support_tables import edited

from paperlm.errors import SpecError
from paperlm.plan.project import Project
from paperlm.plan.table import CaseSpec, Predicted


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


@pytest.mark.parametrize("field", ["weights", "sequences", "length", "tokens", "vocab"])
def test_a_case_of_nothing_is_refused(field):
    with pytest.raises(ValidationError, match=rf"{field}\n +Input should be greater than 0"):
        CaseSpec(model="LLaMA-71M", source="a test", **{field: 0})


def test_a_theory_may_say_one_cell():
    one = Predicted(rows=["A"], columns=["B"], within=0.1, why="a theorem")
    assert (one.rows, one.columns) == (["A"], ["B"])
    for empty in ({"rows": []}, {"columns": []}):
        with pytest.raises(ValidationError, match="at least 1 item"):
            Predicted(**{"rows": ["A"], "columns": ["B"], "within": 0.1, "why": "a theorem", **empty})
