"""Trainers of trl with their default settings, gradient checkpointing among them, on a folder that a job left."""

import logging

import pytest
import torch
from support_model import close, tiny_folder
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from paperlm.models.folder import load_model, load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

LORA = {"peft_config": peft.LoraConfig()}
TEXTS = ["The cat sat on the mat.", "Two and two are four, and a third makes six.", "Rain.", "A dog ran to the park."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def settings(tmp_path):
    return {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "disable_tqdm": True,
    }


def texts():
    return datasets.Dataset.from_list([{"text": text} for text in TEXTS])


def preferences():
    return datasets.Dataset.from_list(
        [{"prompt": text, "chosen": " It was good.", "rejected": " It was good, it was bad."} for text in TEXTS]
    )


def prompts():
    return datasets.Dataset.from_list([{"prompt": text} for text in TEXTS])


def length_of(completions, **_):
    return [float(len(text)) for text in completions]


def trained(trainer):
    """Train with finite gradients and checkpointed blocks; returns name -> how far it moved."""
    base = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert all(block.gradient_checkpointing for block in base.model.layers), "trl's default"
    moved = {name: (p - before[name]).abs().max().item() for name, p in trainer.model.named_parameters()}
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert all(0 < norm < float("inf") for norm in norms)
    return moved


def check(trainer):
    """Every weight of a full fine-tuning moves, and of LoRA's only its own."""
    adapted = hasattr(trainer.model, "peft_config")
    moved = trained(trainer)
    if adapted:
        assert {name for name, far in moved.items() if far} <= {
            name for name in moved if "lora_" in name or "score" in name
        }
        assert any(far for name, far in moved.items() if "q_proj.lora_B" in name)
    else:
        assert all(far > 0 for name, far in moved.items() if "layers" in name)
    return trainer


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("packing", [False, True])
def test_supervised_fine_tuning(folder, settings, packing, options):
    args = trl.SFTConfig(**settings, packing=packing, max_length=64)
    check(trl.SFTTrainer(folder, args=args, train_dataset=texts(), **options))


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
def test_a_reward_model(folder, settings, options):
    check(trl.RewardTrainer(folder, args=trl.RewardConfig(**settings), train_dataset=preferences(), **options))


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
def test_direct_preference_optimization(folder, settings, options):
    check(trl.DPOTrainer(folder, args=trl.DPOConfig(**settings), train_dataset=preferences(), **options))


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(("kind", "extra"), [("RLOO", {}), ("GRPO", {}), ("GRPO", {"beta": 0.1})])
def test_policy_optimization_with_a_reference_loaded_by_path(folder, settings, kind, extra, options):
    args = getattr(trl, f"{kind}Config")(**settings, num_generations=2, max_completion_length=6, **extra)
    trainer = getattr(trl, f"{kind}Trainer")
    check(trainer(folder, reward_funcs=length_of, args=args, train_dataset=prompts(), **options))


def test_a_reward_model_of_ours_judges_a_policy_of_ours(folder, settings, tmp_path):
    judge = trl.RewardTrainer(folder, args=trl.RewardConfig(**settings), train_dataset=preferences())
    judge.save_model(str(tmp_path / "judge"))
    args = trl.RLOOConfig(**settings, num_generations=2, max_completion_length=6)
    check(trl.RLOOTrainer(folder, reward_funcs=str(tmp_path / "judge"), args=args, train_dataset=prompts()))


# --- what is computed ---


def test_packed_training_has_the_loss_of_the_documents_alone(folder, settings):
    settings["max_steps"] = 1
    settings["per_device_train_batch_size"] = len(TEXTS)
    losses = []
    for packing in (False, True):
        args = trl.SFTConfig(**settings, packing=packing, max_length=64, loss_type="nll")
        trainer = trl.SFTTrainer(folder, args=args, train_dataset=texts())
        if packing:
            (batch,) = trainer.get_train_dataloader()
            assert "attention_mask" not in batch and (batch["position_ids"] == 0).sum() == len(TEXTS)
        trainer.train()
        losses.append(trainer.state.log_history[-1]["train_loss"])
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    sums, count = 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id]])
        sums += model.summed_loss(ids, ids).item()
        count += ids.shape[1] - 1
    assert losses[0] == pytest.approx(sums / count, rel=1e-5)
    assert losses[1] == pytest.approx(sums / count, rel=1e-5)


def test_a_folder_that_a_trainer_saved_is_one_of_ours(folder, settings, tmp_path):
    trainer = trl.SFTTrainer(folder, args=trl.SFTConfig(**settings), train_dataset=texts())
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    ids = torch.arange(9)[None]
    close(load_model(tmp_path / "saved")(ids).logits, trainer.model.eval()(ids).logits, 1e-6)
    assert load_tokenizer(tmp_path / "saved").decode([5, 6]) == load_tokenizer(folder).decode([5, 6])
    assert (tmp_path / "saved" / "paperlm_model.py").is_file()


def test_an_adapter_is_saved_and_found_again_on_its_base(folder, settings, tmp_path):
    trainer = trl.SFTTrainer(folder, args=trl.SFTConfig(**settings), train_dataset=texts(), **LORA)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    ids = torch.arange(9)[None]
    expected = trainer.model.eval()(ids).logits
    found = AutoModelForCausalLM.from_pretrained(str(tmp_path / "adapter"))(ids).logits
    close(found, expected, 1e-6)
    assert (found - load_model(folder)(ids).logits).abs().max() > 1e-6


def test_the_fused_loss_trains_under_transformers_and_says_that_trl_has_its_own(folder, settings, caplog):
    from paperlm_kernels import use_fused_loss

    tokenizer = load_tokenizer(folder)
    rows = [tokenizer(text, padding="max_length", max_length=16, truncation=True).input_ids for text in TEXTS]
    labels = [[-100 if i == tokenizer.pad_token_id else i for i in row] for row in rows]
    data = datasets.Dataset.from_dict({"input_ids": rows, "labels": labels})
    losses, asked = [], []
    for fuse in (False, True):
        model = AutoModelForCausalLM.from_pretrained(folder)
        if fuse:
            use_fused_loss(model)
            model.lm_head.register_forward_hook(lambda *_: asked.append("logits"))
        with caplog.at_level(logging.WARNING):
            trainer = Trainer(model, TrainingArguments(**settings, gradient_checkpointing=True), train_dataset=data)
        trainer.train()
        losses.append(trainer.state.log_history[-1]["train_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and not asked and "trl" not in caplog.text
    with caplog.at_level(logging.WARNING):
        trl.SFTTrainer(model, args=trl.SFTConfig(**settings), train_dataset=texts(), processing_class=tokenizer)
    assert "use_fused_loss has no effect in its trainers" in caplog.text
