"""The fused loss inside models of transformers: the stock loss and gradients, and nothing else changed."""

import copy
import inspect
import logging
import re
from pathlib import Path

import pytest
import torch
import transformers
from paperlm_kernels import use_fused_loss
from paperlm_kernels.huggingface import (
    ELSEWHERE,
    EXCEPTIONS,
    SUSPICIOUS,
    TRANSFORMS,
    logit_transform,
    remove_fused_loss,
)
from support_cross_entropy import relative
from support_huggingface import MODELS, SIZES, VOCAB, batch_of, loss_and_gradients, model_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES


def assert_same(model, stock, **call):
    """Loss and the gradient of every parameter of the fused model against those of the stock one."""
    mine, gradients = loss_and_gradients(model, **call)
    right, expected = loss_and_gradients(stock, **call)
    assert mine.logits is None and right.logits is not None
    torch.testing.assert_close(mine.loss, right.loss, rtol=2e-6, atol=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert relative(gradient, expected[name]) < 2e-5, name


@pytest.mark.parametrize("name", [n for n in MODELS if n.split(",")[0] in CONFIG_MAPPING_NAMES])
def test_loss_and_every_gradient_equal_the_stock_models(name):
    model = model_of(name)
    stock = copy.deepcopy(model)
    assert_same(use_fused_loss(model), stock, **batch_of())


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite"])
def test_the_transform_matters_in_these_models(name):
    """Without it the loss would be another one: what the check before the replacement finds."""
    neutral = {"softcap": None, "logit_scale": 1.0}
    with pytest.raises(ValueError, match="not those of its head with softcap=None and logit_scale=1"):
        use_fused_loss(model_of(name), **neutral)
    fused, stock = use_fused_loss(model_of(name), check=False, **neutral), model_of(name)
    assert abs(fused(**batch_of()).loss - stock(**batch_of()).loss) > 0.01


SIXTEEN = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@SIXTEEN
@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_a_cap_of_30_that_is_left_out_is_noticed_in_16_bits_whatever_the_size_of_the_logits(spread, dtype):
    model = model_of("gemma2", final_logit_softcapping=30.0, initializer_range=spread).to(dtype)
    assert model(batch_of()["input_ids"]).logits.abs().max() < 20
    for cap in (None, 28.0):
        with pytest.raises(ValueError, match="not those of its head with softcap="):
            use_fused_loss(model, softcap=cap)
    use_fused_loss(model)


@SIXTEEN
@pytest.mark.parametrize("divisor", [1.2, 1.05])
def test_a_divisor_near_one_that_is_left_out_is_noticed_in_16_bits(divisor, dtype):
    model = model_of("granite", logits_scaling=divisor).to(dtype)
    with pytest.raises(ValueError, match="not those of its head with softcap=None and logit_scale=1"):
        use_fused_loss(model, logit_scale=1.0)
    use_fused_loss(model)


@SIXTEEN
@pytest.mark.parametrize("width", [32, 1024])
@pytest.mark.parametrize("name", [n for n in MODELS if n.split(",")[0] in CONFIG_MAPPING_NAMES])
def test_right_models_are_accepted_in_16_bits(name, width, dtype):
    use_fused_loss(model_of(name, hidden_size=width, num_hidden_layers=1).to(dtype))


class Biased(transformers.LlamaForCausalLM):
    """Adds to its logits, in code: a small bias, or minus infinity at one id."""

    def forward(self, **kwargs):
        output = super().forward(**kwargs)
        output.logits[..., 7] += self.added
        return output


@pytest.mark.parametrize("added", [0.5, float("-inf")])
def test_what_the_code_adds_to_the_logits_of_an_id_is_noticed_in_16_bits(added):
    model = Biased(model_of("llama").config).bfloat16()
    model.added = 0.0
    remove_fused_loss(use_fused_loss(model))
    model.added = added
    with pytest.raises(ValueError, match="not those of its head"):
        use_fused_loss(model)


@pytest.mark.parametrize("items", [17, torch.tensor(17)], ids=["int", "tensor"])
def test_num_items_in_batch_divides_the_sum(items):
    model = model_of("gemma2")
    stock = copy.deepcopy(model)
    assert_same(use_fused_loss(model), stock, **batch_of(), num_items_in_batch=items)


def test_shifted_labels_and_another_ignore_index():
    model = model_of("llama")
    stock = copy.deepcopy(model)
    batch = batch_of()
    shifted = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    assert_same(use_fused_loss(model), stock, **batch, shift_labels=shifted)
    batch["labels"] = torch.where(batch["labels"] == -100, 5, batch["labels"])
    shifted = nn.functional.pad(batch["labels"], (0, 1), value=5)[:, 1:].contiguous()
    assert_same(model, stock, **batch, ignore_index=5, shift_labels=shifted)


def test_gradient_checkpointing():
    model = model_of("llama")
    stock = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    assert_same(use_fused_loss(model), stock, **batch_of(), use_cache=False)


def test_embeddings_as_inputs_and_positional_arguments():
    model = model_of("llama")
    stock = copy.deepcopy(model)
    batch = batch_of()
    embeddings = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    assert_same(use_fused_loss(model), stock, **batch, inputs_embeds=embeddings)
    batch = batch_of()
    loss = model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"]).loss
    torch.testing.assert_close(loss, stock(**batch).loss)


def test_bf16_weights_are_closer_to_float32_than_the_stock_loss():
    model = model_of("gemma2").bfloat16()
    truth = copy.deepcopy(model).float()
    stock = copy.deepcopy(model)
    hidden = model.base_model(batch_of()["input_ids"], batch_of()["attention_mask"])[0]
    exact = truth.loss_function(
        3 * torch.tanh(truth.lm_head(hidden.float()) / 3), batch_of()["labels"], vocab_size=VOCAB
    ).item()
    mine = use_fused_loss(model)(**batch_of()).loss
    assert mine.dtype == torch.float32
    assert abs(mine.item() - exact) < 1e-5 < abs(stock(**batch_of()).loss.item() - exact)


def test_no_logits_are_made_in_training():
    sizes = set()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                sizes.add(result.numel())
            return result

    model = use_fused_loss(model_of("llama", vocab_size=50001))
    ids = torch.randint(0, 50001, (2, 40))
    with Sizes():
        model(input_ids=ids, labels=ids).loss.backward()
    assert max(sizes) < 78 * 50001 / 2


# --- what stays as it was ---


def test_evaluation_and_generation_are_the_stock_models():
    model = model_of("gemma2")
    stock = copy.deepcopy(model).eval()
    use_fused_loss(model).eval()
    batch = batch_of()
    with torch.no_grad():
        mine, right = model(**batch), stock(**batch)
        assert torch.equal(mine.logits, right.logits) and torch.equal(mine.loss, right.loss)
        assert model(**batch, skip_logits=True).logits is None
        no_labels = {k: v for k, v in batch.items() if k != "labels"}
        assert torch.equal(model.train()(**no_labels).logits, stock.train()(**no_labels).logits)
        arguments = {"max_new_tokens": 6, "do_sample": False}
        generated = model.eval().generate(**no_labels, **arguments)
        assert torch.equal(generated, stock.eval().generate(**no_labels, **arguments)) and generated.shape[1] > 23
    assert model.train()(**batch, skip_logits=False).logits is not None
    use_fused_loss(model, logits_in_eval=False).eval()
    assert model(**batch).logits is None
    torch.testing.assert_close(model(**batch).loss, right.loss)


def test_outputs_of_the_base_model_come_along_and_tuples_are_tuples():
    model = use_fused_loss(model_of("llama"))
    output = model(**batch_of(), output_hidden_states=True, output_attentions=True, use_cache=True)
    assert len(output.hidden_states) == 3 and len(output.attentions) == 2 and output.past_key_values is not None
    loss, *_ = model(**batch_of(), return_dict=False)
    assert torch.equal(loss, output.loss)


def test_options_belong_to_the_instance_and_can_be_replaced_and_removed():
    first, second = model_of("llama"), model_of("llama")
    batch = batch_of()
    plain = first(**batch).loss
    use_fused_loss(first, z_loss=0.1)
    use_fused_loss(second)
    with_z = first(**batch).loss
    assert with_z > plain + 0.1
    torch.testing.assert_close(second(**batch).loss, plain)
    copied = copy.deepcopy(first)
    use_fused_loss(first)
    torch.testing.assert_close(first(**batch).loss, plain)
    torch.testing.assert_close(copied(**batch).loss, with_z)
    with torch.no_grad():
        copied.lm_head.weight.mul_(2)
    assert copied(**batch).loss != with_z, "a copy uses its own weights"
    assert remove_fused_loss(first) is first and first(**batch).logits is not None
    assert "forward" not in first.__dict__ and remove_fused_loss(first) is first


def test_a_forward_that_the_instance_had_is_kept_and_restored():
    model = model_of("llama")
    calls = []
    stock = model.forward
    model.forward = lambda **kwargs: calls.append(set(kwargs)) or stock(**kwargs)
    mine = model.forward
    use_fused_loss(model, check=False)
    model(**batch_of())
    assert not calls
    model(input_ids=batch_of()["input_ids"])
    assert calls == [{"input_ids"}]
    assert remove_fused_loss(model).forward is mine


def test_signature_state_dict_and_modes_are_untouched():
    model = model_of("llama")
    model.model.layers[0].eval()
    before = inspect.signature(model.forward), list(model.state_dict()), [m.training for m in model.modules()]
    random = torch.get_rng_state()
    use_fused_loss(model)
    after = inspect.signature(model.forward), list(model.state_dict()), [m.training for m in model.modules()]
    assert before == after and torch.equal(random, torch.get_rng_state())


def test_a_model_on_the_meta_device_is_not_computed_with():
    with torch.device("meta"):
        model = model_of("qwen2")
    assert use_fused_loss(model)(input_ids=torch.zeros(1, 4, dtype=torch.long, device="meta")).logits.is_meta


def test_router_logits_keep_the_stock_loss(caplog):
    model = model_of("mixtral", num_local_experts=2, output_router_logits=True)
    stock = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING):
        losses = [use_fused_loss(model)(**batch_of()).loss for _ in range(2)]
    assert torch.equal(losses[0], stock(**batch_of()).loss)
    assert [r for r in caplog.records if "router" in r.message].__len__() == 1
    assert model(**batch_of(), output_router_logits=False).logits is None


