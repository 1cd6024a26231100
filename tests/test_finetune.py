"""Fine-tuning by trl: the job, the loss that is trained and measured, packing, checkpoints."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from support import job_environment
from support_finetune import (
    CPU,
    Pretrained,
    inputs,
    instruction_items,
    killed,
    preference_items,
    sft,
    weights,
    write_model,
    write_set,
)
from support_models import fresh

from paperlm.errors import CheckpointError, DataError, Interrupted, JobError
from paperlm.finetune import examples, measure
from paperlm.finetune.common import STATE, Trained
from paperlm.jobs import job_from, job_kinds, run_job
from paperlm.jobs.base import Machine, parent_kinds
from paperlm.models.folder import load_model, load_tokenizer, save_model, transformers_tokenizer
from paperlm.result import Cost


@pytest.fixture(scope="module")
def tokenizer():
    return transformers_tokenizer("bpe1024", 128)


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("parent"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("instructions")
    return write_set(folder, train=instruction_items(30), validation=instruction_items(6, start=100))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, parent, data):
    folder = tmp_path_factory.mktemp("unbroken")
    return run_job(sft(), inputs(folder, data, of=parent), CPU), weights(folder / "model")


def same_numbers(result, model, other, other_model):
    assert (result.metrics, result.series, result.standard_errors) == (
        other.metrics,
        other.series,
        other.standard_errors,
    )
    assert all(torch.equal(model[name], tensor) for name, tensor in other_model.items())


# -- the job as a value --


def test_the_kind_is_found_and_names_its_parents_without_torch():
    code = "import sys; from paperlm.jobs import job_kinds; job_kinds(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=job_environment())
    assert parent_kinds(job_kinds()["sft"]) == {"of": ("pretrain", "hub_model")}


def test_the_name_follows_settings_and_parents_and_reading_it_back_gives_the_same_job(monkeypatch):
    import paperlm.jobs

    monkeypatch.setattr(paperlm.jobs, "job_kinds", lambda: {"sft": type(sft()), "pretrain": Pretrained})
    job = sft(seed=3)
    assert job.job_id.startswith("sft-pre_ln-")
    assert job_from(job.canonical()) == job
    others = [sft(), sft(seed=3, block=64), sft(seed=3, of=Pretrained(name="mix_ln")), sft(seed=3, adam_eps=1e-6)]
    assert len({job.job_id, *(other.job_id for other in others)}) == 5


def test_settings_that_make_no_sense_are_refused():
    for change in ({"warmup": 1.0}, {"block": 1}, {"of": sft()}, {"peak_rate": 1.0}):
        with pytest.raises(ValueError):
            sft(**change)
    with pytest.raises(ValueError, match="did you mean 'commonsense_4k'"):
        sft(dataset="bundled:commonsens_4k")
    with pytest.raises(ValueError, match="no set of items"):
        sft(dataset="bundled:c4_sample")
    with pytest.raises(ValueError, match="unknown split 'tets'"):
        sft(dataset="local:commonsense_147k", validation_split="tets")
    with pytest.raises(ValueError, match="has no field 'chosen'"):
        sft(template="chosen")


def test_updates_count_the_last_batch_of_an_epoch_and_stop_at_the_limit():
    assert sft(epochs=1.0).updates(30) == 8  # ceil(30 / 4)
    assert sft(epochs=2.5).updates(30) == 20
    assert sft(epochs=0.01).updates(30) == 1
    assert sft(epochs=3.0, max_updates=5).updates(30) == 5
    assert [sft(warmup=w).warmup_updates(20) for w in (0.0, 0.03, 0.5)] == [0, 1, 10]


# -- training --


def test_a_long_curve_is_averaged_over_bins_and_keeps_its_last_update():
    history = [{"step": i, "loss": float(i)} for i in range(1, 1002)]
    trained = Trained(None, True, history, 1001, 0, Cost(wall_seconds=0.0))
    series = trained.series(loss="loss")
    assert len(series.rows) <= 400
    assert series.rows[:2] == [[3, 2.0], [6, 5.0]]
    assert series.rows[-1] == [1001, 1000.5]
    assert trained.final("loss", 0.01) == pytest.approx(np.mean(range(992, 1002)))
    assert Trained(None, True, history[:7], 7, 0, trained.cost).series(loss="loss").column("loss") == list(range(1, 8))


def test_the_error_of_a_final_mean_counts_its_updates_and_is_none_where_a_deviation_is_none():
    history = [{"step": i, "loss": 1.0, "deviation": 3.0} for i in range(1, 101)]
    trained = Trained(None, True, history, 100, 0, Cost(wall_seconds=0.0))
    assert trained.error("deviation", 0.05, count=4) == pytest.approx(3.0 / 20**0.5)
    for gap in ({"deviation": math.nan}, {"deviation": None}, {}):
        broken = [*history[:-1], {"step": 100, "loss": 1.0, **gap}]
        assert Trained(None, True, broken, 100, 0, trained.cost).error("deviation", 0.05, count=4) is None


def test_training_leaves_a_model_that_loads_and_has_the_measured_loss(unbroken, tmp_path, parent, data):
    result, _ = unbroken
    assert result.outcome == "trained"
    assert result.metrics["updates"] == 16
    assert result.metrics["eval_loss"] < result.metrics["eval_loss_before"] - 1.0
    assert result.metrics["eval_ppl"] == pytest.approx(math.exp(result.metrics["eval_loss"]))
    assert [row[0] for row in result.series["train"].rows] == list(range(1, 17))
    assert [row[0] for row in result.series["eval"].rows] == [0, 16]
    assert result.series["train"].column("lr")[:3] == [0.0, 0.005, 0.01]  # two updates of warm-up
    run_job(sft(), inputs(tmp_path, data, of=parent), CPU)
    tokenizer = load_tokenizer(tmp_path / "model")
    texts = examples.instructions(examples.placed_items(data, "validation"))
    rows = [examples.encode_instruction(tokenizer, *text, 96, "end") for text in texts]
    sums, counts = measure.token_losses(load_model(tmp_path / "model"), rows, False, "fp32")
    assert sums.sum() / counts.sum() == pytest.approx(result.metrics["eval_loss"], rel=1e-6)


def test_two_runs_are_equal_bit_for_bit_and_another_seed_is_not(unbroken, tmp_path, parent, data):
    again = run_job(sft(), inputs(tmp_path / "a", data, of=parent), CPU)
    same_numbers(*unbroken, again, weights(tmp_path / "a" / "model"))
    other = run_job(sft(seed=2), inputs(tmp_path / "b", data, of=parent), CPU)
    assert other.metrics["eval_loss"] != again.metrics["eval_loss"]


@pytest.mark.parametrize("loss_on", ["sequence", "answer"])
def test_the_first_loss_is_the_mean_over_the_tokens_that_count(tmp_path, parent, loss_on):
    data = write_set(tmp_path, train=instruction_items(4), validation=instruction_items(2))
    job = sft(loss_on=loss_on, epochs=1.0, block=120)
    result = run_job(
        job, inputs(tmp_path / "job", data, of=parent), Machine(device="cpu", progress=False, micro_batch=2)
    )
    tokenizer = load_tokenizer(parent)
    texts = examples.instructions(examples.placed_items(data, "train"))
    rows = [examples.encode_instruction(tokenizer, *text, 120, "end") for text in texts]
    sums, counts = measure.token_losses(load_model(parent).double(), rows, loss_on == "answer", "fp32")
    assert result.series["train"].rows[0][1] == pytest.approx(sums.sum() / counts.sum(), rel=1e-5)


def test_the_micro_batch_changes_nothing_beyond_rounding(unbroken, tmp_path, parent, data):
    result = run_job(sft(), inputs(tmp_path, data, of=parent), Machine(device="cpu", progress=False, micro_batch=1))
    found, expected = result.series["train"].column("loss"), unbroken[0].series["train"].column("loss")
    assert np.allclose(found, expected, rtol=2e-5)
    assert result.cost.micro_batch == 1
    with pytest.raises(DataError, match="micro_batch 3 must divide the 4"):
        run_job(sft(), inputs(tmp_path / "x", data, of=parent), Machine(device="cpu", micro_batch=3))


@pytest.mark.parametrize("numerics", ["fp32_master", "pure_bf16"])
def test_other_numerics_train_and_keep_their_kind_of_weights(unbroken, tmp_path, parent, data, numerics):
    result = run_job(sft(numerics=numerics), inputs(tmp_path, data, of=parent), CPU)
    assert result.metrics["eval_loss"] == pytest.approx(unbroken[0].metrics["eval_loss"], abs=0.1)
    dtypes = {tensor.dtype for tensor in weights(tmp_path / "model").values()}
    assert dtypes == {torch.bfloat16 if numerics == "pure_bf16" else torch.float32}


def test_chosen_answers_train_the_dialogue_without_the_rejected_ones(tmp_path, parent, tokenizer):
    data = write_set(tmp_path, train=preference_items(20), validation=preference_items(6, start=50))
    result = run_job(
        sft(template="chosen", dataset="bundled:hh_rlhf_600", loss_on="answer"),
        inputs(tmp_path / "job", data, of=parent),
        CPU,
    )
    assert result.metrics["eval_loss"] < result.metrics["eval_loss_before"]
    model = load_model(tmp_path / "job" / "model")
    good, bad = (
        examples.encode_answer(tokenizer, examples.encode(tokenizer, "\n\nHuman: Say 60.\n\nAssistant:"), text, 20)
        for text in (" good good", " bad bad")
    )
    found = measure.answer_log_probs(model, [good, bad], 1.0, "fp32")
    assert found[0] > found[1]


def test_held_out_losses_come_at_the_updates_that_are_asked_for(tmp_path, parent, data):
    result = run_job(sft(eval_every=6), inputs(tmp_path, data, of=parent), CPU)
    assert [row[0] for row in result.series["eval"].rows] == [0, 6, 12, 16]
    assert result.series["eval"].rows[-1][1] == result.metrics["eval_loss"]


def test_held_out_texts_that_were_trained_on_are_labelled(tmp_path, parent):
    data = write_set(tmp_path, train=instruction_items(8), validation=instruction_items(8, start=5))
    result = run_job(sft(epochs=1.0), inputs(tmp_path / "job", data, of=parent), CPU)
    assert result.metrics["eval_examples_seen"] == 3
    assert any("3 held-out texts" in label for label in result.labels)


def test_a_loss_that_is_no_number_ends_training_and_leaves_no_model(tmp_path, parent, data):
    job = sft(peak_lr=1e30, grad_clip=0.0, epochs=20.0, warmup=0.0)
    result = run_job(job, inputs(tmp_path, data, of=parent), CPU)
    assert result.outcome == "not_finite"
    assert result.metrics["eval_loss"] is None
    assert result.metrics["updates"] < 10
    assert result.metrics["updates"] == len(result.series["train"].rows)
    assert not list((tmp_path / "model").iterdir())
    json.dumps(result.metrics, allow_nan=False)


def test_a_parent_without_weights_is_named(tmp_path, data):
    with pytest.raises(JobError, match="make"):
        run_job(sft(), inputs(tmp_path, data, of=tmp_path / "nothing"), CPU)


# -- packing --


@pytest.fixture(scope="module")
def llama(tmp_path_factory, tokenizer):
    """A model of transformers' own, which reads borders from position ids."""
    from transformers import LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 40, "num_attention_heads": 2, "num_hidden_layers": 2}
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder, fresh(LlamaForCausalLM, vocab_size=1024, **shape), tokenizer)
    return folder


