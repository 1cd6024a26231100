"""Random damage ends in an error of ours or in the same numbers, and what judges that sees each other end.

`support_fuzz.py` says what is damaged and how a try ends; `make fuzz` takes thousands.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import support_fuzz
from support_fuzz import Stage, alone, judged, sentence
from test_kills import visible

from paperlm.errors import DataError
from paperlm.plan.project import ROOT

SCRIPT = Path(__file__).with_name("support_fuzz.py")

QUICK = ("records", "measurements", "printed", "estimates", "packed", "declarations", "jobs")
"Those that are laid out in seconds."


def fuzzed(out: Path, *arguments: str, environment: dict[str, str] | None = None) -> dict:
    """The counts of a run, in a process of its own: its children are forked, and a process with threads must not."""
    command = [sys.executable, str(SCRIPT), "--out", str(out), *arguments]
    done = subprocess.run(command, env=environment or visible(), capture_output=True, text=True, timeout=1200)
    assert out.is_file(), done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert done.returncode == bool(found["faults"]), done.stdout + done.stderr
    return found


def test_random_damage_ends_in_an_error_of_ours_or_in_the_same_numbers(tmp_path):
    found = fuzzed(tmp_path / "found.json", "--tries", "60", "--seed", "3", "--stages", *QUICK)
    assert found["faults"] == [] and found["tries"] == 60
    assert found["ends"]["refused"] >= 20


def test_a_checksum_that_is_not_compared_is_found_out(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import paperlm.files as files\nfiles.is_sealed = lambda value: True\n")
    found = fuzzed(
        tmp_path / "found.json", "--tries", "40", "--seed", "3", "--stages", "jobs", environment=visible(tmp_path)
    )
    assert {"another number", "traceback"} & {fault["end"] for fault in found["faults"]}


def test_a_try_depends_on_its_seed_and_number_alone(tmp_path):
    both = fuzzed(tmp_path / "both.json", "--only", "5", "6", "--seed", "3", "--stages", "declarations")
    again = fuzzed(tmp_path / "again.json", "--only", "6", "--seed", "3", "--stages", "declarations")
    assert set(again["damages"]) <= set(both["damages"])
    assert again["stages"]["declarations"].keys() <= both["stages"]["declarations"].keys()


def test_tries_that_were_made_are_kept_and_count_with_those_of_a_later_call(tmp_path):
    state, asked = tmp_path / "tries.jsonl", ("--seed", "3", "--stages", "declarations", "--state")
    first = fuzzed(tmp_path / "first.json", "--tries", "3", *asked, str(state))
    before = state.read_text()
    both = fuzzed(tmp_path / "both.json", "--tries", "5", *asked, str(state))
    assert state.read_text().startswith(before) and [first["tries"], both["tries"]] == [3, 5]
    assert sorted(json.loads(line)["number"] for line in state.read_text().splitlines()) == [0, 1, 2, 3, 4]
    at_once = fuzzed(tmp_path / "at_once.json", "--tries", "5", *asked[:-1])
    assert {name: at_once[name] for name in ("ends", "damages")} == {name: both[name] for name in ("ends", "damages")}


def test_the_documents_say_what_the_tries_came_to():
    found = json.loads((ROOT / "docs/reference/fuzz.json").read_text())
    assert sentence(found) in " ".join((ROOT / "docs/scales_and_clusters.md").read_text().split())
    assert found["tries"] == sum(found["ends"].values()) and found["faults"] == []


def refusal(folder: Path, name: str) -> None:
    from paperlm.cli import main

    def refuse(options: object) -> None:
        raise DataError(f"{folder / name}: truncated; delete it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paperlm.cli._plan", refuse)
        raise SystemExit(main(["plan"]))


def silent(folder: Path, name: str) -> None:
    print("error: something is wrong", file=sys.stderr)
    raise SystemExit(2)


ENDS = {
    "refused": refusal,
    "same": lambda folder, name: 7,
    "another number": lambda folder, name: 8,
    "traceback": lambda folder, name: 1 / 0,
    "names no file": silent,
    "hang": lambda folder, name: time.sleep(60),
    "crashed: signal 6": lambda folder, name: os.abort(),
    "ended in 3": lambda folder, name: sys.exit(3),
    "executed": lambda folder, name: (folder / f"{name}.executed").touch(),
}


@pytest.mark.parametrize("end", ENDS)
def test_each_end_of_a_try_is_told_from_the_others(tmp_path, monkeypatch, end):
    monkeypatch.setattr(support_fuzz, "LIMIT", 0.5 if end == "hang" else 30)
    root, folder = tmp_path / "root", tmp_path / "try"
    for place in (root, folder):
        place.mkdir()
        (place / "damaged.json").write_text(place.name)
    stage = Stage("toy", root, ["damaged.json"], ENDS[end], lambda name: root / name)
    done = alone(lambda: stage.run(folder, "damaged.json"), folder)
    assert judged(stage, "damaged.json", "emptied", done, 7, folder) == end


def test_a_file_that_is_whole_again_was_made_again(tmp_path):
    stage = Stage("toy", tmp_path, ["a"], ENDS["same"], lambda name: tmp_path / name)
    (tmp_path / "a").write_text("")
    assert judged(stage, "a", "emptied", support_fuzz.Done(0, "", 7), 7, tmp_path) == "made again"
