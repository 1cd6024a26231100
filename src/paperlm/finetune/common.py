"""A training by trl as a job: settings to trl's arguments, checkpoints, resuming, stopping, its curve and its cost.

What is special against trl's own loop: a checkpoint counts only with its checksums, a killed job goes on and ends in
the same numbers (bit for bit on a CPU), a loss that is no number ends it, and nothing is sent anywhere.
"""

from __future__ import annotations

import math
import re
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from paperlm.errors import CheckpointError, DataError, Interrupted, PaperLMError
from paperlm.files import check_file, is_full_disk, read_sealed, sha256_of, write_sealed
from paperlm.finetune.settings import Training
from paperlm.frozen import digest
from paperlm.jobs.base import Inputs, Machine
from paperlm.result import Cost, Series
from paperlm.stopping import stop_requests

STATE = "paperlm.json"
"Checksums of a checkpoint's files and what trl does not keep; written last."
WHAT = "a checkpoint of a training by trl"
KEYS = ("job", "sha256", "wall_seconds", "resumed_from", "tokens")
SLOTS = 65_536
"Tokens of a forward pass on a GPU, at most, if the machine chooses."
POINTS = 400
"Rows of a curve in a record, at most."


def quiet() -> None:
    """No bars and no notes of the libraries in a job's log; its own bar says how far it is."""
    import datasets

    # trl turns it on by the name that transformers has just renamed; both are told off here.
    warnings.filterwarnings("ignore", message="`(is_)?gradient_checkpointing` is deprecated")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()


class Checkpointed:
    """Mixin before a trl trainer: checkpoints with checksums, nothing sent, no model cards."""

    job_digest: str
    curve: Curve

    def _send_telemetry(self) -> None:
        pass

    def create_model_card(self, *_: Any, **__: Any) -> None:
        pass

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
            files = {p.name: sha256_of(p) for p in sorted(folder.iterdir())}
            content = {"job": self.job_digest, "sha256": files, **self.curve.state(self)}
            write_sealed(folder / STATE, WHAT, content)
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            if is_full_disk(error):
                raise PaperLMError(
                    f"no space left for the checkpoint {folder}; free some and start the same command again: training "
                    "continues from the checkpoint before"
                ) from error
            raise