def test_the_decoder_and_transformers_own_keep_packed_texts_apart(parent, llama):
    assert measure.keeps_texts_apart(load_model(parent))
    assert measure.keeps_texts_apart(load_model(llama))


def test_a_model_that_mixes_packed_texts_is_refused(tmp_path, llama, data, monkeypatch):
    from transformers import LlamaForCausalLM

    real = LlamaForCausalLM.forward
    blind = lambda self, position_ids=None, **more: real(self, **more)  # noqa: E731
    monkeypatch.setattr(LlamaForCausalLM, "forward", blind)
    assert not measure.keeps_texts_apart(load_model(llama))
    with pytest.raises(JobError, match="mix the texts of a packed block"):
        run_job(sft(packing=True), inputs(tmp_path, data, of=llama), CPU)


@pytest.mark.parametrize("name", ["parent", "llama"])
def test_packed_texts_give_the_loss_that_they_have_alone(tmp_path, request, name):
    model = request.getfixturevalue(name)
    data = write_set(tmp_path, train=instruction_items(6), validation=instruction_items(2))
    job = sft(packing=True, block=300, batch=4, epochs=1.0)  # three texts of at most 100 ids fit into a block
    result = run_job(job, inputs(tmp_path / "job", data, of=model), CPU)
    tokenizer = load_tokenizer(model)
    texts = examples.instructions(examples.placed_items(data, "train"))
    rows = [examples.encode_instruction(tokenizer, *text, 300, "end") for text in texts]
    sums, counts = measure.token_losses(load_model(model), rows, False, "fp32")
    assert result.metrics["updates"] == 1
    assert result.series["train"].rows[0][1] == pytest.approx(sums.sum() / counts.sum(), rel=1e-5)


