"""Pre-train one language model: one loop for a CPU, one GPU and torchrun.

What is special: batches depend on (seed, update) only and every piece of state is checkpointed, so a killed run ends in
the same record as an unbroken one, bit for bit on a CPU. The micro-batch is a matter of the machine and never changes
the loss: each token's weight follows from the run's `loss_group`. Divergence and lack of memory are outcomes.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from paperlm.data.shards import BatchOrder, TokenShards
from paperlm.errors import DataError, PaperLMError
from paperlm.evaluate.perplexity import ValidationLosses, perplexity
from paperlm.models.llama import IGNORE_INDEX, PaperLlamaConfig, PaperLlamaForCausalLM
from paperlm.models.losses import MATERIALISED, ExactLoss, executed_loss
from paperlm.record.record import Outcome, Record
from paperlm.spec.run import RunConfig
from paperlm.train import checkpoint
from paperlm.train.curve import CurveFile
from paperlm.train.distributed import World, start_world
from paperlm.train.result import make_record
from paperlm.train.schedule import learning_rate


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a run is executed on this machine; none of it changes what is computed beyond rounding."""

    device: str = "auto"
    micro_batch: int = 0
    "sequences per forward pass; 0: the loss group on a CPU, up to 64k tokens on a GPU, halved while memory is short"
    compile: str = "auto"
    "auto: on a GPU; compiling for a CPU takes as long as a small run"
    exact_loss: ExactLoss = "auto"
    "what computes the loss of a run that asks for no fused one: PyTorch, or our kernels (auto: the faster of the two)"
    checkpoint_seconds: float = 60.0
    checkpoint_updates: int = 0
    "checkpoint after every so many updates instead of by the clock"
    progress: bool = True
    stop_after: int = 0
    "stop (with a checkpoint, without a record) after so many updates: for tests"


class Interrupted(PaperLMError):
    """The run was asked to stop; its checkpoint is written."""


class SummedLoss(torch.nn.Module):
    """forward(ids, labels) -> summed loss, the shape that DistributedDataParallel and torch.compile wrap."""

    def __init__(self, model: PaperLlamaForCausalLM, loss: str = MATERIALISED) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model.summed_loss(ids, labels, self.loss)


def build_model(run: RunConfig, first_batch: torch.Tensor, device: torch.device) -> PaperLlamaForCausalLM:
    """The model of a run at update 0. first_batch: (B, S) ids, for methods that start from a forward pass."""
    torch.manual_seed(run.seed)
    config = PaperLlamaConfig(
        vocab_size=run.vocab_size,
        hidden_size=run.hidden_size,
        intermediate_size=run.intermediate_size,
        num_hidden_layers=run.n_layers,
        num_attention_heads=run.n_heads,
        max_position_embeddings=max(2048, run.seq_len),
        rms_norm_eps=run.rms_norm_eps,
        rope_theta=run.rope_theta,
        initializer_range=run.initializer_range,
        embed_init_std=run.embed_init_std,
        zero_last_embedding_row=run.zero_last_embedding_row,
        norm=run.norm,
    )
    model = PaperLlamaForCausalLM(config)
    run.method().initialize_from_batch(model, first_batch)
    # The rotary tables stay float32: they are computed once and cast where they are used.
    if run.numerics == "pure_bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    return model.to(device).train()


