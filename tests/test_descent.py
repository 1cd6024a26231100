"""Pre-training by plain descent, with weights in stores: equal bits however weights lie and whenever they are updated,
also when the run is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paperlm_kernels.stored import PackedStore, stored_weights
from pydantic import ValidationError
from safetensors.torch import load_file
from support import smoke_run
from support_engine import numbers, task_of, trained
from support_stored import TABLES

from paperlm.data.shards import TokenShards
from paperlm.data.tokenizer import TextTokenizer
from paperlm.errors import DataError, Interrupted
from paperlm.jobs.base import Machine, Trunk
from paperlm.jobs.continue_pretrain import ContinuePretrain
from paperlm.jobs.pretrain import Pretrain
from paperlm.models.folder import load_model
from paperlm.train.language_model import of_weights

OF_DESCENT = {
    "adam_betas": None, "adam_eps": None, "weight_decay": 0.0, "grad_clip": 0.0, "loss_group": 4, "global_batch": 4,
    "numerics": "pure_bf16", "peak_lr": 0.3, "warmup_fraction": 0.0, "norm": {"name": "pre_ln"},
}  # fmt: skip
# wide enough that its weights are coded, and not kept as they are
SHAPE = {"hidden_size": 192, "intermediate_size": 256, "n_heads": 4, "n_layers": 2}


def descent(**changes: Any) -> Pretrain:
    settings = OF_DESCENT | SHAPE | {"steps": 8, "eval_every": 4, "optimizer": "lomo", "weights": "packed"}
    return smoke_run(**settings | changes)


@pytest.fixture(scope="module")
def packed(manifest, tmp_path_factory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("packed")
    return trained(descent(), manifest, folder), folder


def test_packed_and_raw_weights_updated_within_or_after_the_backward_pass_end_in_the_same_bits(
    manifest, tmp_path, packed
):
    result, folder = packed
    for optimizer, weights in (("lomo", "raw"), ("sgd", "raw"), ("sgd", "packed")):
        other = trained(descent(optimizer=optimizer, weights=weights), manifest, tmp_path / optimizer / weights)
        for name in ("weights_hash", "loss_true"):
            assert other.metrics[name] == result.metrics[name]
        assert other.series["train"] == result.series["train"]
    plain = load_file(tmp_path / "lomo/raw/model/model.safetensors")
    mine = load_file(folder / "model/model.safetensors")
    assert plain.keys() == mine.keys() and all(torch.equal(plain[name], mine[name]) for name in plain)


def test_its_bytes_are_those_of_the_stores_and_fewer_than_of_plain_weights(manifest, tmp_path, packed):
    metrics = packed[0].metrics
    raw = trained(descent(weights="raw"), manifest, tmp_path / "raw").metrics
    vanilla = trained(descent(weights="raw", optimizer="sgd"), manifest, tmp_path / "sgd").metrics
    assert raw["bits_per_weight"] == 16 and raw["weight_bytes"] == 2 * raw["parameters"]
    tables = 8 * 14 * TABLES / (2 * (4 * 192**2 + 3 * 192 * 256))  # seven matrices a block
    assert 10.5 < metrics["bits_per_weight"] - tables < 13
    assert metrics["state_bytes"] < raw["state_bytes"] < vanilla["state_bytes"] == 4 * raw["parameters"]
    assert metrics["parameters"] == raw["parameters"]


def test_bytes_of_weights_are_those_of_packing_them_afresh_whatever_was_packed_before(manifest):
    task = task_of(descent(), manifest)
    stores = [weight.store for weight in stored_weights(task.model).values()]
    for store in stores:
        store.write(store.read() / 4)
    fresh = [PackedStore(store.read()).nbytes for store in stores]
    assert [store.nbytes for store in stores] != fresh, "with the codebook of other values"
    of_weights(task.settings, task.model)
    assert [store.nbytes for store in stores] == fresh


def test_its_loss_of_a_word_is_of_the_held_out_words_whatever_its_tokens_are(manifest, packed):
    metrics, shards = packed[0].metrics, TokenShards(manifest, "validation")
    texts = TextTokenizer(descent().tokenizer).inner.decode_batch(shards.rows(np.arange(len(shards))).tolist())
    assert metrics["validation_words"] == pytest.approx(sum(len(text.split()) for text in texts), rel=0.05)
    # a row's first token has the row's mean loss
    least = metrics["loss_true"] * metrics["validation_tokens"] / metrics["validation_words"]
    assert least < metrics["loss_word"] < 1.1 * least


def test_a_run_that_is_stopped_goes_on_bit_for_bit(manifest, tmp_path, packed):
    result, folder = packed
    with pytest.raises(Interrupted):
        trained(descent(), manifest, tmp_path, Machine(device="cpu", progress=False, stop_after=3))
    resumed = trained(descent(), manifest, tmp_path)
    assert resumed.cost.resumed_from == [3] and numbers(resumed) == numbers(result)
    files = [load_file(path / "model/model.safetensors") for path in (tmp_path, folder)]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def test_the_model_that_it_leaves_is_a_plain_one(packed):
    model = load_model(packed[1] / "model")
    assert not stored_weights(model) and model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == packed[0].metrics["parameters"]


def test_a_run_can_be_gone_on_with_from_one_of_its_states(manifest, tmp_path, packed):
    from paperlm.jobs.base import Inputs
    from paperlm.jobs.continue_pretrain import run

    trained(descent(), manifest, tmp_path, keep=(Trunk(4),))
    job = ContinuePretrain(of=descent(), at=4, quantization=None)
    (tmp_path / "branch").mkdir()
    inputs = Inputs(
        data=(manifest,), models={"of": tmp_path / "model/trunk-4"}, work=tmp_path / "work_of_it",
        model=tmp_path / "branch",
    )  # fmt: skip
    rest = run(job, inputs, Machine(device="cpu", progress=False))
    assert rest.metrics["weights_hash"] == packed[0].metrics["weights_hash"]


def test_weights_in_stores_are_stored_before_the_first_update_and_recompute_activations(manifest):
    task = task_of(descent(), manifest)
    assert len(stored_weights(task.model)) == 7 * 2 and task.model.model.gradient_checkpointing
    assert not any(weight.keep_recomputed for weight in stored_weights(task.model).values())  # which no byte counts
    assert not task.compiles and task_of(descent(weights="plain"), manifest).compiles


def test_an_update_in_parts_is_refused_where_gradients_cannot_be_added_up(manifest):
    with pytest.raises(DataError, match="leave --micro-batch out"):
        task_of(descent(), manifest, micro_batch=2)
    assert task_of(descent(optimizer="sgd"), manifest, micro_batch=2).micro_batch == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adam_eps": 1e-8}, "null for sgd and lomo"),
        ({"optimizer": "adam", "weights": "plain"}, "null for sgd and lomo"),
        ({"optimizer": "adam", "adam_betas": (0.9, 0.9), "adam_eps": 1e-8}, "by sgd or lomo, not by adam"),
        ({"weight_decay": 0.1}, "neither decays nor clips"),
        ({"loss_group": 2}, "loss_group is global_batch"),
        ({"numerics": "fp32"}, "numerics is pure_bf16, not fp32"),
        ({"quantization": "b158", "sub_norm": True}, "leave one out"),
    ],
)
def test_settings_that_do_not_fit_an_optimizer_are_refused(changes, words):
    with pytest.raises(ValidationError, match=words):
        descent(**changes)


def test_its_name_says_how_it_was_trained():
    assert "-lomo-packed-s" in descent().slug()
    assert descent(weights="plain", optimizer="sgd").slug().count("-sgd-s") == 1
