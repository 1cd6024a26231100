"""Making jobs: locks, inputs checked, models with manifests, records, and a comparison with the committed record."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import job_environment
from support_jobs import maker, write_paper

from paperlm.errors import JobError, RecordError, SpecError
from paperlm.files import write_json
from paperlm.jobs import Job, Machine, job_kinds, parse_job
from paperlm.plan.project import ROOT, Project
from paperlm.plan.state import State
from paperlm.record import model_store
from paperlm.record.places import Places
from paperlm.record.record import Record, drift, read_record, write_record
from paperlm.run import run_named


@pytest.fixture(autouse=True)
def _toys(toy_kinds):
    """Every test here has the toy kinds."""


def model(**settings: object) -> Job:
    return parse_job({"kind": "toy_model", **settings})


def number(of: Job | None = None, **settings: object) -> Job:
    return parse_job({"kind": "toy_number", "of": (of or model()).canonical(), **settings})


def made(root: Path, job: Job) -> Record:
    return read_record(root / Places(root, "smoke").made(job), job.job_id)


def folder_of(root: Path, job: Job) -> Path:
    return root / Places(root, "smoke").model(job)


def commit(root: Path, job: Job, **changes: object) -> Path:
    """Make a job, move its record to the committed ones with changes, and remove everything else of it."""
    maker(root).with_parents(job)
    places = Places(root, "smoke")
    path = root / places.committed(job)
    write_record(path, made(root, job).model_copy(update=changes))
    shutil.rmtree(root / "results")
    return path


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


def test_a_job_without_its_parents_model_is_refused_and_the_command_named(tmp_path):
    message = rf"no finished model of {model().job_id}; make it again .*run {model().job_id} --again --with-parents"
    with pytest.raises(JobError, match=message):
        maker(tmp_path).make(number())
    assert not (tmp_path / "results/smoke/toy_number").exists()


def test_the_manifest_is_written_last_and_names_every_file_with_its_checksum(tmp_path, monkeypatch):
    seen = []

    def note(path, content):
        assert content["files"].keys() == {
            str(p.relative_to(path.parent)) for p in path.parent.rglob("*") if p.is_file()
        }
        assert not folder_of(tmp_path, model()).exists(), "in its place when it is whole"
        seen.append(path.name)
        write_json(path, content)

    monkeypatch.setattr(model_store, "write_json", note)
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
    (folder / "manifest.json").write_text(json.dumps(content | {"job_id": "toy-s9-00000000"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"weights.bin: missing, truncated or altered; delete .*{job} and run {job} again"),
        (alter, r"weights.bin: missing, truncated or altered; delete .*{job} and run {job} again"),
        (lambda f: (f / "weights.bin").unlink(), r"weights.bin: missing, truncated or altered; delete .*{job}"),
        (
            lambda f: (f / "more.json").write_text("{}"),
            r"more.json: is not in the manifest, and would be read; remove it",
        ),
        (
            lambda f: (f / "manifest.json").write_text("{"),
            r"manifest.json: truncated or altered; delete .*{job} and make it again",
        ),
        (
            lambda f: (f / "manifest.json").write_text("{}"),
            r"manifest.json: truncated or altered; delete .*{job} and make it again",
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


# -- killed, and made by two at once ----


def start(root: Path, kinds: Path, job: Job, **environment: str) -> subprocess.Popen:
    script = Path(__file__).with_name("support_jobs.py")
    command = [sys.executable, script, kinds, root, json.dumps(job.canonical())]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        list(map(str, command)), env=job_environment(**environment), stdout=pipe, stderr=pipe, text=True
    )


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)


def test_a_job_killed_in_the_middle_and_started_again_gives_the_same_record(tmp_path, toy_kinds):
    job = model(steps=40)
    maker(tmp_path / "unbroken").make(job)
    far = tmp_path / Places(tmp_path, "smoke").work(job) / "count.json"
    process = start(tmp_path, toy_kinds, job, TOY_PAUSE="0.05")
    wait_for(lambda: far.is_file() and far.read_text() and int(far.read_text()) > 3, process)
    process.kill()
    process.wait()
    assert not folder_of(tmp_path, job).exists() and not (tmp_path / Places(tmp_path, "smoke").made(job)).exists()
    again = start(tmp_path, toy_kinds, job)
    out, errors = again.communicate(timeout=60)
    assert again.returncode == 0, errors
    assert int(out.split()[-1]) > 3, "it went on, and did not begin anew"
    broken, whole = made(tmp_path, job), made(tmp_path / "unbroken", job)
    assert broken.model_copy(update={"cost": whole.cost}) == whole.model_copy(
        update={"environment": broken.environment}
    )
    files = [
        json.loads((folder_of(root, job) / "manifest.json").read_text()) for root in (tmp_path, tmp_path / "unbroken")
    ]
    assert files[0] == files[1]


def test_of_two_processes_one_makes_the_job_and_the_other_waits(tmp_path, toy_kinds):
    job = model(steps=30)
    first = start(tmp_path, toy_kinds, job, TOY_PAUSE="0.1")
    far = tmp_path / Places(tmp_path, "smoke").work(job) / "count.json"
    wait_for(far.is_file, first)
    second = start(tmp_path, toy_kinds, job, TOY_PAUSE="0.1")
    _, said = second.communicate(timeout=60)
    assert second.returncode == 0 and first.wait(timeout=60) == 0, said
    assert "another process is making it; waiting" in said and "another process has made it" in said
    assert made(tmp_path, job).metrics["count"] == 30


def test_a_process_that_waited_for_one_that_died_makes_the_job_itself(tmp_path, toy_kinds):
    job = model(steps=400)
    first = start(tmp_path, toy_kinds, job, TOY_PAUSE="0.02")
    far = tmp_path / Places(tmp_path, "smoke").work(job) / "count.json"
    wait_for(far.is_file, first)
    second = start(tmp_path, toy_kinds, job)
    assert "waiting" in second.stderr.readline()
    first.kill()
    first.wait()
    assert second.wait(timeout=60) == 0
    assert made(tmp_path, job).metrics["count"] == 400


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


# -- earlier rules ----


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """The toy paper at the smoke scale."""
    shutil.copytree(ROOT / "workflow/scales", tmp_path / "workflow/scales")
    return Project({"scale": "smoke"}, write_paper(tmp_path))


def make_all(project: Project) -> None:
    for name in project.exhibits:
        run_named(project, name, maker(project.root).machine, with_parents=True, again=False)


def test_a_record_of_earlier_rules_is_drift_and_made_again_where_that_is_cheap(project, monkeypatch):
    make_all(project)
    job = project.jobs_of("toy_table1")[0]
    parent = job.parents()["of"]
    assert not State(project).todo()
    monkeypatch.setattr(job_kinds()["toy_model"], "behaviour", 2)
    state = State(project)
    assert state.stored(parent).drifted == ("toy_model 1 -> 2",)
    assert state.stored(job).drifted == (f"{parent.job_id}: toy_model 1 -> 2",)
    assert state.todo().keys() == project.jobs.keys(), "children too, and the model they work on"
    make_all(project)
    assert not State(project).todo() and made(project.root, job).ancestors == {parent.job_id: {"toy_model": 2}}


@pytest.mark.parametrize(("remake", "wanted"), [("no", "have"), ("drifted", "make")])
def test_whether_earlier_rules_are_made_again_is_a_wish_of_the_configuration(project, monkeypatch, remake, wanted):
    make_all(project)
    monkeypatch.setattr(job_kinds()["toy_model"], "behaviour", 2)
    state = State(Project({"scale": "smoke", "remake": remake}, project.root))
    assert {state.want(job) for job in project.jobs_of("toy_table1")} == {wanted}


def test_a_record_says_under_which_rules_the_model_was_made_that_it_worked_on(tmp_path, monkeypatch):
    maker(tmp_path).make(model())
    monkeypatch.setattr(job_kinds()["toy_model"], "behaviour", 2)
    maker(tmp_path).make(number())
    record = made(tmp_path, number())
    assert record.ancestors == {model().job_id: {"toy_model": 1}}
    assert drift(number(), record.behaviour, record.ancestors) == [f"{model().job_id}: toy_model 1 -> 2"]


def test_a_job_is_made_again_from_the_start_when_its_rules_change(tmp_path, monkeypatch):
    maker(tmp_path).make(model())
    monkeypatch.setattr(job_kinds()["toy_model"], "behaviour", 2)
    monkeypatch.setenv("TOY_ERROR", "1")
    maker(tmp_path).make(model())
    assert made(tmp_path, model()).metrics["count"] == 4 and made(tmp_path, model()).behaviour == {"toy_model": 2}


# -- records and models are two things ----


def test_a_committed_record_needs_no_model_until_a_child_asks_for_one(project):
    parent, child = project.jobs_of("toy_table2")[0], project.jobs_of("toy_table1")[0]
    commit(project.root, parent)
    state = State(project)
    assert state.want(parent) == "have" and not state.todo("toy_table2")
    assert parent.job_id in state.todo("toy_table1"), "its model is missing"
    commit_path = project.places.committed(parent)
    assert state.record(parent) == commit_path and state.record(child) == project.places.made(child)


def test_a_model_without_the_snapshot_that_a_child_asks_for_is_made_again(project):
    parent = project.jobs_of("toy_table2")[0]
    maker(project.root).make(parent)
    assert not State(project).has_model(parent) and project.keep == {parent.job_id: (2,)}
    maker(project.root, keep=project.keep).make(parent)
    assert State(project).has_model(parent)


def test_without_the_wish_to_make_what_is_missing_nothing_is_to_be_done(project):
    absent = State(Project({"scale": "smoke", "run_missing": "no"}, project.root))
    assert not absent.todo() and absent.records("toy_table1") == []


# -- by name ----


def test_a_table_is_made_by_name_and_what_is_there_is_left(project, capsys):
    make_all(project)
    job = project.jobs_of("toy_table1")[0]
    stamp = (project.root / project.places.made(job)).stat().st_mtime_ns
    make_all(project)
    run_named(project, job.job_id, maker(project.root).machine, with_parents=False, again=False)
    assert "has a record" in capsys.readouterr().err
    assert (project.root / project.places.made(job)).stat().st_mtime_ns == stamp
    run_named(project, job.job_id, maker(project.root).machine, with_parents=False, again=True)
    assert (project.root / project.places.made(job)).stat().st_mtime_ns > stamp


def test_an_unknown_name_is_refused_with_the_nearest(project):
    with pytest.raises(SpecError, match="unknown job, table or figure 'toy_tabel1'; did you mean 'toy_table1'"):
        run_named(project, "toy_tabel1", maker(project.root).machine, with_parents=False, again=False)


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
