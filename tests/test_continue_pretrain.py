"""A run that is gone on with from one of its updates: bit for bit its own rest while nothing changes, also when trunk
or branch are killed, and nothing else's state."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import load_file
from support import job_environment, smoke_run
from support_engine import ALONE, QUIET, numbers, task_of, trained

from paperlm.errors import CheckpointError, Interrupted, JobError, SpecError
from paperlm.jobs import parse_job
from paperlm.jobs.base import Inputs, Job, Machine, Trunk, kept_for
from paperlm.jobs.continue_pretrain import ContinuePretrain, run
from paperlm.jobs.pretrain import Pretrain
from paperlm.plan.project import ROOT, Project
from paperlm.plan.workflow import Workflow
from paperlm.quantizers.presets import PRESETS
from paperlm.record.model_store import Origin, checked_model, has_model, store_model
from paperlm.record.places import Places
from paperlm.record.record import read_record
from paperlm.run import Maker
from paperlm.tables.results import seed_of
from paperlm.train.engine import Engine, Progress
from paperlm.train.language_model import LanguageModelling

STEPS, AT = 12, 8


def trunk(**changes: Any) -> Pretrain:
    """A run in two phases whose second begins before the branch leaves."""
    phases = {
        "schedule": "two_phase", "optimizer": "adamw", "second_peak_lr": 1e-3, "weight_decay": 0.1,
        "second_weight_decay": 0.0, "decay_norms": False, "grad_clip": 2.0, "final_lr_fraction": 0.02,
    }  # fmt: skip
    return smoke_run(**{"steps": STEPS, "eval_every": 3, "curve": "every_update"} | phases | changes)


def branch(of: Pretrain | None = None, at: int = AT, quantization: Any = None) -> ContinuePretrain:
    return ContinuePretrain(of=of or trunk(), at=at, quantization=quantization)


def going_on(
    job: ContinuePretrain, manifest: Path, state: Path, folder: Path, machine: Machine = QUIET, keep=()
) -> Any:
    """The branch's result; its model is in folder / model."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    work, model = folder / "work", folder / "model"
    return run(job, Inputs(data=(manifest,), models={"of": state}, work=work, model=model, keep=keep), machine)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def whole(manifest, tmp_path_factory) -> tuple[Any, Path]:
    """The trunk run to its end, and its folder, with the state that a branch needs."""
    folder = tmp_path_factory.mktemp("trunk")
    return trained(trunk(), manifest, folder, keep=(Trunk(AT),)), folder


def rest(result: Any, name: str) -> list[list[Any]]:
    return [row for row in result.series[name].rows if row[0] > AT]


def test_a_branch_with_the_trunks_quantizers_is_the_trunks_own_rest_bit_for_bit(whole, manifest, tmp_path):
    result, folder = whole
    found = going_on(branch(), manifest, folder / f"model/trunk-{AT}", tmp_path)
    assert found.series["train"].rows == rest(result, "train") and len(rest(result, "train")) == STEPS - AT
    assert found.series["eval"].rows == rest(result, "eval")
    assert found.metrics == result.metrics and found.outcome == "trained"
    assert same(weights(tmp_path / "model"), weights(folder / "model"))


def test_without_the_optimizers_state_it_would_not_be(whole, manifest, tmp_path):
    """The weights alone, under a fresh Adam: what a fine-tuning would do."""
    _, folder = whole
    state = tmp_path / "state"
    shutil.copytree(folder / f"model/trunk-{AT}", state)
    task = LanguageModelling(branch(), manifest, 0, ALONE, state)
    assert task.trunk().update == AT and len(task.optimizer.state) == len(list(task.model.parameters()))
    task.optimizer.state.clear()
    task.trunk = lambda: Progress(AT, 0)
    Engine(task, tmp_path / "work", QUIET, ALONE).train()
    assert not torch.equal(task.model.lm_head.weight, weights(folder / "model")["lm_head.weight"])


def test_a_branch_that_is_killed_goes_on_from_its_own_checkpoint(whole, manifest, tmp_path):
    result, folder = whole
    state = folder / f"model/trunk-{AT}"
    with pytest.raises(Interrupted):
        going_on(branch(), manifest, state, tmp_path, Machine(device="cpu", progress=False, stop_after=AT + 2))
    found = going_on(branch(), manifest, state, tmp_path)
    assert found.cost.resumed_from == [AT + 2]
    assert found.series["train"].rows == rest(result, "train") and found.metrics == result.metrics
    assert same(weights(tmp_path / "model"), weights(folder / "model"))


@pytest.mark.parametrize("stop", [AT - 3, AT, AT + 2])
def test_a_trunk_that_is_killed_before_at_or_after_the_update_leaves_the_same_state(whole, manifest, tmp_path, stop):
    result, folder = whole
    machine = Machine(device="cpu", progress=False, stop_after=stop)
    with pytest.raises(Interrupted):
        trained(trunk(), manifest, tmp_path, machine, keep=(Trunk(AT),))
    assert numbers(trained(trunk(), manifest, tmp_path, keep=(Trunk(AT),))) == numbers(result)
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, other = (load_file(path / f"model/trunk-{AT}" / name) for path in (tmp_path, folder))
        assert same(one, other)


