"""The training loss as a setting of a run: the same number fused with the head, and what each variant leaves out."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from support import smoke_run
from support_cce_training import trained

from paperlm.errors import CheckpointError, Interrupted, SpecError
from paperlm.jobs.pretrain import Loss
from paperlm.models import losses
from paperlm.models.llama import IGNORE_INDEX, PaperLlamaConfig, PaperLlamaForCausalLM
from paperlm.train.language_model import SummedLoss

fused = pytest.mark.parametrize("loss", losses.FUSED)


def model_of(vocab: int, width: int = 32, std: float = 0.02) -> PaperLlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    return PaperLlamaForCausalLM(PaperLlamaConfig(vocab_size=vocab, initializer_range=std, **shape)).train()


def batch(vocab: int, sequences: int = 3, length: int = 33) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and labels of which the first sequence has only 20."""
    ids = torch.randint(vocab, (sequences, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 20:] = IGNORE_INDEX
    return ids, labels


def head_gradient(model: PaperLlamaForCausalLM, loss: str, *inputs: torch.Tensor) -> torch.Tensor:
    """In bfloat16, as trained on a GPU: the filter's threshold is 2^-12."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        model.summed_loss(*inputs, loss).backward()
    return model.lm_head.weight.grad.clone()


# -- the number ----


@fused
def test_a_fused_loss_and_its_gradients_are_those_of_materialised_cross_entropy(loss):
    model, (ids, labels) = model_of(257, std=0.2), batch(257)
    found = model.summed_loss(ids, labels, loss)
    found.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.double()
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    truth = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
    truth.backward()
    assert found.item() == pytest.approx(truth.item(), rel=1e-6)
    for gradient, p in zip(gradients, model.parameters(), strict=True):
        assert (gradient - p.grad).norm() < 1e-5 * p.grad.norm()


@fused
def test_the_loss_is_traced_without_a_graph_break_under_autocast(loss):
    model, inputs = model_of(129), batch(129)
    torch.compiler.reset()
    values = []
    for module in (
        SummedLoss(model, loss),
        torch.compile(SummedLoss(model, loss), fullgraph=True, backend="aot_eager"),
    ):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = module(*inputs)
        value.backward()
        values.append((value.detach(), model.lm_head.weight.grad.clone()))
    torch.testing.assert_close(values[1], values[0], rtol=1e-5, atol=1e-6)


def test_under_pure_bf16_the_fused_loss_is_a_float32_number():
    model, (ids, labels) = model_of(300), batch(300)
    for p in model.parameters():
        p.data = p.data.bfloat16()
    values = [model.summed_loss(ids, labels, loss) for loss in ("cross_entropy", "cce_kahan_full_c")]
    assert {v.dtype for v in values} == {torch.float32}
    assert values[1].item() == pytest.approx(values[0].item(), rel=1e-3)


# -- what a variant leaves out ----

VOCAB = 8192
"At random weights each probability is near 2^-13, so that only tiles with a target are kept."


@pytest.fixture(scope="module")
def gradients() -> dict[str, torch.Tensor]:
    model = model_of(VOCAB)
    ids, labels = batch(4)  # so that at most four groups of 128 ids hold a target, in any order
    return {loss: head_gradient(model, loss, ids, labels) for loss in ("cross_entropy", *losses.FUSED)}


@pytest.mark.parametrize("loss", ["cce", "cce_kahan", "cce_kahan_full_e"])
def test_ids_in_dropped_tiles_get_no_gradient_where_the_heads_gradient_is_filtered(gradients, loss):
    without = (gradients[loss] == 0).all(1)
    assert VOCAB - 4 * 128 <= without.sum() <= VOCAB - 128 and not without[:4].any()


@pytest.mark.parametrize("loss", ["cce_kahan_full_c", "cce_exact", "cce_exact_kept"])
def test_every_id_gets_its_gradient_where_the_heads_gradient_is_not_filtered(gradients, loss):
    truth = gradients["cross_entropy"]
    assert not (truth == 0).all(1).any()
    assert (gradients[loss] - truth).norm() / truth.norm() < 0.01


def test_full_c_still_filters_the_gradient_of_the_states():
    model, (ids, labels) = model_of(VOCAB), batch(128)
    states = {}
    for loss in ("cce_exact", "cce_kahan", "cce_kahan_full_c", "cce_kahan_full_e"):
        head_gradient(model, loss, ids, labels)
        states[loss] = model.model.norm.weight.grad.clone()
    assert torch.equal(states["cce_kahan"], states["cce_kahan_full_c"])
    assert torch.equal(states["cce_exact"], states["cce_kahan_full_e"])
    assert not torch.equal(states["cce_kahan"], states["cce_exact"])


@pytest.mark.parametrize(("loss", "kept"), [("cce_exact", False), ("cce_exact_kept", True)])
def test_whether_logits_are_kept_is_the_runs_choice_and_not_the_machines(monkeypatch, loss, kept):
    asked = []

    def spy(hidden, weight, target, **keywords):
        asked.append(keywords["keep_logits"])
        return hidden.sum()

    monkeypatch.setattr(losses, "linear_cross_entropy", spy)
    model_of(40).summed_loss(*batch(40), loss)
    assert asked == [kept]


def test_an_unknown_loss_is_refused_with_the_nearest_name():
    with pytest.raises(SpecError, match="unknown loss 'cce_kahan_fullc'; did you mean 'cce_kahan_full_c'"):
        model_of(40).summed_loss(*batch(40), "cce_kahan_fullc")


# -- as a setting ----


def test_every_loss_that_a_run_may_name_is_one_that_the_model_has():
    assert set(get_args(Loss)) == {losses.MATERIALISED, *losses.FUSED}


def test_a_run_without_the_new_settings_keeps_its_name_and_its_record():
    job = smoke_run()
    assert (job.loss, job.curve) == ("cross_entropy", "thinned")
    assert not {"loss", "curve"} & job.canonical().keys() and not {"loss", "curve"} & job.fields().keys()
    assert smoke_run(loss="cross_entropy", curve="thinned").job_id == job.job_id


def test_another_loss_is_another_run_and_says_so_in_its_name():
    names = {smoke_run(loss=loss).job_id for loss in get_args(Loss)} | {smoke_run(curve="every_update").job_id}
    assert len(names) == len(get_args(Loss)) + 1
    assert smoke_run(loss="cce_kahan", seed=2).job_id.startswith("llama_71m-mix_ln-cce_kahan-s2-")
    assert smoke_run(loss="cce_kahan").canonical()["loss"] == "cce_kahan"


def test_only_a_run_with_a_fused_loss_rests_on_the_behaviour_of_the_kernels():
    assert smoke_run().behaviours().keys() == {"pretrain"}
    for loss in losses.FUSED:
        assert smoke_run(loss=loss).behaviours().keys() == {"pretrain", "linear_cross_entropy"}


def test_a_run_trains_with_its_loss(manifest, tmp_path, monkeypatch):
    used = []
    original = losses.linear_cross_entropy
    spy = lambda *a, **k: used.append(k["preset"]) or original(*a, **k)  # noqa: E731
    monkeypatch.setattr(losses, "linear_cross_entropy", spy)
    found = {}
    for loss in ("cross_entropy", "cce_kahan_full_c"):
        job = smoke_run(steps=3, loss_group=4, loss=loss)
        found[loss] = trained(job, manifest, tmp_path / loss)
        assert used == ["cce_kahan_full_c"] * (3 if loss == "cce_kahan_full_c" else 0)
    mine, right = found["cce_kahan_full_c"], found["cross_entropy"]
    assert mine.metrics["loss_true"] == pytest.approx(right.metrics["loss_true"], rel=1e-5)
    for a, b in zip(mine.series["train"].rows, right.series["train"].rows, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("numerics", ["pure_bf16", "fp32_master"])
def test_on_a_hopper_gpu_training_with_the_kernels_follows_pytorch(manifest, tmp_path, numerics):
    found = {}
    for loss in ("cce_exact_kept", "cross_entropy"):
        job = smoke_run(steps=30, loss_group=4, numerics=numerics, loss=loss)
        found[loss] = trained(job, manifest, tmp_path / loss, device="cuda")
    mine, right = found.values()
    for a, b in zip(mine.series["train"].rows, right.series["train"].rows, strict=True):
        assert a == pytest.approx(b, rel=5e-4)
    assert mine.metrics["loss_true"] == pytest.approx(right.metrics["loss_true"], rel=5e-4)
    assert mine.metrics["loss_true"] < mine.series["train"].rows[0][2] - 0.05, "it learnt something"


def test_a_checkpoint_of_another_loss_is_refused_by_that_name(manifest, tmp_path):
    with pytest.raises(Interrupted):
        trained(smoke_run(loss="cce"), manifest, tmp_path, stop_after=1)
    with pytest.raises(CheckpointError, match=r"differs in loss\)"):
        trained(smoke_run(), manifest, tmp_path)
