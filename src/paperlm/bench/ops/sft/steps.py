"""Trains a few steps with SFTTrainer, and watches them."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from paperlm_kernels import use_fused_loss
from paperlm_kernels.bench import clocks
from paperlm_kernels.bench.operation import Operation, Row, Task
from paperlm_kernels.bench.ops.pretrain import Case
from paperlm_kernels.bench.ops.pretrain.sides import our_model, peer_model
from paperlm_kernels.bench.ops.sft import CASES, METHODS, Method
from paperlm_kernels.trainers import ModelLoss
from torch.nn import functional as F
from transformers import PreTrainedModel, TrainerCallback
from trl import SFTConfig, SFTTrainer

from paperlm.models.folder import transformers_tokenizer
from paperlm.models.losses import FUSED

AGREES = {"cpu": 1e-5, "cuda": 2**-9}
"Largest relative difference of a loss from float32's: of sums in another order, and of a rounding to bfloat16."
DEVIATION = 0.05
"Of the weights: logits that spread over more than one nat, so that a token that is left out or put elsewhere shows."


class Watch(TrainerCallback):
    """Warms up, times steps, and then takes the memory of one, which on a CPU slows it down; ends the training."""

    def __init__(self, task: Task) -> None:
        self.task, self.device, self.warmup = task, torch.device(task.device), max(1, task.warmup)
        self.losses: list[torch.Tensor] = []
        self.milliseconds: list[float] = []
        self.peak: list[float] = []
        self.timed = 0
        self.block = contextlib.ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begins to measure, with nothing left to do on the device."""
        clocks.synchronize(self.device)
        if self.timed and state.global_step == self.warmup + self.timed:
            self.peak = self.block.enter_context(clocks.peak_within(self.device))
        self.begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends it, behind the optimizer's update; `global_step` counts this step."""
        clocks.synchronize(self.device)
        taken = time.perf_counter() - self.begin
        self.block.close()
        number = state.global_step
        if number == self.warmup:
            self.timed = clocks.repetitions(taken, repeats=self.task.repeats, seconds=self.task.seconds)
        elif self.timed and number <= self.warmup + self.timed:
            self.milliseconds.append(taken * 1e3)
        elif self.timed:
            control.should_training_stop = True


class Watched:
    """Keeps the loss of each step, which the trainer's log rounds to four digits."""

    watch: Watch

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.watch.losses.append(loss.detach())
        return loss


def model_of(method: Method, case: Case, device: torch.device, seed: int) -> PreTrainedModel:
    """The model on its device, with weights that are the same for every method: their shapes come in the same order."""
    model = (our_model if method.ours else peer_model)(case).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(0.0, DEVIATION, generator=generator)
    return model


@torch.no_grad()
def float32_loss(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """Mean next-token cross-entropy of (B, S) ids in float32, a sequence at a time, by the model's blocks and head."""
    sums = 0.0
    for row in ids:
        hidden = model.base_model(input_ids=row[None], use_cache=False)[0][0, :-1]
        sums += F.cross_entropy(hidden @ model.get_output_embeddings().weight.T, row[1:], reduction="sum").item()
    return sums / (len(ids) * (ids.shape[1] - 1))


def trainer_of(method: Method, model: PreTrainedModel, ids: torch.Tensor, watch: Watch, folder: Path) -> SFTTrainer:
    """SFTTrainer with its default settings but for lengths, devices and reports; every step has all of (B, S) ids."""
    task, on_cpu = watch.task, watch.device.type == "cpu"
    settings = SFTConfig(
        output_dir=str(folder), max_steps=watch.warmup + task.repeats + 1, per_device_train_batch_size=len(ids),
        max_length=ids.shape[1], use_liger_kernel=method.liger == "layers", use_cpu=on_cpu, report_to="none",
        save_strategy="no", disable_tqdm=True, seed=task.seed, **({"bf16": False} if on_cpu else {}),
    )  # fmt: skip
    if method.fused:
        use_fused_loss(model, **FUSED["cce_exact"])
    if method.liger == "loss":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(rope=False, rms_norm=False, swiglu=False, model=model)
    bases = (Watched, ModelLoss, SFTTrainer) if method.asks_model else (Watched, SFTTrainer)
    return type("WatchedTrainer", bases, {"watch": watch})(
        model,
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"input_ids": ids.tolist()}),
        processing_class=transformers_tokenizer("bpe1024", trained_length=ids.shape[1]),  # never asked for a text
        callbacks=[watch],
    )


def rows_of(operation: Operation, task: Task) -> Iterator[Row]:
    """Loss, time and memory of a method; one row that says so if its loss is wrong, or if it does not fit."""
    device, method, case = torch.device(task.device), METHODS[task.method], task.sized(CASES)
    name, watch = clocks.device_name(device), Watch(task)
    ids = torch.randint(2, case.vocab, (case.batch, case.seq_len), generator=torch.Generator().manual_seed(task.seed))
    try:
        model = model_of(method, case, device, task.seed)
        truth = float32_loss(model.eval(), ids.to(device))
        with tempfile.TemporaryDirectory() as folder:
            trainer_of(method, model.train(), ids, watch, Path(folder)).train()
    except RuntimeError as error:
        if not clocks.out_of_memory(error):
            raise
        yield operation.outcome(task, name, "out of memory")
        return
    loss, last = (float(watch.losses[index]) for index in (0, -1))
    difference = abs(loss - truth) / truth
    if not difference <= AGREES[device.type]:
        yield operation.outcome(task, name, f"failed: its loss is {loss:.6g}, in float32 it is {truth:.6g}")
        return
    gradients = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    rows = {
        "memory": ("peak_memory", "MiB", watch.peak, {"gradients": gradients, "how": clocks.HOW_MEMORY[device.type]}),
        "time": ("time", "ms", watch.milliseconds, {}),
        "loss": ("loss", "nats", [loss], {"float32": truth, "difference": difference, "last": last}),
    }
    for measure, (metric, unit, values, extra) in rows.items():
        if measure in task.measures:
            yield operation.row(task, name, metric, unit, values, **extra)