def test_a_state_that_is_asked_for_after_the_model_of_its_update_was_kept_is_made(manifest, tmp_path):
    """The work of an earlier start has the model after that update and a checkpoint beyond it."""
    machine = Machine(device="cpu", progress=False, stop_after=AT + 1)
    with pytest.raises(Interrupted):
        trained(trunk(), manifest, tmp_path, machine, keep=(AT,))
    trained(trunk(), manifest, tmp_path, keep=(AT, Trunk(AT)))
    found = weights(tmp_path / f"model/trunk-{AT}")
    assert (tmp_path / f"model/trunk-{AT}/optimizer.safetensors").is_file()
    assert same(found, weights(tmp_path / f"model/at-{AT}"))


def test_a_branch_of_a_branchs_models_is_kept_like_any_other(whole, manifest, tmp_path):
    """Its first state is the trunk's: what the new quantizers do to it before they are trained with."""
    _, folder = whole
    going_on(branch(), manifest, folder / f"model/trunk-{AT}", tmp_path, keep=(AT, AT + 2))
    assert same(weights(tmp_path / f"model/at-{AT}"), weights(folder / f"model/trunk-{AT}"))
    assert not same(weights(tmp_path / f"model/at-{AT + 2}"), weights(tmp_path / "model"))


def test_the_cost_of_a_branch_is_that_of_its_own_updates(whole, manifest, tmp_path):
    result, folder = whole
    found = going_on(branch(), manifest, folder / f"model/trunk-{AT}", tmp_path)
    assert found.cost.flops == pytest.approx(result.cost.flops * (STEPS - AT) / STEPS)
    assert branch().flops() == pytest.approx(found.cost.flops) and trunk().flops() == pytest.approx(result.cost.flops)


def test_an_estimate_knows_a_branch_by_the_pace_of_its_trunks_kind(tmp_path):
    """Where no branch has a record, its seconds are its share of the operations of a pre-training that has one."""
    from paperlm.plan.costs import RATE, Costs

    costs = Costs.__new__(Costs)
    costs._reference, costs._here = None, {f"pretrain {RATE}": {"llama": [("a CPU", 2e-9)]}}
    assert costs.of_job(branch()) == pytest.approx(2e-9 * branch().flops())
    costs._here[f"continue_pretrain {RATE}"] = {"from": [("a CPU", 3e-9)]}
    assert costs.of_job(branch()) == pytest.approx(3e-9 * branch().flops())


# -- other quantizers ----