class Trainer:
    """State and steps of one run. Raises DataError if the prepared tokens are not those of the run."""

    def __init__(self, run: RunConfig, manifest: Path, checkpoints: Path, execution: Execution, world: World) -> None:
        self.run, self.execution, self.world, self.checkpoints = run, execution, world, checkpoints
        self.train_shards = TokenShards(manifest, "train")
        self.validation_shards = TokenShards(manifest, "validation")
        settings = self.train_shards.manifest["settings"]
        if settings != run.data_settings():
            wrong = [k for k, v in run.data_settings().items() if settings.get(k) != v]
            raise DataError(f"{manifest}: prepared for other settings ({', '.join(wrong)}); run the data rule again")
        if run.global_batch % world.size:
            raise DataError(f"global_batch {run.global_batch} does not split over {world.size} processes")
        self.order = BatchOrder(len(self.train_shards), run.global_batch, run.seed)
        self.local = slice(
            world.rank * run.global_batch // world.size, (world.rank + 1) * run.global_batch // world.size
        )
        self.micro = self._first_micro_batch()
        self.compiled = execution.compile == "yes" or (execution.compile == "auto" and world.device.type == "cuda")
        self.loss = executed_loss(
            run.loss, execution.exact_loss, run.vocab_size, run.hidden_size, run.numerics, world.device
        )
        first = torch.from_numpy(self.train_shards.rows(self.order.indices(0))[: run.loss_group])
        self.model = build_model(run, first, world.device)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(),
            lr=run.peak_lr,
            betas=run.adam_betas,
            eps=run.adam_eps,
            weight_decay=run.weight_decay,
            fused=True,
        )
        self.loss_module: torch.nn.Module = SummedLoss(self.model, self.loss)
        if self.compiled:
            self.loss_module = torch.compile(self.loss_module, dynamic=False)
        if world.size > 1:
            # No broadcast of buffers: the only ones are the constant rotary tables.
            self.loss_module = torch.nn.parallel.DistributedDataParallel(self.loss_module, broadcast_buffers=False)
        self.final: ValidationLosses | None = None
        self.curve: CurveFile | None = None
        self.update = 0
        self.tokens = 0
        self.wall_seconds = 0.0
        self.resumed_from: list[int] = []
        self.wall_before = 0.0
        self.timed_updates, self.timed_seconds = 0, 0.0

    def _first_micro_batch(self) -> int:
        per_rank = self.run.global_batch // self.world.size
        if self.execution.micro_batch:
            micro = self.execution.micro_batch
            if math.gcd(self.run.loss_group, per_rank) % micro:
                raise DataError(
                    f"micro_batch {micro} must divide the loss group {self.run.loss_group} and the {per_rank} "
                    "sequences of a process"
                )
            return micro
        micro = math.gcd(self.run.loss_group, per_rank)
        if self.world.device.type == "cuda":
            while micro % 2 == 0 and micro * self.run.seq_len > 65_536:
                micro //= 2
        return micro

    # -- one update ---------------------------------------------------------------------------------------------------

    def _labels(self, ids: np.ndarray) -> np.ndarray:
        return np.where(ids == self.train_shards.pad_id, IGNORE_INDEX, ids)

    def micro_batches(self, update: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        """ids, labels, weight of this process's micro-batches; weight turns a summed loss into the update's mean."""
        ids = self.train_shards.rows(self.order.indices(update))
        labels = self._labels(ids)
        counted = (labels[:, 1:] != IGNORE_INDEX).sum(1)
        group = np.arange(len(ids)) // self.run.loss_group
        per_group = np.maximum(1, np.bincount(group, counted))
        weights = 1.0 / (per_group[group] * len(per_group))
        self._update_tokens = int((ids != self.train_shards.pad_id).sum())
        start, stop = self.local.start, self.local.stop
        for i in range(start, stop, self.micro):
            j = i + self.micro
            yield self._to_device(ids[i:j]), self._to_device(labels[i:j]), float(weights[i])

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.world.device.type == "cuda":
            return tensor.pin_memory().to(self.world.device, non_blocking=True)
        return tensor

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.run.numerics == "fp32_master":
            return torch.autocast(self.world.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def step(self) -> torch.Tensor:
        """One update; returns its mean loss (this process's share), still on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.update, self.run)
        total = torch.zeros((), device=self.world.device)
        batches = list(self.micro_batches(self.update))
        for index, (ids, labels, weight) in enumerate(batches):
            last = index == len(batches) - 1
            quiet = contextlib.nullcontext() if last or self.world.size == 1 else self.loss_module.no_sync()
            with quiet:
                with self._autocast():
                    loss = self.loss_module(ids, labels) * weight
                # DistributedDataParallel averages gradients over processes; ours are shares of one mean.
                (loss * self.world.size).backward()
            total += loss.detach()
        if self.run.grad_clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.update += 1
        self.tokens += self._update_tokens
        return total

    # -- evaluation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> ValidationLosses:
        """Losses on every validation example, shared out over the processes."""
        self.model.eval()
        shards = self.validation_shards
        rows = np.arange(self.world.rank, len(shards), self.world.size)
        sums, counts = [], []
        for start in range(0, len(rows), batch := max(self.micro, 8)):
            ids = shards.rows(rows[start : start + batch])
            labels = self._labels(ids)
            with self._autocast():
                losses = self.model.token_losses(self._to_device(ids), self._to_device(labels))
            sums.append(losses.double().sum(1).cpu().numpy())
            counts.append((labels[:, 1:] != IGNORE_INDEX).sum(1))
        self.model.train()
        whole = ValidationLosses(np.zeros(len(shards)), np.zeros(len(shards), dtype=np.int64))
        empty = [np.zeros(0)]
        parts = self.world.gather((rows, np.concatenate(sums or empty), np.concatenate(counts or empty)))
        for indices, part_sums, part_counts in parts:
            whole.sums[indices], whole.counts[indices] = part_sums, part_counts
        return whole

    # -- the loop -----------------------------------------------------------------------------------------------------

    def train(self) -> Outcome:
        """Run to the end or to divergence; `self.final` then holds the last evaluation. Resumes by itself."""
        started = time.monotonic()
        state = checkpoint.load(self.checkpoints, self.run, self.model, self.optimizer)
        if state:
            self.update, self.tokens = state["update"], state["tokens"]
            self.wall_before = state["wall_seconds"]
            self.resumed_from = [*state["resumed_from"], self.update]
        self.curve = CurveFile(self.checkpoints / "curve.jsonl", self.update) if self.world.leads else None
        bar = tqdm(
            total=self.run.steps,
            initial=self.update,
            desc=self.run.run_id,
            unit="update",
            disable=not (self.execution.progress and self.world.leads),
            mininterval=1 if os.isatty(2) else 15,
        )
        pending: list[tuple[int, int, float, torch.Tensor]] = []
        last_checkpoint, outcome, clock_start, clock_update = time.monotonic(), "trained", None, 0
        with _stop_requests() as stop:
            while self.update < self.run.steps:
                rate = learning_rate(self.update, self.run)
                loss = self.step()
                pending.append((self.update, self.tokens, rate, loss))
                if clock_start is None and self.update - (self.resumed_from or [0])[-1] >= 10:
                    _synchronize(self.world.device)
                    clock_start, clock_update = time.monotonic(), self.update
                done = self.update == self.run.steps
                evaluates = done or self.update % self.run.eval_every == 0
                now = time.monotonic()
                every = self.execution.checkpoint_updates
                stops = bool(stop) or self.update == self.execution.stop_after
                saves = stops or (
                    self.update % every == 0 if every else now - last_checkpoint > self.execution.checkpoint_seconds
                )
                if self.world.size > 1 and not done and self.update % 10 == 0:
                    # Clocks and signals differ between processes; the leader decides for all.
                    stops, saves = self.world.gather((stops, saves))[0]
                elif self.world.size > 1:
                    stops = saves = False
                if evaluates or saves or len(pending) >= 20:
                    finite = self._flush(pending, bar)
                    if not finite:
                        outcome = "diverged"
                        break
                if evaluates:
                    paused = time.monotonic()
                    self.final = self.evaluate()
                    if self.world.leads:
                        by_tokens, by_sequences = perplexity(self.final.loss_true()), self.final.ppl_sequences()
                        self.curve.add(
                            update=self.update, tokens=self.tokens, ppl_true=by_tokens, ppl_sequences=by_sequences
                        )
                        self.curve.flush()
                    if clock_start is not None:
                        clock_start += time.monotonic() - paused
                if saves and not done:
                    paused = time.monotonic()
                    self._save(time.monotonic() - started)
                    last_checkpoint = time.monotonic()
                    if clock_start is not None:
                        clock_start += last_checkpoint - paused
                if stops and not done:
                    raise Interrupted(
                        f"{self.run.run_id}: stopped at update {self.update} of {self.run.steps}; start again to go on"
                    )
        _synchronize(self.world.device)
        if clock_start is not None:
            self.timed_updates, self.timed_seconds = self.update - clock_update, time.monotonic() - clock_start
        bar.close()
        if outcome == "diverged":
            self.final = self.evaluate()
        self.wall_seconds = self.wall_before + time.monotonic() - started
        return outcome

    def _flush(self, pending: list[tuple[int, int, float, torch.Tensor]], bar: Any) -> bool:
        """Write the losses seen since the last call; False if one of them is not finite."""
        values = torch.stack([loss for *_, loss in pending]).cpu().tolist()
        if self.world.size > 1:
            values = [sum(shares) for shares in zip(*self.world.gather(values), strict=True)]
        finite = all(math.isfinite(v) for v in values)
        if not finite:
            # The run ends at its first loss that is no number, wherever the flush happened to be.
            end = next(i for i, v in enumerate(values) if not math.isfinite(v))
            del pending[end + 1 :], values[end + 1 :]
            self.update, self.tokens = pending[end][:2]
        if self.world.leads:
            for (update, tokens, rate, _), value in zip(pending, values, strict=True):
                loss = value if math.isfinite(value) else None
                self.curve.add(update=update, tokens=tokens, lr=rate, loss=loss)
            self.curve.flush()
            bar.set_postfix(loss=f"{values[-1]:.3f}", refresh=False)
            bar.update(len(pending))
        pending.clear()
        return finite

    def _save(self, wall: float) -> None:
        if self.world.leads:
            state = {"update": self.update, "tokens": self.tokens, "resumed_from": self.resumed_from}
            state["wall_seconds"] = self.wall_before + wall
            checkpoint.save(self.checkpoints, self.run, self.model, self.optimizer, state)
        self.world.barrier()


def pretrain(run: RunConfig, manifest: Path, checkpoints: Path, execution: Execution) -> tuple[Record, Any] | None:
    """Train, evaluate, and return (record, model) on the leading process, None on the others.

    Raises DataError, CheckpointError, Interrupted, and PaperLMError on a full disk.
    """
    world = start_world(execution.device)
    while True:
        trainer = Trainer(run, manifest, checkpoints, execution, world)
        try:
            outcome = trainer.train()
            break
        except torch.cuda.OutOfMemoryError:
            if world.size > 1:
                raise  # the processes would have to agree; torchrun restarts with --micro-batch
            outcome = "out_of_memory"
        smaller = [m for m in range(1, trainer.micro) if trainer.micro % m == 0]
        if not smaller:
            break
        execution = _with_micro_batch(execution, smaller[-1])
        del trainer
        torch.cuda.empty_cache()
    return (make_record(trainer, outcome), trainer.model) if world.leads else None


def _with_micro_batch(execution: Execution, micro: int) -> Execution:
    import dataclasses

    tqdm.write(f"out of memory: going on with a micro-batch of {micro}; the global batch stays")
    return dataclasses.replace(execution, micro_batch=micro)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """A list that is filled when the process is asked to end, so that it can write a checkpoint first."""
    asked: list[int] = []
    handlers = {s: signal.signal(s, lambda number, _: asked.append(number)) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