# -- checkpoints --


@pytest.mark.parametrize("update", [3, 8, 11])  # within the first epoch, at its end, within the second
def test_a_stopped_run_ends_in_the_same_bits(unbroken, tmp_path, parent, data, update):
    given = inputs(tmp_path, data, of=parent)
    with pytest.raises(Interrupted, match=f"update {update} of 16"):
        run_job(sft(), given, Machine(device="cpu", progress=False, stop_after=update))
    result = run_job(sft(), given, CPU)
    assert result.cost.resumed_from == [update]
    same_numbers(*unbroken, result, weights(given.model))


def test_a_killed_process_goes_on_and_ends_in_the_same_bits(unbroken, tmp_path, parent, data):
    home = tmp_path / "home"
    home.mkdir()
    environment = job_environment(HF_HOME=str(home / "hf"), HOME=str(home), XDG_CACHE_HOME=str(home / "cache"))
    given = killed(tmp_path, "sft", data, environment, of=parent)
    assert sorted(p.name for p in (given.work / "checkpoints").iterdir()) == ["checkpoint-4", "checkpoint-6"]
    result = run_job(sft(), given, CPU)
    assert result.cost.resumed_from == [4]  # the third was not finished
    same_numbers(*unbroken, result, weights(given.model))
    assert not [path for path in home.rglob("*") if path.is_file()], "the home of the user was written to"


