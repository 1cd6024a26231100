"""The step of SFTTrainer as an operation of the benchmark, and ModelLoss, by which its loss is the model's."""

from __future__ import annotations

import pytest
import torch
from paperlm_kernels.bench import clocks, rows
from paperlm_kernels.bench.operation import Task

from paperlm.bench import main, with_ours

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

trl = pytest.importorskip("trl")

sft = with_ours().operation("sft")

from paperlm_kernels import use_fused_loss  # noqa: E402
from paperlm_kernels.bench.ops.pretrain import Case  # noqa: E402 - found once the folder is among the operations'
from paperlm_kernels.bench.ops.sft import METHODS, steps  # noqa: E402
from paperlm_kernels.trainers import ModelLoss  # noqa: E402

from paperlm.models.sizes import Size  # noqa: E402

CASE = Case(Size(32, 48, 2, 2, 0, "a test"), batch=2, seq_len=12, vocab=61, dtype="float32", compiled=False)
HERE = [name for name, method in METHODS.items() if not method.liger]
IDS = torch.randint(2, CASE.vocab, (CASE.batch, CASE.seq_len), generator=torch.Generator().manual_seed(0))


def trained(name, folder, **settings):
    """The trainer of a method behind its steps, and what watched it."""
    watch = steps.Watch(Task("sft", "tiny", name, (), repeats=2, warmup=1, device="cpu"))
    model = steps.model_of(METHODS[name], CASE, torch.device("cpu"), seed=0).train()
    trainer = steps.trainer_of(METHODS[name], model, IDS, watch, folder)
    trainer.args.learning_rate = 1e-2
    for setting, value in settings.items():
        setattr(trainer.args, setting, value)
    trainer.train()
    return trainer, watch


