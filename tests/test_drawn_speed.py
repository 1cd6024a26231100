"""Speed of drawn models: what is timed is the model's own pass, with its weights in their stores."""

from __future__ import annotations

import pytest
import torch
from paperlm_kernels.stored import stored_weights
from pydantic import ValidationError

from paperlm.evaluate.drawn import drawn_into_stores
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.drawn_speed import DrawnSpeed, forward_of, run

LLAMA = {
    "architecture": "llama", "hidden_size": 192, "intermediate_size": 256, "n_heads": 4, "n_kv_heads": 2,
    "head_size": 48, "n_layers": 2, "vocab_size": 512, "std": 0.02, "batch": 2, "window": 12,
}  # fmt: skip
T5 = {**LLAMA, "architecture": "t5", "n_kv_heads": None, "answer": 7}


def passed(shape, **settings):
    """The logits of a pass, and the model."""
    job = DrawnSpeed(**shape | settings)
    model = drawn_into_stores(job, torch.device("cpu"))
    return forward_of(job, model, torch.device("cpu"))(), model


@pytest.mark.parametrize("shape", [LLAMA, T5], ids=["llama", "t5"])
def test_a_pass_without_loss_has_the_logits_of_the_plain_model_bit_for_bit(shape):
    (plain, whole), (packed, model) = passed(shape, store="plain"), passed(shape, store="packed")
    assert plain.shape == (2, shape.get("answer", 12), 512) and plain.dtype == torch.bfloat16
    assert torch.equal(plain, packed) and bool(plain.isfinite().all())
    assert not stored_weights(whole) and len(stored_weights(model)) == (14 if shape is LLAMA else 32)


def test_a_pass_with_fewer_bits_has_others_and_matrices_have_the_deviation_that_is_asked_for():
    (plain, model), (rounded, _) = passed(LLAMA, store="plain"), passed(LLAMA, store="packed", mant_bits=0)
    assert not torch.equal(plain, rounded)
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.bfloat16
        if weight.ndim > 1:
            assert float(weight.detach().float().std()) == pytest.approx(0.02, rel=0.05), name
        else:
            assert bool((weight == 1).all()), name


def test_weights_that_stay_in_float32_do_so():
    logits, model = passed(T5, store="packed", in_float32=[".wo."])
    apart = {name for name, weight in model.named_parameters() if weight.dtype == torch.float32}
    assert len(apart) == 4 and all(".wo." in name for name in apart) and bool(logits.isfinite().all())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({**LLAMA, "answer": 7}, "llama has none: leave it out"),
        ({**T5, "answer": None}, "say how many tokens its decoder reads"),
        ({**LLAMA, "n_kv_heads": 3}, "does not divide n_heads"),
    ],
)
def test_settings_that_do_not_belong_together_are_refused(settings, said):
    with pytest.raises(ValidationError, match=said):
        DrawnSpeed(store="packed", **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU times it")
def test_without_a_gpu_it_is_blocked_and_says_why(tmp_path):
    found = run(DrawnSpeed(store="packed", **LLAMA), Inputs(work=tmp_path), Machine(device="cpu"))
    assert found.outcome == "blocked" and "there is none here" in found.reason and not found.metrics


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("store", ["plain", "packed"])
def test_on_a_gpu_it_has_a_speed_and_the_bytes_of_its_weights(store, tmp_path):
    found = run(DrawnSpeed(store=store, **LLAMA), Inputs(work=tmp_path), Machine(device="cuda"))
    assert found.outcome == "measured" and found.metrics["iterations_per_second"] > 0
    assert 0 < found.metrics["weight_bytes"] < found.metrics["peak_bytes"]
