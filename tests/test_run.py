"""Making jobs: locks, inputs checked, models with manifests, records, and a comparison with the committed record."""

from __future__ import annotations

import gc
import json
import operator
import shutil
import time
import weakref
from pathlib import Path

import pytest
import torch
from support_jobs import commit, folder_of, made, maker, model, number

from paperlm import run
from paperlm.errors import JobError, RecordError, SpecError
from paperlm.files import write_sealed
from paperlm.jobs import Inputs, Machine
from paperlm.plan.project import Project
from paperlm.record import environment, model_store
from paperlm.record.places import Places
from paperlm.run import run_named


@pytest.fixture(autouse=True)
def _toys(toy_kinds):
    """Every test here has the toy kinds."""


# -- a job, its record and its model ----


def test_a_job_and_its_parent_are_made_in_order_and_recorded(tmp_path):
    job = number(factor=2.5)
    maker(tmp_path).with_parents(job)
    record = made(tmp_path, job)
    assert record.outcome == "measured" and record.metrics == {"value": 7.5} and record.value() == job
    assert (record.kind, record.behaviour) == ("toy_number", {"toy_number": 1})
    assert record.ancestors == {model().job_id: {"toy_model": 1}}
    assert record.environment.device == "CPU" and record.cost.wall_seconds >= 0
    record = made(tmp_path, model())
    assert record.metrics == {"count": 3.0, "lost": None}, "what is no finite number is none"
    assert record.standard_errors == {"count": 0.5}, "and has no standard error"


def test_a_parent_whose_model_is_there_is_not_made_again(tmp_path):
    maker(tmp_path).with_parents(model())
    before = (folder_of(tmp_path, model()) / "manifest.json").stat().st_mtime_ns
    maker(tmp_path).with_parents(number())
    assert (folder_of(tmp_path, model()) / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("where", ["card", "CPU"])
def test_what_a_job_left_in_memory_is_gone_when_the_next_one_begins(where, tmp_path, monkeypatch):
    left, emptied, run_job = [], [], run.run_job
    if where == "card":
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(left)))
    else:
        monkeypatch.setattr(run, "LOOK_SECONDS", -1.0)

    class Kept:
        def __init__(self):
            self.itself = self

    def leaving(job, inputs, machine):
        assert not left or left[-1]() is None
        left.append(weakref.ref(Kept()))
        return run_job(job, inputs, machine)

    monkeypatch.setattr(run, "run_job", leaving)
    gc.disable()
    try:
        maker(tmp_path).with_parents(number())
    finally:
        gc.enable()
    assert len(left) == 2 and emptied == ([0, 1] if where == "card" else [])


def test_a_job_that_does_not_fit_on_the_card_leaves_a_record_that_says_so_and_another_error_none(
    tmp_path, monkeypatch, capsys
):
    def fails(error):
        def run_job(job, inputs, machine):
            raise error

        return run_job

    maker(tmp_path).with_parents(model())
    job = number()
    monkeypatch.setattr(run, "run_job", fails(RuntimeError("shapes do not fit")))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        maker(tmp_path).make(job)
    assert not Path(tmp_path / maker(tmp_path).places.made(job)).exists()
    short = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore words.")
    monkeypatch.setattr(run, "run_job", fails(short))
    maker(tmp_path).make(job)
    record = made(tmp_path, job)
    assert (record.outcome, record.metrics) == ("out_of_memory", {})
    assert "number-toy-s0" in (said := capsys.readouterr().err) and said.endswith("Tried to allocate 2 GiB.\n")
    # what is kept of unfinished work stays for another try
    kept = tmp_path / maker(tmp_path).places.work(job) / "half"
    kept.parent.mkdir(parents=True)
    kept.touch()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        maker(tmp_path).make(job, True)
    assert kept.is_file()
    # one of several processes says nothing: the others would wait for it
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        run._measured(job, Inputs(work=tmp_path), Machine(device="cpu"))


def test_a_record_names_the_code_of_the_jobs_start_and_says_if_another_took_its_place(tmp_path, monkeypatch):
    """Of the end it would name a commit that computed nothing of it."""
    now, begin = ["a", False], run.run_job
    monkeypatch.setattr(environment, "_git", lambda: (f"commit {now[0]}", now[1]))
    monkeypatch.setattr(environment, "source_digest", lambda: now[0])
    made_with = lambda: operator.attrgetter("commit", "modified", "source")(made(tmp_path, model()).environment)  # noqa: E731

    def edited(job, inputs, machine):
        (inputs.work / "half").touch()
        now[0] = "b"
        return begin(job, inputs, machine)

    maker(tmp_path).make(model())
    assert made_with() == ("commit a", False, "a")
    monkeypatch.setattr(run, "run_job", edited)
    maker(tmp_path).make(model(), True)
    assert made_with() == ("commit a", True, "a")

    def killed(job, inputs, machine):
        (inputs.work / "half").touch()
        raise KeyboardInterrupt

    def interrupted():
        monkeypatch.setattr(run, "run_job", killed)
        with pytest.raises(KeyboardInterrupt):
            maker(tmp_path).make(model(), True)
        monkeypatch.setattr(run, "run_job", begin)

    interrupted()
    maker(tmp_path).make(model(), True)
    assert made_with() == ("commit b", False, "b"), "it went on with the same code"
    interrupted()
    now[0] = "c"
    maker(tmp_path).make(model(), True)
    assert made_with() == ("commit c", True, "c"), "it went on from what other code had made"
    interrupted()
    for now[0] in ("d", "c"):
        interrupted()
    maker(tmp_path).make(model(), True)
    assert made_with() == ("commit c", True, "c"), "that another code worked on it between is not forgotten"


