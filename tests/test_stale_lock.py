"""The lock of a killed Snakemake: broken when every process that was noted is gone, and then the command goes on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support_workflow import SMOKE, clone_environment, snakemake, toy_clone

from paperlm.plan.stale_lock import NOTE, _started, break_stale_lock

HERE = socket.gethostname()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Snakemake's folder with a lock and a mark of an incomplete output."""
    for name in ("locks/0.output.lock", "incomplete/abc"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("results/x\n")
    return tmp_path


def note(folder: Path, *entries: object) -> None:
    (folder / NOTE).write_text(json.dumps(entries))


def noted(folder: Path) -> list:
    return json.loads((folder / NOTE).read_text())


def locked(folder: Path) -> bool:
    return any((folder / "locks").iterdir())


@pytest.fixture
def gone() -> int:
    """Number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_lock_whose_process_is_gone_is_broken_with_its_marks_and_this_process_is_noted(folder, gone):
    note(folder, [HERE, gone, 12345])
    assert break_stale_lock(folder)
    assert not locked(folder) and not (folder / "incomplete").exists()
    assert noted(folder) == [[HERE, os.getpid(), _started(os.getpid())]]


def test_a_lock_is_kept_while_one_of_the_noted_processes_lives(folder, gone):
    living = subprocess.Popen(["sleep", "60"])
    try:
        note(folder, [HERE, gone, 1], [HERE, living.pid, _started(living.pid)])
        assert not break_stale_lock(folder) and locked(folder) and (folder / "incomplete/abc").exists()
        assert [HERE, living.pid, _started(living.pid)] in noted(folder), "it is still known to the next call"
    finally:
        living.kill()
        living.wait()
    assert break_stale_lock(folder) and not locked(folder)


def test_a_number_that_was_given_to_another_process_is_no_living_process(folder):
    other = subprocess.Popen(["sleep", "60"])
    try:
        note(folder, [HERE, other.pid, _started(other.pid) - 7])
        assert break_stale_lock(folder)
    finally:
        other.kill()
        other.wait()


def test_a_lock_of_another_host_is_left_to_snakemakes_own_message(folder, gone):
    note(folder, ["another-host", 1, 1], [HERE, gone, 1])
    assert not break_stale_lock(folder) and locked(folder)
    assert ["another-host", 1, 1] in noted(folder)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", "[[1]]", '[["a", "b", "c"]]', "7"])
def test_a_lock_without_a_readable_note_is_left_alone(folder, text):
    if text is not None:
        (folder / NOTE).write_text(text)
    assert not break_stale_lock(folder) and locked(folder)


def test_without_a_lock_only_this_process_is_noted(tmp_path, gone):
    folder = tmp_path / ".snakemake"
    assert not break_stale_lock(folder)
    note(folder, [HERE, gone, 1], ["another-host", 1, 1])
    assert not break_stale_lock(folder)
    assert [entry[:2] for entry in noted(folder)] == [[HERE, os.getpid()]], "notes do not pile up"


def test_of_two_that_start_at_once_both_are_noted(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from paperlm.plan.stale_lock import break_stale_lock\n"
        "break_stale_lock(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    root = Path(__file__).parents[1]
    many = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path], env=clone_environment(root), **pipe) for _ in range(6)
    ]
    for process in many:
        process.stdout.readline()
    try:
        assert {entry[1] for entry in noted(tmp_path)} == {process.pid for process in many}
    finally:
        for process in many:
            process.communicate()


def test_after_a_killed_snakemake_the_same_command_goes_on(tmp_path):
    clone = toy_clone(tmp_path / "clone")
    paper = clone / "workflow/papers/toy.yaml"
    paper.write_text(paper.read_text().replace("{value: 4, source: a toy}", "{value: 60, source: a toy}"))
    target = "paper_tables/toy_table2.csv"
    command = [sys.executable, "-m", "snakemake", "--cores", "2", target, *SMOKE]
    out = (tmp_path / "out").open("w")
    environment = clone_environment(clone, TOY_PAUSE="0.25")
    process = subprocess.Popen(command, cwd=clone, env=environment, stdout=out, stderr=out, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (counts := list((clone / "results/smoke/work").glob("*/count.json"))):
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "out").read_text()
        time.sleep(0.05)
    time.sleep(0.5)
    process.kill()
    process.wait()
    assert any((clone / ".snakemake/locks").iterdir()), "a killed Snakemake leaves its lock"
    before = counts[0].read_text()
    said = snakemake(clone, target, *SMOKE)
    assert "LockException" not in said and "IncompleteFiles" not in said
    assert (clone / target).read_text().splitlines()[1].endswith("60.00") and int(before) < 60
    (record,) = (clone / "results/smoke/toy_model").glob("*.json")
    assert json.loads(record.read_text())["metrics"]["count"] == 60
    assert "Nothing to be done" in snakemake(clone, target, *SMOKE)