def test_a_request_to_end_leaves_a_checkpoint(tmp_path, parent, data, monkeypatch):
    real, calls = measure.token_losses, []

    def ask_at_the_second(*arguments):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(measure, "token_losses", ask_at_the_second)
    given = inputs(tmp_path, data, of=parent)
    with pytest.raises(Interrupted, match=r"update 5 of 16"):
        run_job(sft(eval_every=5), given, CPU)
    assert [p.name for p in (given.work / "checkpoints").iterdir()] == ["checkpoint-5"]


@pytest.fixture
def stopped(tmp_path, parent, data):
    given = inputs(tmp_path, data, of=parent)
    machine = Machine(device="cpu", progress=False, stop_after=6, checkpoint_updates=2)
    with pytest.raises(Interrupted):
        run_job(sft(), given, machine)
    assert sorted(p.name for p in (given.work / "checkpoints").iterdir()) == ["checkpoint-4", "checkpoint-6"]
    return given


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state.pth", STATE])
def test_a_damaged_checkpoint_is_named_and_left_alone(stopped, name):
    path = stopped.work / "checkpoints" / "checkpoint-6" / name
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(
        CheckpointError, match=rf"checkpoint-6/{name}: (missing, )?truncated or altered; delete .*checkpoint-4"
    ):
        run_job(sft(), stopped, CPU)
    assert path.stat().st_size == len(content) // 2


def test_a_checkpoint_that_a_kill_left_unfinished_is_passed_over(unbroken, stopped):
    (stopped.work / "checkpoints" / "checkpoint-6" / STATE).unlink()
    result = run_job(sft(), stopped, CPU)
    assert result.cost.resumed_from == [4]
    same_numbers(*unbroken, result, weights(stopped.model))


def test_a_checkpoint_of_another_job_is_refused(stopped):
    with pytest.raises(CheckpointError, match="checkpoint of another job"):
        run_job(sft(seed=5), stopped, CPU)


def test_a_full_disk_is_said_and_the_checkpoint_before_stays(tmp_path, parent, data, monkeypatch):
    import errno

    from paperlm.errors import PaperLMError
    from paperlm.finetune import common

    real, calls = common.write_sealed, []

    def full_at_the_second(path, what, value):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, what, value)

    monkeypatch.setattr(common, "write_sealed", full_at_the_second)
    given = inputs(tmp_path, data, of=parent)
    with pytest.raises(PaperLMError, match="no space left for the checkpoint"):
        run_job(sft(), given, Machine(device="cpu", progress=False, checkpoint_updates=3))
    assert [p.name for p in (given.work / "checkpoints").iterdir()] == ["checkpoint-3"]


def test_no_file_of_a_checkpoint_is_unpickled_with_code(stopped, monkeypatch):
    class Evil:
        def __reduce__(self):
            return (print, ("executed",))

    folder = stopped.work / "checkpoints" / "checkpoint-6"
    torch.save({"evil": Evil()}, folder / "rng_state.pth")
    from paperlm.files import sha256_of, write_sealed

    state = json.loads((folder / STATE).read_text())
    state["sha256"]["rng_state.pth"] = sha256_of(folder / "rng_state.pth")
    write_sealed(folder / STATE, state["what"], state)
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        run_job(sft(), stopped, CPU)
