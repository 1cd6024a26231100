"""Perplexity of answers by an encoder-decoder whose weights are stored in fewer bits."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from support_field_values import WIDE
from support_small_jobs import job

from paperlm.data.items import prepare_items
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.stored_answers import run
from paperlm.jobs.text_to_sql import run as train
from paperlm.models.folder import load_model, load_tokenizer

QUIET = Machine(device="cpu", progress=False)
T5 = job("text_to_sql", **WIDE)
PACKED = {"store": "packed", "mant_bits": 7, "block_norm": None}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_items(T5.data()[0], tmp_path_factory.mktemp("sql"))


@pytest.fixture(scope="module")
def model(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    trained = train(T5, Inputs(data=(data,), work=folder.parent / "work", model=folder), QUIET)
    assert trained.outcome == "trained"
    return folder, trained


def made(data, model, **changes):
    wanted = job("stored_answers", of=T5, **changes)
    return run(wanted, Inputs(data=(data,), models={"of": model[0]}, work=model[0].parent), QUIET)


def test_a_model_that_writes_sql_is_left_with_plain_weights_and_a_tokenizer(model):
    folder, trained = model
    left = load_model(folder, head="own", dtype=torch.bfloat16)
    assert sum(p.numel() for p in left.parameters()) == trained.metrics["parameters"]
    assert load_tokenizer(folder)("SELECT 1")["input_ids"][-1] != load_tokenizer(folder).eos_token_id


def test_packed_and_raw_weights_leave_the_same_model(data, tmp_path):
    states = []
    for weights in ("raw", "packed"):
        folder = tmp_path / weights
        folder.mkdir()
        one = job("text_to_sql", **WIDE, weights=weights)
        train(one, Inputs(data=(data,), work=tmp_path / f"{weights}-work", model=folder), QUIET)
        states.append(load_model(folder, head="own", dtype=torch.bfloat16).state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_without_loss_every_batch_has_the_loss_of_the_plain_model_which_is_that_behind_training(data, model):
    plain = made(data, model, store="plain", mant_bits=7, block_norm=None)
    packed = made(data, model, **PACKED)
    assert packed.metrics["losses_hash"] == plain.metrics["losses_hash"]
    assert packed.metrics["weight_bytes"] < plain.metrics["weight_bytes"] == 2 * plain.metrics["parameters"]
    losses, tokens = (plain.series["batches"].column(name) for name in ("mean_loss", "tokens"))
    assert plain.metrics["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)))
    by_token = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)
    assert by_token == pytest.approx(model[1].metrics["loss"], rel=5e-3)
    assert plain.metrics["questions"] == 7 and len(losses) == 3


def test_fewer_bits_of_the_mantissa_take_fewer_bytes(data, model):
    sizes = [made(data, model, mant_bits=bits).metrics["weight_bytes"] for bits in (0, 1, 3)]
    assert sizes == sorted(set(sizes)) and sizes[-1] < made(data, model, **PACKED).metrics["weight_bytes"]


def test_second_projections_in_float32_take_four_bytes_and_bring_the_loss_closer_to_the_plain_ones(data, model):
    plain = made(data, model, store="plain", mant_bits=7, block_norm=None).metrics
    whole, apart = (
        made(data, model, store="nf4", mant_bits=7, block_norm=None, in_float32=names).metrics
        for names in ([], [".wo."])
    )
    theirs = 2 * T5.n_layers * T5.hidden_size * T5.intermediate_size
    assert whole["stored_weights"] - apart["stored_weights"] == theirs
    four_bits = theirs // 2 + 4 * theirs // 64 + 2 * T5.n_layers * 4 * 16  # codes, scales, and levels of each matrix
    assert apart["weight_bytes"] - whole["weight_bytes"] == 4 * theirs - four_bits
    assert abs(apart["loss"] - plain["loss"]) < abs(whole["loss"] - plain["loss"])


def test_other_layers_of_a_t5_cannot_lie_in_float32():
    with pytest.raises(ValidationError, match="in_float32"):
        job("stored_answers", in_float32=[".wi."])


def test_quantizers_that_are_not_installed_and_speed_without_a_gpu_are_blocked_with_the_reason(
    data, model, monkeypatch
):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    quantized = made(data, model, store="nf4", mant_bits=7, block_norm=None)
    assert quantized.outcome == "blocked" and "bitsandbytes" in quantized.reason
    timed = made(data, model, timed=True)
    assert timed.outcome == "blocked" and "GPU" in timed.reason


def test_a_state_that_such_a_model_does_not_leave_is_refused():
    with pytest.raises(ValidationError, match="has no other state"):
        job("stored_answers", at=2)


def test_the_head_of_a_t5_cannot_be_stored_apart_from_its_embedding():
    with pytest.raises(ValidationError, match="say all to store both, or paper for neither"):
        job("stored_answers", policy="all_linear")
