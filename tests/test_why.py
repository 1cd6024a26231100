"""`paperlm why`: what differs between two records of one job is all said, also where its settings are the same."""

from __future__ import annotations

import pytest

from paperlm.plan.project import ROOT
from paperlm.plan.why import differences
from paperlm.record.record import read_record

KEPT = ROOT / "paper_tables/records/gpu/pretrain/llama_71m-admin-s0-3a13e1ff.json"


@pytest.fixture(scope="module")
def record():
    return read_record(KEPT)


def said(record, **changed):
    other = record.model_copy(update=changed)
    return differences((record.value(), record), (record.value(), other))


def test_a_record_does_not_differ_from_itself(record):
    assert said(record) == {}


def test_other_data_than_todays_settings_name_are_said(record):
    (one,) = record.data[:1]
    other = one.model_copy(update={"data_id": "other", "checksums": one.checksums | {"files": {"train": ["0"]}}})
    found = said(record, data=[other, *record.data[1:]])
    assert found["data", one.dataset] == (one.data_id, "other") and ("data", f"{one.dataset}: files") in found


@pytest.mark.parametrize(
    ("name", "value", "group"),
    [
        ("labels", ["leaks the future"], "result"), ("reason", "broken", "result"),
        ("weights", {"a": "f" * 12}, "weights"), ("standard_errors", {"ppl": 0.5}, "standard error"),
        ("versions", {"task": "9"}, "version"),
    ],
)  # fmt: skip
def test_what_else_a_record_holds_is_compared(record, name, value, group):
    assert group in {found for found, _ in said(record, **{name: value})}


def test_another_curve_and_other_choices_of_the_machine_are_said(record):
    name, series = next(iter(record.series.items()))
    rows = [[value * 1.01 if isinstance(value, float) else value for value in row] for row in series.rows]
    found = said(
        record, series=record.series | {name: series.model_copy(update={"rows": rows})},
        cost=record.cost.model_copy(update={"world_size": 8, "compiled": not record.cost.compiled, "micro_batch": 3}),
    )  # fmt: skip
    choices = {("machine's choice", key) for key in ("world_size", "compiled", "micro_batch")}
    assert found.keys() == {("series", name)} | choices
