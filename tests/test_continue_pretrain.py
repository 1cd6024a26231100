"""A run that is gone on with from one of its updates: bit for bit its own rest while nothing changes, also when trunk
or branch are killed, and nothing else's state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support_continue import A8, AT, STEPS, branch, trunk
from support_engine import ALONE, QUIET, numbers, task_of, trained

from paperlm.errors import CheckpointError, Interrupted, JobError
from paperlm.jobs.base import Inputs, Machine, Trunk, kept_for
from paperlm.jobs.continue_pretrain import ContinuePretrain, run
from paperlm.quantizers.presets import PRESETS
from paperlm.record.model_store import Origin, checked_model, has_model, store_model
from paperlm.record.places import Places
from paperlm.record.record import read_record
from paperlm.run import Maker
from paperlm.train.engine import Engine, Progress
from paperlm.train.language_model import LanguageModelling


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


def test_a_constant_rate_is_that_of_the_update_at_which_the_branch_takes_over(whole, manifest):
    state = whole[1] / f"model/trunk-{AT}"
    held = branch().model_copy(update={"rate": "constant"})
    rates = [
        [LanguageModelling(job, manifest, 0, ALONE, state).begin(update)["lr"] for update in range(AT, STEPS)]
        for job in (branch(), held)
    ]
    assert rates[1] == rates[0][:1] * (STEPS - AT) and rates[0] == sorted(set(rates[0]), reverse=True)
    assert held.job_id != branch().job_id and "_constant-" in held.slug()


def test_under_a_constant_rate_weight_decay_still_ends_with_the_first_phase(manifest):
    job = branch(at=4).model_copy(update={"rate": "constant"})
    task = LanguageModelling(job, manifest, 0, ALONE)
    begun = [task.begin(update) for update in (4, STEPS // 2 - 1, STEPS // 2, STEPS - 1)]
    assert [one["weight_decay"] for one in begun] == [0.1, 0.1, 0.0, 0.0] and len({one["lr"] for one in begun}) == 1


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


# -- other quantizers ----


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
def maker(prepared) -> Maker:
    return Maker(Places(prepared, "smoke"), QUIET)


def test_a_branch_has_its_trunk_made_with_the_state_that_it_needs(maker):
    maker.with_parents(branch())
    places, root = maker.places, maker.places.root
    made = read_record(root / places.made(branch()), branch().job_id)
    of = read_record(root / places.made(trunk()), trunk().job_id)
    assert made.metrics == of.metrics and made.ancestors == {trunk().job_id: trunk().behaviours()}
    assert made.weights[trunk().job_id] == of.weights[trunk().job_id] and set(of.weights) == {trunk().job_id}
    assert set(made.weights) == {trunk().job_id, branch().job_id}
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
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors: missing, truncated or altered; make it again"):
        going_on(branch(), manifest, tmp_path / "state", tmp_path)


def test_a_trunk_that_left_no_model_leaves_nothing_to_go_on_with(tmp_path):
    (tmp_path / "building").mkdir()
    store_model(tmp_path / "building", tmp_path / "model", trunk(), "not_finite", Origin())
    with pytest.raises(JobError, match="ended as not_finite"):
        checked_model(tmp_path / "model", trunk(), Trunk(AT))