A8 = {"quantization": "a8_trunk", "sub_norm": True, "hidden_act": "relu2", "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def ternary(manifest, tmp_path_factory) -> tuple[Any, Path]:
    """A trunk with ternary weights and eight-bit activations, as BitNet a4.8 trains one."""
    folder = tmp_path_factory.mktemp("ternary")
    return trained(trunk(**A8), manifest, folder, keep=(Trunk(AT),)), folder


def test_a_trunk_with_quantizers_that_goes_on_with_the_same_ones_is_its_own_rest(ternary, manifest, tmp_path):
    result, folder = ternary
    found = going_on(branch(trunk(**A8), quantization="a8_trunk"), manifest, folder / f"model/trunk-{AT}", tmp_path)
    assert found.series["train"].rows == rest(result, "train") and found.metrics == result.metrics
    assert same(weights(tmp_path / "model"), weights(folder / "model"))


def test_a_branch_begins_with_the_trunks_weights_behind_its_own_quantizers(ternary, manifest, tmp_path):
    """The first loss is that of the trunk's weights on the update's batch, in a model built with the new quantizers."""
    result, folder = ternary
    job = branch(trunk(**A8), quantization="a48_int4")
    found = going_on(job, manifest, folder / f"model/trunk-{AT}", tmp_path)
    assert found.series["train"].rows[0][0] == AT + 1 and len(found.series["train"].rows) == STEPS - AT
    losses = {}
    for preset in ("a48_int4", "a8_trunk"):
        task = task_of(trunk(**A8 | {"quantization": preset}), manifest)
        state = weights(folder / f"model/trunk-{AT}")
        with torch.no_grad():
            for name, parameter in task.model.named_parameters():
                parameter.copy_(state[name])
            parts = task.batch(AT).parts
            losses[preset] = sum(float(task.loss_module(*arguments)) * weight for arguments, weight in parts)
    assert found.series["train"].rows[0][2] == pytest.approx(losses["a48_int4"], abs=1e-5)
    assert rest(result, "train")[0][2] == pytest.approx(losses["a8_trunk"], abs=1e-5)
    assert abs(losses["a48_int4"] - losses["a8_trunk"]) > 1e-4, "the quantizers have changed"
    assert not same(weights(tmp_path / "model"), weights(folder / "model"))


def test_a_branchs_model_is_configured_as_the_trunks_but_for_its_quantizers(ternary, manifest, tmp_path):
    _, folder = ternary
    job = branch(trunk(**A8), quantization="a48_fp4")
    going_on(job, manifest, folder / f"model/trunk-{AT}", tmp_path)
    one, other = (json.loads((path / "model/config.json").read_text()) for path in (tmp_path, folder))
    assert {key for key in one if one[key] != other[key]} == {"quantization"}
    assert one["quantization"] == PRESETS["a48_fp4"]["quantization"]
    assert job.slug() == f"from_{AT}-llama_71m-mix_ln-a48_fp4-s0"


def test_three_branches_of_one_trunk_ask_it_for_one_state():
    branches = [branch(trunk(**A8), quantization=name) for name in ("a48_int4", "a48_fp4", "a48_no_topk")]
    assert len({job.job_id for job in branches}) == 3
    assert kept_for(branches) == {trunk(**A8).job_id: (Trunk(AT),)}


# -- what is made by `paperlm run` ----


@pytest.fixture
def maker(manifest, tmp_path) -> Maker:
    places = Places(tmp_path, "smoke")
    shutil.copytree(manifest.parent, (tmp_path / places.data(trunk().token_data())).parent)
    return Maker(places, QUIET)


def test_a_branch_has_its_trunk_made_with_the_state_that_it_needs(maker):
    maker.with_parents(branch())
    places, root = maker.places, maker.places.root
    made = read_record(root / places.made(branch()), branch().job_id)
    of = read_record(root / places.made(trunk()), trunk().job_id)
    assert made.metrics == of.metrics and made.ancestors == {trunk().job_id: trunk().behaviours()}
    assert same(weights(root / places.model(branch())), weights(root / places.model(trunk())))
    manifest = json.loads((root / places.manifest(trunk())).read_text())
    state = {name for name in manifest["files"] if name.startswith("trunk-")}
    assert state == {f"trunk-{AT}/{name}" for name in ("model.safetensors", "optimizer.safetensors", "state.json")}


def test_a_trunk_that_was_made_without_that_state_is_made_again(maker):
    maker.with_parents(trunk())
    folder = maker.places.root / maker.places.model(trunk())
    assert has_model(folder, trunk(), {None}) and not has_model(folder, trunk(), {Trunk(AT)})
    with pytest.raises(JobError, match=rf"holds no state of training with its optimizer after update {AT}; delete it"):
        maker.make(branch())
    maker.with_parents(branch())
    assert has_model(folder, trunk(), {None, Trunk(AT)})


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_state_that_was_altered_is_named_and_not_gone_on_with(maker, name):
    maker.with_parents(branch())
    path = maker.places.root / maker.places.model(trunk()) / f"trunk-{AT}" / name
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(JobError, match=rf"trunk-{AT}/{name}: missing, truncated or altered; delete"):
        maker.make(branch(), remake=True)


def test_the_state_of_another_run_is_refused(whole, manifest, tmp_path):
    _, folder = whole
    other = branch(trunk(seed=5))
    with pytest.raises(CheckpointError, match=r"state of llama_71m-mix_ln-s0.* not of .*-s5.*differs in seed"):
        going_on(other, manifest, folder / f"model/trunk-{AT}", tmp_path)


def test_a_folder_without_an_optimizers_state_is_refused(whole, manifest, tmp_path):
    _, folder = whole
    shutil.copytree(folder / f"model/trunk-{AT}", tmp_path / "state")
    (tmp_path / "state/optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors: truncated or altered; make it again"):
        going_on(branch(), manifest, tmp_path / "state", tmp_path)


def test_a_trunk_that_left_no_model_leaves_nothing_to_go_on_with(tmp_path):
    (tmp_path / "building").mkdir()
    store_model(tmp_path / "building", tmp_path / "model", trunk(), "not_finite", Origin())
    with pytest.raises(JobError, match="ended as not_finite"):
        checked_model(tmp_path / "model", trunk(), Trunk(AT))


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


def test_a_record_of_a_branch_is_of_its_trunks_seed():
    """Its quantizers stand before its trunk among its settings, and have no seed."""
    found = [seed_of(branch(trunk(seed=seed, **A8), quantization="a48_int4").canonical()) for seed in (0, 3)]
    assert found == [0, 3]


# -- in a paper file ----


@pytest.fixture
def root(tmp_path, manifest) -> Path:
    """A project with one toy paper: a trunk of four updates, a branch that leaves at three quarters of it."""
    shutil.copytree(ROOT / "workflow/scales", tmp_path / "workflow/scales")
    shutil.copytree(manifest.parent, (tmp_path / Places(tmp_path, "smoke").data(smoke_run().token_data())).parent)
    papers = tmp_path / "workflow/papers"
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
    return tmp_path


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