@pytest.fixture(scope="module")
def by_hand():
    """Losses of four steps of LlamaForCausalLM with AdamW as SFTTrainer sets it up, written out."""
    model = steps.model_of(METHODS["trl"], CASE, torch.device("cpu"), seed=0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 4)
        logits = model(input_ids=IDS).logits[:, :-1].double()
        loss = -logits.log_softmax(-1).gather(-1, IDS[:, 1:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", HERE)
def test_every_method_takes_the_steps_that_are_written_out_here(name, by_hand, tmp_path):
    """So the same training is measured, with its gradients: the last loss is of weights that three steps have moved."""
    trainer, watch = trained(name, tmp_path)
    assert torch.stack(watch.losses).tolist() == pytest.approx(by_hand, rel=1e-5)
    assert by_hand[-1] < by_hand[0] - 0.1
    assert len(watch.milliseconds) == 2 and len(watch.peak) == 1 and trainer.state.global_step == 4


def test_the_head_is_asked_for_logits_by_the_method_that_is_said_to_hold_them_alone(tmp_path):
    for name in HERE:
        asked = []
        watch = steps.Watch(Task("sft", "tiny", name, (), repeats=1, warmup=1, device="cpu"))
        model = steps.model_of(METHODS[name], CASE, torch.device("cpu"), seed=0).train()
        trainer = steps.trainer_of(METHODS[name], model, IDS, watch, tmp_path)
        model.get_output_embeddings().register_forward_hook(lambda *_, asked=asked: asked.append("logits"))
        trainer.train()
        assert bool(asked) == (name == "transformers logits"), name


def test_a_wrong_loss_gives_no_number_but_a_row_that_says_so(monkeypatch):
    monkeypatch.setattr(steps, "float32_loss", lambda model, ids: 1.0)
    (row,) = steps.rows_of(sft, Task("sft", "tiny", "fused", ("time",), repeats=1, small=True, device="cpu"))
    assert row["metric"] == "outcome" and row["outcome"].startswith("failed: its loss is 7.0")


def test_the_benchmark_has_a_row_for_each_measure_and_says_what_cannot_run(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert main([
        "sft", "--device", "cpu", "--scale", "small", "--methods", "liger-kernel loss,ours fused", "--repeats", "1",
        "--warmup", "1", "--out", str(out),
    ]) == 0  # fmt: skip
    *found, absent = rows.read(out)  # an absent one waits until a process has told what the device is called
    assert (absent["name"], absent["metric"]) == ("liger-kernel loss", "outcome") and "GPU" in absent["outcome"]
    assert [(row["metric"], row["unit"]) for row in found] == [("peak_memory", "MiB"), ("time", "ms"), ("loss", "nats")]
    memory, _, loss = found
    assert memory["value"] > memory["gradients"] > 0.5 and memory["how"] == clocks.HOW_MEMORY["cpu"]
    assert loss["value"] == pytest.approx(loss["float32"], rel=1e-5) and loss["last"] < loss["value"]
    shape = {"batch": 1, "seq_len": 128, "vocab": 1024, "precision": "float32"}
    assert all(row["shape"] == shape and row["versions"]["trl"] == trl.__version__ for row in found)
    assert "| ours fused | " in capsys.readouterr().out


def test_what_was_not_measured_on_a_card_is_said_behind_the_tables():
    common = {
        "op": "sft", "case": "130M", "metric": "time", "unit": "ms", "value": 1.0, "low": 1.0, "high": 1.0,
        "order": "natural", "scale": "full", "versions": {}, "date": "2030-01-01", "seed": 0, "shape": {},
    }  # fmt: skip
    found = [{**common, "name": name, "method": name, "device": "a card"} for name in METHODS if name != "trl"]
    said = sft.tables(found).splitlines()[-1]
    assert said == "Not measured on a card: 71M; 71M_128k; trl of 130M; 130M_128k."
    small = [{**row, "name": "trl", "method": "trl", "scale": "small"} for row in found[:1]]
    assert sft.tables([*found, *small]).splitlines()[-1] == said, "a size to try the benchmark is no measurement"
    assert "Not measured" not in sft.tables([{**row, "device": "cpu (one, 1 thread)"} for row in found])


# -- ModelLoss --


def test_in_front_of_sft_trainer_the_fused_loss_is_used_and_nothing_is_warned_of(tmp_path, caplog):
    trainer, _ = trained("fused", tmp_path)
    assert "use_fused_loss" not in caplog.text
    logged = trainer.state.log_history[-1]
    assert "train_loss" in logged and "mean_token_accuracy" not in logged
    trl.SFTTrainer(
        trainer.model, args=trainer.args, train_dataset=trainer.train_dataset, processing_class=trainer.processing_class
    )
    assert "put paperlm_kernels.trainers.ModelLoss in front of it" in caplog.text


def test_tokens_of_a_prompt_and_padding_do_not_count_under_either_loss(tmp_path):
    """With gradient accumulation over batches of unequal counts, the mean is over all tokens that count."""
    import datasets

    rows_of_ids = [IDS[0].tolist(), IDS[1, :5].tolist()]
    labels = [[-100] * start + ids[start:] for ids, start in zip(rows_of_ids, (4, 2), strict=True)]
    data = datasets.Dataset.from_dict({"input_ids": rows_of_ids, "labels": labels})
    model = steps.model_of(METHODS["trl"], CASE, torch.device("cpu"), seed=0)
    losses = []
    for ids, start in zip(rows_of_ids, (4, 2), strict=True):
        log = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        losses += (-log[torch.arange(start - 1, len(ids) - 1), torch.tensor(ids[start:])]).tolist()
    expected = sum(losses) / len(losses)
    tokenizer = steps.transformers_tokenizer("bpe1024", trained_length=12)
    for bases in ((trl.SFTTrainer,), (ModelLoss, trl.SFTTrainer)):
        args = trl.SFTConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=1, disable_tqdm=True,
            per_device_train_batch_size=1, gradient_accumulation_steps=2, save_strategy="no",
        )  # fmt: skip
        made = steps.model_of(METHODS["trl"], CASE, torch.device("cpu"), seed=0)
        trainer = type("T", bases, {})(use_fused_loss(made), args=args, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(expected, rel=1e-5)


def test_other_trainers_and_other_losses_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"in front of trl's SFTTrainer, class Wrong\(ModelLoss, SFTTrainer\)"):

        class Wrong(ModelLoss, trl.DPOTrainer):
            pass

    with pytest.raises(TypeError, match="in front of"):

        class Behind(trl.SFTTrainer, ModelLoss):
            pass

    class Right(ModelLoss, trl.SFTTrainer):
        pass

    made, _ = trained("trl", tmp_path)
    made.args.loss_type = "dft"
    with pytest.raises(ValueError, match="loss_type='dft' is computed by SFTTrainer itself"):
        Right(made.model, args=made.args, train_dataset=made.train_dataset, processing_class=made.processing_class)
