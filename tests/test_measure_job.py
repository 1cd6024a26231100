"""Measurements as jobs of the workflow: whole or absent, one process at a time."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from paperlm_kernels.bench import rows
from paperlm_kernels.seal import sealed

import paperlm.bench
from paperlm.bench import measure_case
from paperlm.errors import SpecError
from paperlm.locks import held

ROW = {name: kind() if isinstance(kind, type) else None for name, kind in rows.NEEDED.items()} | {
    "op": "cross_entropy", "case": "tiny_cpu", "name": "eager", "device": "cpu (one, 1 thread)", "scale": "small",
}  # fmt: skip
FIRST = {"method": "as the first process measured it"}


def text(**fields: str) -> str:
    """A row as it stands in a file."""
    return json.dumps(sealed(ROW | fields)) + "\n"


HALF, WHOLE = '{"name": "ha', text()


def names(out: Path) -> list[str]:
    return [row["name"] for row in rows.read(out)]


def methods(out: Path) -> list[str]:
    return [row["method"] for row in rows.read(out)]


def measure(out: Path) -> int:
    return measure_case("cross_entropy", "tiny_cpu", "eager", "cpu", "small", out)


def writes(text: str, status: int = 0, then: type[BaseException] | None = None):
    """In place of the benchmark's command line: append to its --out, then end."""

    def run(arguments: list[str]) -> int:
        with Path(arguments[arguments.index("--out") + 1]).open("a") as file:
            file.write(text)
        if then is not None:
            raise then
        return status

    return run


def test_a_killed_measurement_leaves_no_file_and_the_next_one_starts_anew(tmp_path, monkeypatch):
    out = tmp_path / "case.jsonl"
    monkeypatch.setattr(paperlm.bench, "main", writes(HALF, then=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        measure(out)
    assert not out.exists()
    monkeypatch.setattr(paperlm.bench, "main", writes(WHOLE))
    assert measure(out) == 0 and names(out) == ["eager"]


@pytest.mark.parametrize(("status", "returned"), [(0, 0), (1, 0), (2, 2)])
def test_a_method_that_failed_is_a_row_and_an_unknown_name_is_a_failure(tmp_path, monkeypatch, status, returned):
    out = tmp_path / "case.jsonl"
    monkeypatch.setattr(paperlm.bench, "main", writes(WHOLE, status))
    assert measure(out) == returned and out.exists() == (returned == 0)


@pytest.mark.parametrize(
    ("first", "kept"),
    [
        ({}, True),
        ({"name": "ours"}, False),
        ({"scale": "full"}, False),
        ({"device": "NVIDIA H200"}, False),
    ],
)
def test_the_second_process_waits_and_keeps_the_rows_of_the_first_if_they_are_what_it_was_asked_for(
    tmp_path, monkeypatch, first, kept
):
    out = tmp_path / "case.jsonl"
    monkeypatch.setattr(paperlm.bench, "main", writes(WHOLE))
    with held(tmp_path / ".case.jsonl.lock", "the first"):
        second = threading.Thread(target=measure, args=(out,))
        second.start()
        second.join(1.0)
        assert second.is_alive() and not out.exists()
        out.write_text(text(**FIRST, **first))
    second.join(10.0)
    assert methods(out) == ([FIRST["method"]] if kept else [""])


def test_a_file_with_rows_of_other_cases_or_of_none_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(paperlm.bench, "main", writes(WHOLE))
    out = tmp_path / "case.jsonl"
    for found, message in (
        (text(case="gemma2_2b") + WHOLE, "has rows of cross_entropy, gemma2_2b, which would be lost: name another"),
        (text(op="neuzip"), "has rows of neuzip, tiny_cpu, which"),
        (HALF, "not a row of JSON.*name another --out"),
    ):
        out.write_text(found)
        with pytest.raises(SpecError, match=message):
            measure(out)
        assert out.read_text() == found
    out.write_text(text(**FIRST))
    assert measure(out) == 0 and methods(out) == [""], "older rows of the case are"


def test_a_group_of_cases_is_refused_with_the_cases_that_it_has(tmp_path):
    with pytest.raises(SpecError, match="documented is a group of cases; name one of them: 71M, 130M, "):
        measure_case("pretrain", "documented", "", "cpu", "small", tmp_path / "rows.jsonl")


def test_every_row_says_how_long_the_case_took_with_all_its_methods(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "monotonic", iter([100.0, 142.5]).__next__)
    monkeypatch.setattr(paperlm.bench, "main", writes(WHOLE * 2))
    assert measure(out := tmp_path / "case.jsonl") == 0
    assert rows.read(out) == [ROW | {"case_seconds": 42.5}] * 2
