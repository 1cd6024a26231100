"""A job that is killed, or whose disk fills up, at a change to its files: the same command then ends in the same bytes.

`support_kills.py` says what is made and what counts as a change; `make kills` goes through every one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import job_environment
from support_kills import sentence

from paperlm.jobs import job_kinds
from paperlm.plan.project import ROOT

SCRIPT = Path(__file__).with_name("support_kills.py")


def visible(*folders: Path) -> dict[str, str]:
    """Environment of a job in which the helpers of the tests can be imported."""
    environment = job_environment()
    places = [*map(str, folders), environment["PYTHONPATH"], str(SCRIPT.parent)]
    return environment | {"PYTHONPATH": os.pathsep.join(places)}


def survey(*arguments: str, environment: dict[str, str] | None = None) -> list[dict]:
    """Rows of a survey, in a process of its own: its children are forked, which a process with threads must not do."""
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, env=environment or visible(), capture_output=True, text=True, timeout=1200)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows, done.stderr
    assert done.returncode == any(row["fault"] for row in rows)
    return rows


@pytest.mark.parametrize("how", ["kill", "full"])
def test_a_job_that_dies_or_fills_the_disk_ends_in_the_same_bytes_when_started_again(how):
    rows = survey("--kind", "pretrain", "--how", how, "--sample", "7")
    assert len(rows) == 7 and rows[0]["of"] > 60
    assert [row for row in rows if row["fault"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("places", [10, pytest.param(30, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", ["kill", "full"])
def test_places_all_along_a_job_and_the_one_that_works_on_its_model(how, places):
    rows = survey("--kind", "block_removal", "--how", how, "--sample", str(places))
    assert len(rows) == places and rows[0]["of"] > 120
    assert [row for row in rows if row["fault"]] == []


@pytest.mark.slow
def test_a_place_in_the_middle_of_a_job_of_every_other_kind():
    kinds = sorted(set(job_kinds()) - {"pretrain", "block_removal"})
    rows = survey("--kind", *kinds, "--sample", "1")
    assert [row["kind"] for row in rows] == [kind for kind in kinds for _ in range(2)]
    assert [row for row in rows if row["fault"]] == []


def test_a_file_that_is_written_in_its_place_is_found_out(tmp_path):
    """The survey itself: without the neighbour that is renamed, a kill leaves an empty manifest."""
    (tmp_path / "sitecustomize.py").write_text(
        "import paperlm.files as files\n"
        "def in_place(path, write):\n"
        "    path.parent.mkdir(parents=True, exist_ok=True)\n"
        "    with path.open('wb') as file:\n"
        "        write(file)\n"
        "files.write_atomic = in_place\n"
    )
    rows = survey("--kind", "pretrain", "--how", "kill", "--part", "/manifest.json", environment=visible(tmp_path))
    assert any("manifest.json: truncated or altered" in row["fault"] for row in rows)


def test_the_documents_say_what_the_survey_counted():
    found = json.loads((ROOT / "docs/reference/kills.json").read_text())
    said = " ".join((ROOT / "docs/scales_and_clusters.md").read_text().split())
    assert sentence(found) in said and {one["kind"] for one in found} == {*job_kinds()}
    assert all(one["faults"] == [] and set(one["places"].values()) == {one["changes"]} for one in found)


def test_a_survey_that_left_out_places_or_found_faults_says_so():
    made = {"mended": [], "made with": {"packages": {"torch": "2"}}}
    two = [
        {"kind": "a", "changes": 9, "places": {"kill": 9, "full": 8}, "faults": [], **made},
        {"kind": "b", "changes": 2, "places": {"kill": 2, "full": 2}, "faults": [{}], **made, "mended": [{}, {}]},
    ]
    assert sentence(two) == (
        "Of 2 kinds a part of 11 changes was tried, with PyTorch 2: 11 kills and 10 full disks, 1 of b with another "
        "outcome or without a remedy. 2 more (b) were mended, and all of those kinds tried again."
    )
    assert sentence(two[1:]).startswith("Of 1 kinds each of 2 changes was tried, ")
