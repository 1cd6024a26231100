"""A run that is gone on with, as a job, a paper file, a plan and a command say it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from support import job_environment
from support_continue import A8, AT, STEPS, branch, trunk

from paperlm.errors import SpecError
from paperlm.jobs import parse_job
from paperlm.jobs.base import Job, Trunk, kept_for
from paperlm.jobs.continue_pretrain import ContinuePretrain
from paperlm.plan.project import ROOT, Project
from paperlm.plan.workflow import Workflow
from paperlm.record.places import Places
from paperlm.record.record import read_record
from paperlm.tables.results import seed_of

# -- what a declaration may say ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"at": STEPS}, "the trunk has 12 updates; leave it before the last"),
        ({"at": STEPS + 1}, "the trunk has 12 updates; leave it before the last"),
        ({"at": 0}, "at"),
        ({"at": "end"}, "at: end: nothing is gone on with there; give an update, or a share of the run"),
        ({"at": "init"}, "at: init: nothing is gone on with there"),
        ({"quantization": "a48_int"}, "unknown preset 'a48_int'; did you mean 'a48_int4'"),
        (
            {"quantization": "a48_int4"},
            "quantization: weight is .*ternary_absmean.*, the trunk's None: only activations",
        ),
        ({"of": trunk(**A8).canonical()}, "quantization: weight is None, the trunk's .*ternary_absmean"),
        ({"quantization": {"qkv": {"name": "int8_absmax", "keep": 0.3}}}, "keep 0.3 of 16 entries"),
        ({"steps": 20}, "steps"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        parse_job({"kind": "continue_pretrain", "of": trunk().canonical(), "at": AT, "quantization": None, **changes})


def test_a_trunk_of_another_kind_is_refused():
    with pytest.raises(ValidationError, match="is a job of kind 'continue_pretrain'; it has to be of kind pretrain"):
        ContinuePretrain(of=branch(), at=AT + 1, quantization=None)


def test_the_plan_keeps_the_state_for_the_branch_and_models_for_others_apart():
    from paperlm.jobs.rank_probability import RankProbability

    asked: list[Job] = [branch(), branch(at=4), RankProbability(of=trunk(), at=AT, tokens=10)]
    assert kept_for(asked) == {trunk().job_id: (Trunk(4), AT, Trunk(AT))}


def test_its_name_follows_where_it_leaves_and_its_trunk():
    names = {branch().job_id, branch(at=AT - 1).job_id, branch(trunk(seed=1)).job_id}
    assert len(names) == 3 and all(n.startswith((f"from_{AT}-", f"from_{AT - 1}-")) for n in names)
    assert branch().derived()["taken over after"][0] == "0.6667 of the updates"
    assert branch().data() == trunk().data() and branch().snapshots() == range(AT, STEPS)


def test_a_branch_has_the_behaviour_of_its_trunks_loss():
    assert "linear_cross_entropy" in branch(trunk(loss="cce")).behaviours()
    assert "linear_cross_entropy" not in branch().behaviours()


def test_a_record_of_a_branch_is_of_its_trunks_seed():
    """Its quantizers stand before its trunk among its settings, and have no seed."""
    found = [seed_of(branch(trunk(seed=seed, **A8), quantization="a48_int4").canonical()) for seed in (0, 3)]
    assert found == [0, 3]


# -- in a paper file ----


@pytest.fixture
def root(prepared) -> Path:
    """A project with one toy paper: a trunk of four updates, a branch that leaves at three quarters of it."""
    papers = prepared / "workflow/papers"
    papers.mkdir()
    mixln = yaml.safe_load((ROOT / "workflow/papers/mixln.yaml").read_text())
    share = {"value": "share 3/4", "source": "a test"}
    quantizers = {"value": {"qkv": "int4_absmean"}, "source": "a test"}
    jobs = {
        "trunk": mixln["jobs"]["pretrain"],
        "branch": {"kind": "continue_pretrain", "of": "trunk", "settings": {"at": share, "quantization": quantizers}},
    }
    row = {"A": {"size": "71M", "norm": {"name": "pre_ln"}, "source": "a test"}}
    table = {"title": "Branches", "number": "Table 1", "kind": "jobs", "job": "branch", "metric": "ppl_true"}
    paper = {
        "paper": {"id": "toy", "title": "Toy", "arxiv": "0", "code": "none"},
        "jobs": jobs,
        "sizes": {"71M": {"jobs": {"trunk": mixln["sizes"]["71M"]["jobs"]["pretrain"]}}},
        "tables": {"toy_table1": table | {"rows": row, "columns": {"ppl": {}}}},
    }
    (papers / "toy.yaml").write_text(yaml.safe_dump(paper))
    return prepared


def test_a_paper_says_the_place_as_a_share_and_the_rule_of_the_trunk_is_told_what_to_keep(root):
    project = Project({"scale": "smoke"}, root)
    (job,) = project.jobs_of("toy_table1")
    assert (job.kind, job.of.steps, job.at) == ("continue_pretrain", 4, 3)
    assert job.quantization["qkv"] == {"name": "int4_absmean", "multiple": 1}
    assert project.keep == {job.of.job_id: (Trunk(3),)}
    plan = Workflow(project)
    assert plan.keep(job.of.job_id) == "trunk-3" and plan.keep(job.job_id) == ""
    assert list(plan.kinds) == ["continue_pretrain", "pretrain"]


def command(root: Path, job: Job, *more: str) -> subprocess.CompletedProcess:
    """What the rule of a kind calls."""
    code = (
        "import sys; from pathlib import Path; from paperlm.plan import project; "
        f"project.ROOT = Path({str(root)!r}); from paperlm.cli import main; sys.exit(main())"
    )
    call = ["run", "--job", json.dumps(job.canonical()), "--scale", "smoke", "--device", "cpu", *more]
    command = [sys.executable, "-c", code, *call]
    return subprocess.run(command, env=job_environment(), capture_output=True, text=True, timeout=240)


def test_the_commands_of_the_rules_make_trunk_and_branch(root):
    (job,) = Project({"scale": "smoke"}, root).jobs_of("toy_table1")
    for one, keep in ((job.of, "--keep=trunk-3"), (job, "--keep=")):
        done = command(root, one, keep)
        assert done.returncode == 0, done.stderr
    record = read_record(root / Places(root, "smoke").made(job), job.job_id)
    assert record.outcome == "trained" and record.series["train"].column("update") == [4]


@pytest.mark.parametrize("keep", ["trunk-4", "trunk", "trunk-", "trunk-1,at-2"])
def test_a_state_that_a_trunk_does_not_have_is_refused_by_the_command(root, keep):
    (job,) = Project({"scale": "smoke"}, root).jobs_of("toy_table1")
    done = command(root, job.of, f"--keep={keep}")
    assert done.returncode == 2 and "--keep takes updates of the job" in done.stderr and "states 0 to 3" in done.stderr


@pytest.mark.parametrize(("share", "message"), [("share 1/1", "at: end: nothing"), ("share 0/3", "at: init: nothing")])
def test_a_share_that_is_the_whole_run_or_nothing_of_it_is_refused(root, share, message):
    path = root / "workflow/papers/toy.yaml"
    path.write_text(path.read_text().replace("share 3/4", share))
    with pytest.raises(SpecError, match=message):
        _ = Project({"scale": "smoke"}, root).jobs