def test_a_model_that_did_not_fit_leaves_no_half_of_its_files(tmp_path, monkeypatch):
    def run_job(job, inputs, machine):
        (inputs.model / "half.bin").touch()
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(run, "run_job", run_job)
    maker(tmp_path).make(model())
    assert made(tmp_path, model()).outcome == "out_of_memory"
    assert {path.name for path in folder_of(tmp_path, model()).iterdir()} == {"manifest.json"}


def test_on_a_cpu_a_job_has_one_thread_unless_the_environment_says_another_number(tmp_path, monkeypatch):
    seen, run_job = [], run.run_job
    monkeypatch.setattr(run, "run_job", lambda *given: (seen.append(torch.get_num_threads()), run_job(*given))[1])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for set_by_hand, wanted in ((False, 1), (True, 3)):
            monkeypatch.setenv("OMP_NUM_THREADS", "3") if set_by_hand else monkeypatch.delenv("OMP_NUM_THREADS", False)
            maker(tmp_path).make(model(), True)
            assert (seen.pop(), made(tmp_path, model()).environment.threads) == (wanted, wanted)
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_short_jobs_on_a_cpu_do_not_look_through_the_heap_each(tmp_path, monkeypatch):
    looked = []
    monkeypatch.setattr(gc, "collect", lambda: looked.append(time.monotonic()))
    monkeypatch.setattr(run, "_looked", time.monotonic() - 2 * run.LOOK_SECONDS)
    for seed in range(3):
        maker(tmp_path / str(seed)).with_parents(number())
    assert len(looked) == 1, "of six jobs the first does"


def test_a_job_without_its_parents_model_is_refused_and_the_command_named(tmp_path):
    message = rf"no finished model of {model().job_id}; make it again .*run {model().job_id} --again --with-parents"
    with pytest.raises(JobError, match=message):
        maker(tmp_path).make(number())
    assert not (tmp_path / "results/smoke/toy_number").exists()


def test_the_manifest_is_written_last_and_names_every_file_with_its_checksum(tmp_path, monkeypatch):
    seen = []

    def note(path, what, content):
        assert content["files"].keys() == {
            str(p.relative_to(path.parent)) for p in path.parent.rglob("*") if p.is_file()
        }
        assert not folder_of(tmp_path, model()).exists(), "in its place when it is whole"
        seen.append(path.name)
        write_sealed(path, what, content)

    monkeypatch.setattr(model_store, "write_sealed", note)
    job = model()
    maker(tmp_path, keep={job.job_id: (1,)}).make(job)
    assert seen == ["manifest.json"]
    manifest = json.loads((folder_of(tmp_path, job) / "manifest.json").read_text())
    assert set(manifest["files"]) == {"config.json", "weights.bin", "at-1/config.json"}
    import hashlib

    assert manifest["files"]["weights.bin"] == hashlib.sha256(bytes(range(100))).hexdigest()


def truncate(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"\0")


def alter(folder: Path) -> None:
    content = bytearray((folder / "weights.bin").read_bytes())
    content[7] ^= 1
    (folder / "weights.bin").write_bytes(content)


def of_another_job(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    write_sealed(folder / "manifest.json", content["what"], content | {"job_id": "toy-s9-00000000"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"weights.bin: missing, truncated or altered; delete .*{job} and run {job} again"),
        (alter, r"weights.bin: missing, truncated or altered; delete .*{job} and run {job} again"),
        (lambda f: (f / "weights.bin").unlink(), r"weights.bin: missing, truncated or altered; delete .*{job}"),
        (
            lambda f: [(f / name).write_text("{}") for name in ("other.json", "more.json")],
            r"more.json: is not in the manifest, and would be read; remove it",
        ),
        (
            lambda f: (f / "manifest.json").write_text("{"),
            r"manifest.json: truncated or altered; delete .*{job} and make it again",
        ),
        (
            lambda f: (f / "manifest.json").write_text("{}"),
            r"manifest.json: has no checksum of itself: .*; delete .*{job} and make it again",
        ),
        (lambda f: (f / "manifest.json").unlink(), r"no finished model of {job}; make it again"),
        (of_another_job, r"is the model of toy-s9-00000000, not of {job}; delete it and make it again"),
    ],
)
def test_a_damaged_or_foreign_model_is_refused_by_file_with_the_remedy(tmp_path, damage, message):
    maker(tmp_path).make(model())
    damage(folder_of(tmp_path, model()))
    with pytest.raises(JobError, match=message.format(job=model().job_id)):
        maker(tmp_path).make(number())
    assert not (tmp_path / Places(tmp_path, "smoke").made(number())).exists()


