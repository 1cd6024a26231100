"""Pre-training of models with BitNet's options: what a job says, that it learns, and that it goes on where it was."""

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from support import smoke_run
from support_engine import numbers, trained

from paperlm.errors import Interrupted
from paperlm.jobs.base import Machine
from paperlm.models.folder import load_model
from paperlm.models.packed import pack
from paperlm.models.quantized import QuantizedLinear
from paperlm.quantizers.presets import PRESETS


def bitnet_run(preset="a48_int4", **changes):
    return smoke_run(**PRESETS[preset], tie_word_embeddings=True, norm={"name": "pre_ln"}, **changes)


def test_a_presets_name_and_its_quantizers_written_out_are_the_same_job():
    named = smoke_run(quantization="a48_int4", sub_norm=True, hidden_act="relu2")
    short = {"weight": "ternary_absmean", "qkv": "int4_absmean", "gate_up": "int4_absmean", "down": "int8_absmax"}
    short["o"] = {"keep": 0.5, "name": "int8_absmax"}
    written = smoke_run(quantization=short, sub_norm=True, hidden_act="relu2")
    assert named == written and named.quantization == PRESETS["a48_int4"]["quantization"]
    assert "-a48_int4-" in named.slug() and "quantiz" not in smoke_run().slug()
    assert "-quantized-" in smoke_run(quantization="a48_int4").slug()


def test_a_job_without_quantizers_keeps_the_name_it_had():
    off = {"quantization": None, "sub_norm": False, "hidden_act": "silu", "tie_word_embeddings": False}
    assert smoke_run(**off).job_id == smoke_run().job_id
    assert not set(off) & set(smoke_run(**off).fields())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization": "a48_int8"}, "unknown preset 'a48_int8'; did you mean 'a48_int4'?"),
        ({"quantization": {"qkv": "int4_absmen"}}, "quantization.qkv.*did you mean 'int4_absmean'?"),
        ({"quantization": {"o": {"name": "int8_absmax", "keep": 0.3}}}, r"quantization.o: keep 0.3 of \d+ entries"),
        ({"fused_norms": True}, "fused_norms: there is no norm with a quantizer behind it; set sub_norm, and quantiz"),
        ({"fused_norms": True, "sub_norm": True, "quantization": {"qkv": "int8_absmax"}}, "fused_norms: there is no"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"tie_word_embeddings": True, "zero_last_embedding_row": True}, "tie_word_embeddings: the head would train"),
    ],
)
def test_a_wrong_setting_is_refused_before_any_training(changes, says):
    with pytest.raises(ValidationError, match=says):
        smoke_run(**changes)


def test_fused_norms_are_another_job_that_says_the_rules_of_their_kernel():
    apart, fused = bitnet_run(), bitnet_run(fused_norms=True)
    assert fused.job_id != apart.job_id and bitnet_run(fused_norms=False).job_id == apart.job_id
    assert set(fused.behaviours()) - set(apart.behaviours()) == {"rmsnorm_quantize"}


@pytest.mark.parametrize("numerics", ["fp32", "fp32_master"])
@pytest.mark.parametrize("preset", ["a48_int4", "full_fp4"])
def test_a_stopped_training_ends_as_an_unbroken_one_bit_for_bit(preset, numerics, manifest, tmp_path):
    job = bitnet_run(preset, steps=12, eval_every=6, numerics=numerics)
    unbroken = trained(job, manifest, tmp_path / "unbroken")
    for update in (5, 9):
        with pytest.raises(Interrupted):
            trained(job, manifest, tmp_path / "broken", Machine(device="cpu", progress=False, stop_after=update))
    resumed = trained(job, manifest, tmp_path / "broken")
    assert resumed.cost.resumed_from == [5, 9] and numbers(resumed) == numbers(unbroken)
    weights = [load_file(tmp_path / name / "model/model.safetensors") for name in ("unbroken", "broken")]
    assert weights[0].keys() == weights[1].keys() and "lm_head.weight" not in weights[0]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_quantized_model_learns_and_its_folder_has_the_evaluated_perplexity_latent_and_packed(manifest, tmp_path):
    job = bitnet_run(steps=120, eval_every=120, peak_lr=1e-2, numerics="fp32")
    result = trained(job, manifest, tmp_path)
    first, *_, last = result.series["train"].column("loss")
    assert last < first - 0.5 and result.outcome == "trained"
    model = load_model(tmp_path / "model")
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 7 * job.n_layers
    ids = torch.randint(2, job.vocab_size, (3, 40))
    assert torch.equal(model.token_losses(ids, ids), pack(model).token_losses(ids, ids))


def test_the_fused_loss_takes_the_tied_head(manifest, tmp_path):
    """Of one matrix for embedding and head, both gradients are in it: the exact fused loss trains as PyTorch's does."""
    ends = []
    for loss in ("cross_entropy", "cce_exact"):
        result = trained(bitnet_run(steps=6, eval_every=6, numerics="fp32", loss=loss), manifest, tmp_path / loss)
        ends.append(result.metrics["loss_true"])
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)