class Curve(transformers.TrainerCallback):
    """Watches a training: its bar, its checkpoints by the clock, its end at a request or when it is no number."""

    def __init__(self, machine: Machine, updates: int, stop: list[int], evaluate: Callable | None, every: int) -> None:
        self.machine, self.updates, self.stop = machine, updates, stop
        self.evaluate, self.every = evaluate, every
        self.finite = True
        self.interrupted = False
        self.started = self.saved = time.monotonic()
        self.wall_before, self.resumed_from = 0.0, []
        self.clock: tuple[float, int] | None = None
        self.seconds, self.tokens = 0.0, 0
        self.bar: Any = None

    def state(self, trainer: Any) -> dict[str, Any]:
        """What a checkpoint keeps besides trl's state."""
        self.saved = time.monotonic()
        wall = self.wall_before + self.saved - self.started
        tokens = getattr(trainer, "_total_train_tokens", 0)
        return {"wall_seconds": wall, "resumed_from": self.resumed_from, "tokens": tokens}

    def resume(self, trainer: Any, folder: Path, kept: dict[str, Any]) -> None:
        """Take over what `state` kept."""
        self.wall_before = kept["wall_seconds"]
        self.resumed_from = [*kept["resumed_from"], int(folder.name.rpartition("-")[2])]
        trainer._total_train_tokens = kept["tokens"]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar; measure the untrained model."""
        self.first = state.global_step
        self.bar = tqdm(
            total=self.updates,
            initial=state.global_step,
            desc="update",
            unit="update",
            disable=not self.machine.progress,
            mininterval=1.0,
        )
        if self.evaluate and state.global_step == 0:
            state.log_history.append({"step": 0, "held_out": self.evaluate(kwargs["model"])})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide what follows this update."""
        done = state.global_step == self.updates
        if self.evaluate and (done or (self.every and state.global_step % self.every == 0)):
            # Into the history of trl's state, so that a checkpoint has it.
            state.log_history.append({"step": state.global_step, "held_out": self.evaluate(kwargs["model"])})
        if done:
            return
        by_count = self.machine.checkpoint_updates
        due = (
            state.global_step % by_count == 0
            if by_count
            else time.monotonic() - self.saved > self.machine.checkpoint_seconds
        )
        self.interrupted = bool(self.stop) or state.global_step == self.machine.stop_after
        control.should_save = due or self.interrupted
        control.should_training_stop = self.interrupted

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Look at an update's loss, and at the weights behind it: a policy of no numbers could not be sampled from."""
        if "loss" not in logs:
            return
        self.finite = math.isfinite(logs["loss"]) and _finite_weights(kwargs["model"])
        self.tokens = logs.get("num_tokens", 0)
        now = time.monotonic()
        if state.global_step - self.first == 10:
            self.clock = (now, self.tokens)
        self.seconds = now - self.clock[0] if self.clock else 0.0
        self.bar.update()
        self.bar.set_postfix(loss=f"{logs['loss']:.3f}", refresh=False)
        if not self.finite:
            control.should_training_stop, control.should_save, self.interrupted = True, False, False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar."""
        self.bar.close()


@dataclass(frozen=True)
class Trained:
    """A training that came to its end."""

    model: Any
    "None if memory was short even for one example at a time"
    finite: bool
    history: list[dict[str, Any]]
    "trl's log, a row an update"
    updates: int
    tokens: int
    cost: Cost

    def column(self, key: str) -> list[float | None]:
        """trl's value of each update; None where it is no number."""
        return [_finite(row.get(key)) for row in self.history if "loss" in row]

    def final(self, key: str, share: float) -> float | None:
        """Mean over the last share of the updates, at least one; None if one of them is no number."""
        return _mean(self.column(key)[-self.last(share) :])

    def error(self, key: str, share: float, count: int) -> float | None:
        """Standard error of `final` of what `key` is the deviation of, `count` independent values an update; None if
        one of the deviations is no number."""
        deviation = self.final(key, share)
        return None if deviation is None else deviation / math.sqrt(self.last(share) * count)

    def last(self, share: float) -> int:
        """Updates in the last share of this training."""
        return max(1, round(share * self.updates))

    def series(self, **columns: str) -> Series:
        """Update and these values (name -> trl's key), averaged over bins if there are more than POINTS updates."""
        values = [self.column(key) for key in columns.values()]
        width = math.ceil(self.updates / POINTS)
        ends = [min(start + width, self.updates) for start in range(0, self.updates, width)]
        rows = [[end, *(_mean(column[(end - 1) // width * width : end]) for column in values)] for end in ends]
        return Series(columns=["update", *columns], rows=rows)

    def held_out(self, *columns: str) -> Series:
        """What the evaluation of this training returned, a row a call."""
        rows = [[r["step"], *map(_finite, r["held_out"])] for r in self.history if "held_out" in r]
        return Series(columns=["update", *columns], rows=rows)


def _finite_weights(model: Any) -> bool:
    return math.isfinite(torch.nn.utils.get_total_norm([p.detach() for p in model.parameters()]).item())


def _finite(value: Any) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _mean(values: list[float | None]) -> float | None:
    return None if None in values or not values else sum(values) / len(values)


def arguments(config: type, job: Training, device: Any, work: Path, updates: int, micro: int, rows: int, **more: Any):
    """trl's arguments of a job. `rows`: sequences of an update as trl counts them; `micro` of them at once."""
    beta1, beta2 = job.adam_betas
    return config(
        output_dir=str(work / "checkpoints"),
        max_steps=updates,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        learning_rate=job.peak_lr,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(job.schedule, job.schedule),
        warmup_steps=job.warmup_updates(updates),
        optim="adamw_torch_fused",
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_epsilon=job.adam_eps,
        weight_decay=job.weight_decay,
        max_grad_norm=job.grad_clip,
        bf16=job.numerics == "fp32_master",
        use_cpu=device.type == "cpu",
        seed=job.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,  # it would replace a loss that is no number by the mean of those before
        save_strategy="no",  # the callback asks for checkpoints
        save_total_limit=2,
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,  # changes no number, and not every model has it
        dataloader_pin_memory=device.type == "cuda",
        **more,
    )


def cast(model: Any, numerics: str) -> Any:
    """The model with weights as its training keeps them."""
    return model.to(torch.bfloat16 if numerics == "pure_bf16" else torch.float32)


def train(
    build: Callable[[int], Any],
    job: Training,
    inputs: Inputs,
    machine: Machine,
    *,
    updates: int,
    rows: int,
    width: int,
    started: float,
    evaluate: Callable[[Any], list[float | None]] | None = None,
    every: int = 0,
) -> Trained:
    """Train to the end, from the newest checkpoint in `inputs.work` if there is one.

    `build(micro)` makes the trainer (a class with Checkpointed in front), `rows` x `width` are the sequences of an
    update and their longest length, `evaluate(model)` a row for the series of held-out measurements, before the first
    update, after every `every` and after the last. Raises Interrupted, CheckpointError, DataError for a micro-batch
    that does not divide `rows`, and PaperLMError on a full disk.
    """
    quiet()
    device = machine.torch_device()
    micro = _micro_batch(machine, device, rows, width)
    with stop_requests() as stop:
        while True:
            curve = Curve(machine, updates, stop, evaluate, every)
            curve.started = started
            try:
                trainer = build(micro)
                _run(trainer, curve, job, inputs.work / "checkpoints")
                break
            except torch.cuda.OutOfMemoryError:
                smaller = [m for m in range(1, micro) if rows % m == 0]
                trainer = None
                torch.cuda.empty_cache()
                if not smaller:
                    wall = time.monotonic() - started
                    return Trained(None, True, [], 0, 0, Cost(wall_seconds=round(wall, 2), micro_batch=micro))
                micro = smaller[-1]
                tqdm.write(f"out of memory: going on with a micro-batch of {micro}; the batch stays")
    if curve.interrupted:
        done = trainer.state.global_step
        raise Interrupted(f"{job.kind}: stopped at update {done} of {updates}; start again to go on")
    cost = Cost(
        wall_seconds=round(curve.wall_before + time.monotonic() - started, 2),
        train_seconds=round(curve.seconds, 2),
        tokens_per_second=_rate(curve),
        peak_memory_mib=_peak_mib(device),
        micro_batch=micro,
        compiled=False,
        resumed_from=curve.resumed_from,
    )
    history = list(trainer.state.log_history)
    return Trained(trainer.model, curve.finite, history, trainer.state.global_step, int(curve.tokens), cost)


def _run(trainer: Any, curve: Curve, job: Training, folder: Path) -> None:
    trainer.job_digest, trainer.curve = digest(job.canonical(), 16), curve
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(curve)
    found = newest_checkpoint(folder, trainer.job_digest)
    if found:
        curve.resume(trainer, *found)
    trainer.train(resume_from_checkpoint=str(found[0]) if found else None)


def newest_checkpoint(folder: Path, job_digest: str) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and what its state keeps; those that a kill left unfinished are removed.

    Raises CheckpointError, leaving the files alone, if it is damaged or of another job.
    """
    named = (p for p in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name))
    found = sorted(named, key=lambda p: int(p.name.rpartition("-")[2]))
    whole = [p for p in found if (p / STATE).exists()]
    for unfinished in set(found) - set(whole):
        shutil.rmtree(unfinished)
    if not whole:
        return None
    newest = whole[-1]
    rest = f"training then continues from {whole[-2].name}" if len(whole) > 1 else "training then starts anew"
    remedy = f"delete {newest} ({rest})"
    state = read_sealed(newest / STATE, WHAT, KEYS, CheckpointError, remedy)
    if state["job"] != job_digest:
        raise CheckpointError(f"{newest}: checkpoint of another job; move {folder} away")
    for name, expected in state["sha256"].items():
        check_file(newest / name, expected, CheckpointError, remedy)
    return newest, state


def _micro_batch(machine: Machine, device: Any, rows: int, width: int) -> int:
    if machine.micro_batch:
        if rows % machine.micro_batch:
            raise DataError(f"micro_batch {machine.micro_batch} must divide the {rows} sequences of an update")
        return machine.micro_batch
    if device.type == "cpu":
        return rows
    return max(m for m in range(1, rows + 1) if rows % m == 0 and (m == 1 or m * width <= SLOTS))


def _rate(curve: Curve) -> float | None:
    tokens = curve.tokens - curve.clock[1] if curve.clock else 0
    return round(tokens / curve.seconds, 1) if tokens and curve.seconds else None


def _peak_mib(device: Any) -> float:
    import resource

    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