def test_a_snapshot_is_kept_for_the_child_that_asks_for_it_and_no_other_serves(tmp_path):
    early, last = number(model(), at=1), number(model())
    maker(tmp_path).with_parents(early)
    assert made(tmp_path, early).metrics == {"value": 1.0}
    maker(tmp_path).with_parents(last)
    assert made(tmp_path, last).metrics == {"value": 3.0}
    with pytest.raises(JobError, match=r"holds no model after update 2; delete it and run toy-s0-"):
        maker(tmp_path).make(number(model(), at=2))
    maker(tmp_path).with_parents(number(model(), at=2))
    assert made(tmp_path, number(model(), at=2)).metrics == {"value": 2.0}


def test_a_parent_that_ended_without_a_model_makes_the_child_blocked_with_the_reason(tmp_path):
    parent = model(ends="not_finite")
    child = number(parent)
    maker(tmp_path).with_parents(child)
    assert made(tmp_path, parent).outcome == "not_finite"
    record = made(tmp_path, child)
    assert (record.outcome, record.metrics) == ("blocked", {})
    assert record.reason == f"{parent.job_id} ended as not finite: there is no model to work on"
    assert list(folder_of(tmp_path, parent).iterdir()) == [folder_of(tmp_path, parent) / "manifest.json"]


# -- the committed record ----


def test_a_job_that_is_made_again_and_says_the_same_passes(tmp_path):
    commit(tmp_path, model())
    maker(tmp_path).make(model())
    assert made(tmp_path, model()).metrics["count"] == 3


@pytest.mark.parametrize("error", ["1e-9", "nan"])
def test_a_job_that_contradicts_its_committed_record_is_an_error_and_its_record_kept_apart(
    tmp_path, monkeypatch, error
):
    path = commit(tmp_path, model())
    before = path.read_bytes()
    monkeypatch.setenv("TOY_ERROR", error)
    with pytest.raises(
        RecordError, match=rf"{model().job_id}: made again, and it contradicts .*count 3.0, now .*why tells"
    ):
        maker(tmp_path).make(model())
    places = Places(tmp_path, "smoke")
    assert not places.is_file(places.made(model())) and path.read_bytes() == before
    rejected = tmp_path / "results/smoke/toy_model" / f"{model().job_id}.rejected.json"
    assert json.loads(rejected.read_text())["job_id"] == model().job_id
    assert not folder_of(tmp_path, model()).exists(), "no child works on the model of a rejected job"
    monkeypatch.delenv("TOY_ERROR")
    maker(tmp_path).make(model())
    assert places.is_file(places.made(model()))


def test_a_record_that_was_rejected_is_taken_once_the_committed_one_is_deleted(tmp_path, monkeypatch):
    path = commit(tmp_path, model())
    monkeypatch.setenv("TOY_ERROR", "1")
    with pytest.raises(RecordError, match="delete the committed record and run the job again"):
        maker(tmp_path).make(model())
    path.unlink()
    maker(tmp_path).make(model())
    assert made(tmp_path, model()).metrics["count"] == 4


def test_a_committed_record_of_earlier_rules_is_not_compared(tmp_path, monkeypatch):
    commit(tmp_path, model(), behaviour={"toy_model": 0})
    monkeypatch.setenv("TOY_ERROR", "5")
    maker(tmp_path).make(model())
    assert made(tmp_path, model()).metrics["count"] == 8


def test_a_child_of_a_committed_parent_has_the_parent_made_again_and_compared(tmp_path, monkeypatch):
    commit(tmp_path, model())
    maker(tmp_path).with_parents(number())
    assert made(tmp_path, number()).metrics == {"value": 3.0}
    shutil.rmtree(tmp_path / "results")
    monkeypatch.setenv("TOY_ERROR", "2")
    with pytest.raises(RecordError, match="contradicts"):
        maker(tmp_path).with_parents(number())


def test_a_committed_record_that_is_damaged_is_named(tmp_path):
    path = commit(tmp_path, model())
    path.write_text(path.read_text()[:100])
    with pytest.raises(RecordError, match=r"not a valid record .*; delete it and run its job again"):
        maker(tmp_path).make(model())


# -- what is refused ----


def test_a_kind_that_knows_one_process_is_refused_under_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(JobError, match="knows one process only: run it without torchrun"):
        maker(tmp_path).make(model())


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("mixln_table1", {"again": True}, "--again is for one job"),
        ("cce_tableA3", {}, "is built from no job"),
        ("mixln_tabel1", {}, "did you mean 'mixln_table1'"),
    ],
)
def test_what_cannot_be_run_by_name_is_refused(what, options, message):

    with pytest.raises(SpecError, match=message):
        run_named(Project({"scale": "smoke"}), what, Machine(device="cpu"), False, options.get("again", False))
