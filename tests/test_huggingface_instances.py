"""The fused loss in copies, replicas, pickles and shards of a model of transformers."""

import copy
import functools
import io
import json
from types import MethodType

import pytest
import torch
import transformers
from paperlm_kernels import use_fused_loss
from paperlm_kernels.huggingface import remove_fused_loss
from support_cross_entropy import relative
from support_huggingface import batch_of, loss_and_gradients, model_of, rank_main
from torch import nn


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_replica_of_data_parallel_computes_with_its_own_weights_and_options():
    model = use_fused_loss(model_of("llama"), z_loss=0.1)
    replica = model._replicate_for_data_parallel()
    replica.lm_head = nn.Linear(32, 163, bias=False)
    other = copy.deepcopy(model)
    other.lm_head = replica.lm_head
    loss = replica(**batch_of()).loss
    assert torch.equal(loss, other(**batch_of()).loss) and not torch.equal(loss, model(**batch_of()).loss)
    assert replica(**batch_of()).logits is None and replica(**batch_of(), skip_logits=False).logits is not None


@pytest.mark.parametrize("copier", [pickled, copy.deepcopy], ids=["saved and loaded", "copied"])
def test_a_saved_or_copied_model_is_fused_with_the_same_options_and_its_own_weights(copier):
    model = use_fused_loss(model_of("gemma2"), z_loss=0.1)
    other = copier(model)
    mine, theirs = model(**batch_of()), other(**batch_of())
    assert theirs.logits is None and torch.equal(mine.loss, theirs.loss)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    assert not torch.equal(other(**batch_of()).loss, mine.loss) and torch.equal(model(**batch_of()).loss, mine.loss)
    assert type(remove_fused_loss(other)) is transformers.Gemma2ForCausalLM
    assert other(**batch_of()).logits is not None and model(**batch_of()).logits is None


def test_a_saved_model_that_had_a_forward_of_its_own_has_the_stock_one_beside_the_fused():
    model = model_of("llama")
    model.forward = MethodType(
        functools.wraps(type(model).forward)(lambda self, **k: type(self).forward(self, **k)), model
    )
    loaded = pickled(use_fused_loss(model))
    assert loaded(**batch_of()).logits is None and loaded(**batch_of(), skip_logits=False).logits is not None


def test_the_class_keeps_its_name_in_checkpoints(tmp_path):
    model = use_fused_loss(model_of("llama"))
    assert isinstance(model, transformers.LlamaForCausalLM) and "Llama" in repr(model)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM is type(remove_fused_loss(model))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_a_wrapper_of_the_forward_survives_new_options_and_unwraps_to_the_fused_forward():
    """As accelerate wraps it for mixed precision, and unwraps it through `__wrapped__`."""
    model = use_fused_loss(model_of("llama"))
    calls = []
    inner = model.forward.__func__

    @functools.wraps(inner)
    def wrapper(self, **kwargs):
        calls.append(1)
        return inner(self, **kwargs)

    model.forward = MethodType(wrapper, model)
    plain = model(**batch_of()).loss
    use_fused_loss(model, z_loss=0.1, check=False)
    assert model(**batch_of()).loss > plain + 0.1 and len(calls) == 2
    unwrapped = model.forward
    while hasattr(unwrapped, "__wrapped__"):
        unwrapped = unwrapped.__wrapped__
    assert unwrapped(model, **batch_of()).logits is None


def sharded(case, folder):
    torch.multiprocessing.start_processes(
        rank_main, (2, case, str(folder)), nprocs=2, start_method="spawn" if torch.cuda.is_available() else "fork"
    )
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", ["root unit", "tensor parallel"])
def test_a_head_sharded_in_the_root_unit_of_fsdp_or_over_its_ids_has_the_gradient_of_one_rank(case, tmp_path):
    """Two sequences of the same length: the mean over ranks is the mean over tokens."""
    ranks = sharded(case, tmp_path)
    right, expected = loss_and_gradients(model_of("llama"), **batch_of(padded=False))
    torch.testing.assert_close(sum(r["loss"] for r in ranks) / 2, right.loss.detach())
    for rank in ranks:
        assert rank["gradients"].keys() == expected.keys()
        assert all(relative(g, expected[name]) < 2e-5 for name, g in rank["gradients"].items())


@pytest.mark.parametrize("case", ["by itself", "tied", "inside another module"])
def test_a_head_in_another_fsdp_unit_than_the_root_is_refused(case, tmp_path):
    for rank in sharded(case, tmp_path):
        assert "keep the head in the root unit: do not fully_shard lm_head by itself" in rank["error"]


def test_a_partitioned_head_is_refused():
    model = model_of("llama")
    model.lm_head.weight.ds_id = 0
    with pytest.raises(TypeError, match="use ZeRO 2, or FSDP with the head in the root unit"):
        use_fused_loss(model)