# --- what is refused ---


def test_a_transform_that_is_not_known_is_refused():
    model = model_of("llama")
    for name in ("output_logit_temperature_scale", "final_softcap", "lm_head_scale"):
        config = copy.deepcopy(model.config)
        setattr(config, name, 2.0)
        with pytest.raises(ValueError, match=f"llama has {name}=2.0.*pass softcap= and logit_scale="):
            logit_transform(config)
        assert logit_transform(config, {"softcap": None, "logit_scale": 2.0}) == {"softcap": None, "logit_scale": 2.0}
        setattr(config, name, None)
        assert logit_transform(config) == {"softcap": None, "logit_scale": 1.0}


def test_a_transform_in_the_code_that_no_config_names_is_refused():
    """A head that is more than one linear layer: nothing in the config says so."""
    config = AutoConfig.for_model("modernbert-decoder", **SIZES, intermediate_size=48)
    with pytest.raises(ValueError, match="not those of its head"):
        use_fused_loss(AutoModelForCausalLM.from_config(config))


class WithAdapter(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.weight, self.bias = inner, inner.weight, inner.bias


def test_models_and_options_that_do_not_fit_are_refused():
    with pytest.raises(TypeError, match=r"model.module"):
        use_fused_loss(nn.DataParallel(model_of("llama")))
    with pytest.raises(TypeError, match="no language-model head"):
        use_fused_loss(model_of("llama").model)
    adapted = use_fused_loss(model_of("llama"))
    adapted.lm_head = WithAdapter(adapted.lm_head)
    with pytest.raises(TypeError, match="WithAdapter"):
        adapted(**batch_of())
    own = model_of("llama")
    own.loss_function = lambda logits, labels, vocab_size: logits.sum()
    with pytest.raises(TypeError, match="loss of its own"):
        use_fused_loss(own)
    for option in ("shift", "reduction", "vocab_range"):
        with pytest.raises(TypeError, match=f"{option} follows from the model"):
            use_fused_loss(model_of("llama"), **{option: 1})
    with pytest.raises(TypeError, match="did you mean 'filter_grads'"):
        use_fused_loss(model_of("llama"), filter_grad="both")
    with pytest.raises(ValueError, match="cce_exact"):
        use_fused_loss(model_of("llama"), preset="exact")


# --- every model of the installed transformers ---


def configs():
    """Default configs of all causal language models."""
    for kind in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            yield transformers.CONFIG_MAPPING[kind]().get_text_config()
        except Exception:
            continue


def test_every_attribute_that_sounds_like_a_transform_is_known_or_acts_elsewhere():
    """A new transformers with a new transform fails here, or in the next test, before it trains another model."""
    found = {(c.model_type, name) for c in configs() for name in c.to_dict() if re.search("logit|soft_?cap|scal", name)}
    assert len(found) > 50
    suspicious = {n for _, n in found if n not in TRANSFORMS and SUSPICIOUS.search(n) and not ELSEWHERE.search(n)}
    assert not suspicious


def test_every_transform_in_the_code_of_a_causal_model_is_known():
    """Attributes that multiply, divide or cap the logits, or the hidden states before them, in the source files."""
    source = Path(transformers.__file__).parent / "models"
    found = {}
    for file in source.glob("*/modeling_*.py"):
        for cls in re.finditer(r"^class (\w+ForCausalLM)\(.*?(?=^class |\Z)", file.read_text(), re.M | re.S):
            for line in cls[0].splitlines():
                if re.match(r"\s*(logits|hidden_states) = ", line) and re.search(r"[*/]|cap", line):
                    for name in re.findall(r"self\.(?:\w+\.)*(\w*(?:scal|cap|multiplier)\w*)", line):
                        found.setdefault(name, []).append(cls[1])
    assert {"final_logit_softcapping", "logit_scale", "logits_scaling"} <= set(found)
    # The cap of this class is a module made from final_logit_softcapping.
    assert set(found) - set(TRANSFORMS) <= {"logit_softcap"}, found


def test_exceptions_name_transforms():
    assert {name for _, name in EXCEPTIONS} <= set(TRANSFORMS)


# --- training ---


def trainer_losses(folder, fused):
    """Losses logged by the Trainer over four steps of two accumulated batches, and the evaluation loss."""
    model = model_of("gemma2")
    if fused:
        use_fused_loss(model)
    g = torch.Generator().manual_seed(3)
    data = [{"input_ids": torch.randint(3, VOCAB, (12 + 3 * (i % 4),), generator=g).tolist()} for i in range(32)]

    def collate(rows):
        width = max(len(r["input_ids"]) for r in rows)
        ids = torch.tensor([r["input_ids"] + [0] * (width - len(r["input_ids"])) for r in rows])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.where(ids == 0, -100, ids)}

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        eval_strategy="no",
        prediction_loss_only=True,
        seed=0,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:6], data_collator=collate)
    trainer.train()
    assert trainer.model_accepts_loss_kwargs
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]


def test_the_trainer_of_transformers_trains_the_same_model(tmp_path):
    stock, fused = (trainer_losses(tmp_path, fused) for fused in (False, True))
    assert len(stock) == 5 and stock[-1] < stock[0] - 0.05
    assert fused == pytest.approx(stock, abs=2e-4)
