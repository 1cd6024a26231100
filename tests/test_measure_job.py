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
from paperlm.locks import held

ROW = {name: kind() if isinstance(kind, type) else None for name, kind in rows.NEEDED.items()} | {"name": "whole"}
HALF, WHOLE = '{"name": "ha', json.dumps(sealed(ROW)) + "\n"


def names(out: Path) -> list[str]:
    return [row["name"] for row in rows.read(out)]


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
    assert measure(out) == 0 and names(out) == ["whole"]


@pytest.mark.parametrize(("status", "returned"), [(0, 0), (1, 0), (2, 2)])
def test_a_method_that_failed_is_a_row_and_an_unknown_name_is_a_failure(tmp_path, monkeypatch, status, returned):
    out = tmp_path / "case.jsonl"
    monkeypatch.setattr(paperlm.bench, "main", writes(WHOLE, status))
    assert measure(out) == returned and out.exists() == (returned == 0)


def test_the_second_process_waits_and_keeps_the_rows_of_the_first(tmp_path, monkeypatch):
    out = tmp_path / "case.jsonl"
    monkeypatch.setattr(paperlm.bench, "main", writes(WHOLE))
    with held(tmp_path / ".case.jsonl.lock", "the first"):
        second = threading.Thread(target=measure, args=(out,))
        second.start()
        second.join(1.0)
        assert second.is_alive() and not out.exists()
        out.write_text("first\n")
    second.join(10.0)
    assert out.read_text() == "first\n"


def test_every_row_says_how_long_the_case_took_with_all_its_methods(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "monotonic", iter([100.0, 142.5]).__next__)
    monkeypatch.setattr(paperlm.bench, "main", writes(WHOLE * 2))
    assert measure(out := tmp_path / "case.jsonl") == 0
    assert rows.read(out) == [ROW | {"case_seconds": 42.5}] * 2
