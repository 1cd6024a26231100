"""Which training of a job a record is of: digests of weights in manifests and records."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from paperlm.files import write_sealed
from paperlm.plan.project import Project
from paperlm.record.model_store import KEYS, MANIFEST, WHAT, Origin, store_model, weights_of


@pytest.fixture(scope="module")
def jobs():
    """Two that leave models."""
    return Project({"scale": "tiny"}).jobs_of("mixln_table1")[:2]


def stored(folder, job, value, origin=None, config="{}"):
    """A model folder with one weight of this value, and a trunk's file beside it."""
    building = folder / "building"
    (building / "trunk-2").mkdir(parents=True)
    save_file({"w": torch.full((3,), value)}, building / "model.safetensors")
    save_file({"w": torch.full((3,), value - 1)}, building / "trunk-2" / "model.safetensors")
    (building / "config.json").write_text(config)
    store_model(building, folder / "model", job, "trained", origin or Origin())
    return folder / "model"


def test_two_trainings_of_a_job_have_two_digests_and_other_files_make_no_difference(tmp_path, jobs):
    job = jobs[0]
    first, same, other = (
        weights_of(stored(tmp_path / name, job, value, config=config), job)
        for name, value, config in (("a", 1.0, "{}"), ("b", 1.0, '{"library": "later"}'), ("c", 2.0, "{}"))
    )
    assert set(first) == {job.job_id} and first == same != other


def test_a_model_knows_the_digests_of_what_it_was_made_from(tmp_path, jobs):
    trunk, branch = jobs
    of_trunk = weights_of(stored(tmp_path / "trunk", trunk, 1.0), trunk)
    found = weights_of(stored(tmp_path / "branch", branch, 5.0, Origin(weights=of_trunk)), branch)
    assert found[trunk.job_id] == of_trunk[trunk.job_id] != found[branch.job_id] and len(found) == 2


def test_a_manifest_that_is_older_than_digests_gives_its_own_alone(tmp_path, jobs):
    job = jobs[0]
    folder = stored(tmp_path, job, 1.0, Origin(weights={"trunk": "abc"}))
    before = weights_of(folder, job)
    manifest = json.loads((folder / MANIFEST).read_text())
    write_sealed(folder / MANIFEST, WHAT, {key: manifest[key] for key in KEYS})
    assert before.pop("trunk") == "abc" and weights_of(folder, job) == before


def test_a_job_that_left_no_tensors_has_no_digest(tmp_path, jobs):
    job = jobs[0]
    store_model(tmp_path / "building", tmp_path / "model", job, "not_finite", Origin())
    assert weights_of(tmp_path / "model", job) == {}
