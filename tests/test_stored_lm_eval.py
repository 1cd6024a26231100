"""Multiple-choice tasks by a model whose weights are stored in fewer bits."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from support import smoke_run
from support_field_values import WIDE
from support_items import prepared, rewrite, without
from support_small_jobs import job

from paperlm.errors import DataError
from paperlm.evaluate.harness import evaluate
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.stored_lm_eval import run
from paperlm.models.folder import load_model, load_tokenizer, save_model, transformers_tokenizer
from paperlm.train.language_model import build_model

QUIET = Machine(device="cpu", progress=False)
MODEL = smoke_run(**WIDE, n_heads=4, norm={"name": "pre_ln"})
PLAIN = {"store": "plain", "mant_bits": 7, "block_norm": None}
LOSSLESS = {"store": "packed", "mant_bits": 7, "block_norm": None}
SETTINGS = {"of": MODEL, "items": 9, "few_shot": 0, "max_length": 48}


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("items"))["arc_easy"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = build_model(MODEL, torch.zeros(1, 8, dtype=torch.long), torch.device("cpu"))
    target = tmp_path_factory.mktemp("model")
    save_model(target, made, transformers_tokenizer("bpe1024", 48))
    return target


def asked(items, folder, **changes):
    wanted = job("stored_lm_eval", **SETTINGS | changes)
    return run(wanted, Inputs(data=(items,), models={"of": folder}, work=folder), QUIET)


def test_plain_weights_answer_as_the_model_does_in_bfloat16(items, folder):
    found = asked(items, folder, **PLAIN)
    model = load_model(folder, dtype=torch.bfloat16)
    same = evaluate(
        model, load_tokenizer(folder), ["arc_easy"], {"arc_easy": items}, few_shot=0, max_length=48, batch_size=16,
        limit=9, progress=False,
    )  # fmt: skip
    assert {name: found.metrics[name] for name in same.metrics} == same.metrics
    assert found.metrics["weight_bytes"] == 2 * sum(p.numel() for p in model.parameters())
    assert found.metrics["bits_per_weight"] == 16 and "arc_easy: a subset of 9 items" in found.labels
    assert found.standard_errors["likelihoods_hash"] == 0 < found.standard_errors["arc_easy/acc"]


def test_without_loss_every_option_has_the_likelihood_that_plain_weights_give_it(items, folder):
    plain, packed = asked(items, folder, **PLAIN), asked(items, folder, **LOSSLESS)
    assert packed.metrics["likelihoods_hash"] == plain.metrics["likelihoods_hash"]
    assert packed.metrics["weight_bytes"] < plain.metrics["weight_bytes"]
    rounded = asked(items, folder, mant_bits=0)
    assert rounded.metrics["likelihoods_hash"] != plain.metrics["likelihoods_hash"]
    assert rounded.metrics["weight_bytes"] < packed.metrics["weight_bytes"]


def test_unusable_items_are_named_before_a_model_is_read(items, folder, tmp_path):
    broken = rewrite(items, tmp_path, without("choices"))
    with pytest.raises(DataError, match="item 7: no 'choices'"):
        asked(broken, tmp_path / "no such folder", **PLAIN)


def test_a_store_that_is_not_to_be_had_is_blocked_with_the_reason(items, folder, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = asked(items, folder, store="nf4", mant_bits=7, block_norm=None)
    assert found.outcome == "blocked" and "bitsandbytes" in found.reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tasks": ["piqa", "piqa"]}, "named twice"),
        ({"store": "nf4"}, "mant_bits is of store packed"),
        ({"at": 99}, "has states 0 to 3 beside its end"),
    ],
)
def test_settings_of_tasks_and_of_stores_are_both_checked(change, words):
    with pytest.raises(ValidationError, match=words):
        job("stored_lm_eval", of=MODEL, **change)


def test_its_name_says_store_and_worked_examples():
    made = job("stored_lm_eval", of=MODEL, few_shot=5)
    assert made.slug() == f"stored_lm_eval-packed1_n512-5shot-{made.of.slug()}"
