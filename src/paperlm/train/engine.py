"""One training loop for every task: a CPU, one GPU, or torchrun.

A task says what is trained and how it is judged; the engine owns the loop, checkpoints, resuming, the curve, data
parallelism, progress, and what happens when a loss is no number or memory runs out. Every piece of state is
checkpointed and batches depend on (seed, update) only, so a killed job ends as an unbroken one, bit for bit on a CPU.
The micro-batch is a matter of the machine and never changes the loss.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from paperlm.errors import CheckpointError, Interrupted
from paperlm.files import check_sums, write_sums
from paperlm.jobs.base import Job, Machine, Stage, Trunk, folder_of, in_order, update_of
from paperlm.result import Cost
from paperlm.stopping import stop_requests
from paperlm.train import checkpoint
from paperlm.train.curve import CurveFile
from paperlm.train.distributed import World

SNAPSHOT = "checksums of a snapshot"


@dataclass(frozen=True)
class Batch:
    """This process's share of one update."""

    parts: Sequence[tuple[tuple[Tensor, ...], float]]
    "arguments of `loss_module` and the weight that makes its summed loss this part's share of the update's mean"
    counted: int
    "tokens or examples of the whole update, over all processes: what the curve counts"


@dataclass
class Progress:
    """What a checkpoint holds beside weights and optimizer."""

    update: int = 0
    counted: int = 0
    wall_seconds: float = 0.0
    resumed_from: tuple[int, ...] = ()


class Task(Protocol):
    """What is trained. Its attributes are read after construction; the engine moves nothing to another device."""

    job: Job
    model: nn.Module
    loss_module: nn.Module
    "forward(*arguments of a part) -> summed loss; the module that torch.compile and data parallelism wrap"
    optimizer: torch.optim.Optimizer
    updates: int
    evaluate_every: int
    micro_batch: int
    slots_per_update: int
    "tokens or examples of an update with padding: what throughput counts"
    compiles: bool
    "whether torch.compile can trace `loss_module`"

    def trunk(self) -> Progress | None:
        """Load the weights and optimizer of the job that this one continues, and return where it stood; None: it starts
        from its own first update. Called once, where the job has no checkpoint of its own."""

    def begin(self, update: int) -> Mapping[str, float]:
        """Set rates, decay and phase of an update, counted from 0; returns what the curve notes, e.g. {"lr": 1e-3}.

        Depends on the update alone, so that a resumed job is in the same phase.
        """

    def batch(self, update: int) -> Batch:
        """The update's batch."""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Precision of a forward pass."""

    def clip(self) -> None:
        """Change gradients before the optimizer's step."""

    def evaluate(self) -> Mapping[str, float | None]:
        """Numbers of an evaluation, for the curve; the task keeps what its result needs. Every process calls it."""

    def save(self, folder: Path) -> None:
        """Write the model as a folder that other jobs can load."""


Ended = Literal["trained", "not_finite"]


class Engine:
    """State of one training job. `keep`: what is kept for other jobs, the model after so many updates (0: before the
    first) or a Trunk, all that a training goes on from."""

    def __init__(self, task: Task, work: Path, machine: Machine, world: World, keep: Sequence[Stage] = ()) -> None:
        self.task, self.work, self.machine, self.world, self.keep = task, work, machine, world, in_order(keep)
        self.kept_after = {update_of(stage) for stage in self.keep}
        wanted = machine.compile == "yes" or (machine.compile == "auto" and world.device.type == "cuda")
        self.compiled = wanted and task.compiles
        self.loss_module: nn.Module = task.loss_module
        if self.compiled:
            self.loss_module = torch.compile(self.loss_module, dynamic=False)
        self.fits = world.size == 1 or self._fits()
        if world.size > 1 and self.fits:
            parallel = nn.parallel.DistributedDataParallel
            # No broadcast of buffers: the only ones are constants. PyTorch 2.13 has another name for it.
            names = ("forward_sync_buffers", "broadcast_buffers")
            option = next(name for name in names if name in inspect.signature(parallel).parameters)
            # Gradients lie where processes exchange them: beside the largest models is no room for a second copy.
            self.loss_module = parallel(self.loss_module, gradient_as_bucket_view=True, **{option: False})
        self.at = Progress()
        self.curve: CurveFile | None = None
        self._timed = (0, 0.0)
        self._asks_every, self._asked = 1, (0, time.monotonic())
        "Updates between two questions to the leading process, and the update and time of the last"

    # -- one update --

    def _fits(self) -> bool:
        """Whether a part of an update fits on every process's device beside the gradients, which stay, and what Adam
        keeps of each weight. It is tried before processes exchange gradients: from then on none can go back alone."""
        task, device, fits, kept = self.task, self.world.device, True, []
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                for p in task.model.parameters():
                    kept += [torch.empty_like(p), torch.empty_like(p)]
                    p.grad = torch.zeros_like(p) if p.requires_grad else None
                task.begin(0)
                (arguments, weight), *_ = task.batch(0).parts
                with task.autocast():
                    loss = self.loss_module(*arguments) * weight
                loss.backward()
        except torch.cuda.OutOfMemoryError:
            fits = False
        task.optimizer.zero_grad()
        del kept
        return all(self.world.gather(fits))

    def step(self) -> tuple[Tensor, Mapping[str, float]]:
        """One update; returns this process's share of its mean loss, still on the device, and what `begin` noted."""
        noted = self.task.begin(self.at.update)
        batch = self.task.batch(self.at.update)
        total = torch.zeros((), device=self.world.device)
        for index, (arguments, weight) in enumerate(batch.parts):
            last = index == len(batch.parts) - 1
            quiet = contextlib.nullcontext() if last or self.world.size == 1 else self.loss_module.no_sync()
            with quiet:
                with self.task.autocast():
                    loss = self.loss_module(*arguments) * weight
                # DistributedDataParallel averages gradients over processes; ours are shares of one mean.
                (loss * self.world.size).backward()
            total += loss.detach()
        self.task.clip()
        self.task.optimizer.step()
        self.task.optimizer.zero_grad()
        self.at.update += 1
        self.at.counted += batch.counted
        return total, noted

    # -- the loop --

    def train(self) -> Ended:
        """Run to the end, or to the first loss that is no number. Goes on from the newest usable checkpoint.

        Raises Interrupted after a checkpoint if the process was asked to stop, CheckpointError, and PaperLMError on a
        full disk.
        """
        started, task, machine = time.monotonic(), self.task, self.machine
        curve = self._resume()
        wall_before, first = self.at.wall_seconds, self.at.update
        self._asked = first, time.monotonic()
        self._keep_stages()
        self.curve = CurveFile(self.work / "curve.jsonl", first, curve) if self.world.leads else None
        bar = tqdm(
            total=task.updates,
            initial=first,
            desc=task.job.job_id,
            unit="update",
            disable=not (machine.progress and self.world.leads),
            mininterval=1 if os.isatty(2) else 15,
        )
        pending: list[tuple[int, int, Mapping[str, float], Tensor]] = []
        clock, saved, outcome = _Clock(self.world.device), time.monotonic(), "trained"
        with stop_requests() as stop:
            while self.at.update < task.updates:
                loss, noted = self.step()
                update = self.at.update
                pending.append((update, self.at.counted, noted, loss))
                if update - first == 10:
                    clock.start(update)
                done = update == task.updates
                evaluates = done or update % task.evaluate_every == 0
                stops, saves = self._decide(bool(stop), saved, done)
                if (evaluates or saves or update in self.kept_after or len(pending) >= 20) and not self._flush(
                    pending, bar
                ):
                    outcome = "not_finite"
                    break
                with clock.paused():
                    if evaluates:
                        self._evaluate()
                    self._keep_stages()
                    if saves and not done:
                        self.at.wall_seconds = wall_before + time.monotonic() - started
                        self._save()
                        saved = time.monotonic()
                if stops and not done:
                    raise Interrupted(
                        f"{task.job.job_id}: stopped at update {update} of {task.updates}; start again to go on"
                    )
        self._timed = clock.stop(self.at.update)
        bar.close()
        if outcome == "not_finite":
            self._evaluate()
        self.at.wall_seconds = wall_before + time.monotonic() - started
        return outcome

    def _decide(self, asked: bool, saved: float, done: bool) -> tuple[bool, bool]:
        """Whether to stop, and whether to write a checkpoint."""
        every, update = self.machine.checkpoint_updates, self.at.update
        stops = asked or update == self.machine.stop_after
        late = time.monotonic() - saved > self.machine.checkpoint_seconds
        saves = stops or (update % every == 0 if every else late)
        if self.world.size == 1:
            return stops, saves
        if done or update % self._asks_every:
            return False, False
        # Clocks and signals differ: the leader decides for all, also when it is asked next. A stop has little time.
        (before, asked_at), now = self._asked, time.monotonic()
        slow = now - asked_at > update - before
        self._asked = update, now
        stops, saves, self._asks_every = self.world.gather((stops, saves, 1 if slow else 10))[0]
        return stops, saves

    def _evaluate(self) -> None:
        numbers = self.task.evaluate()
        if self.world.leads:
            self.curve.add(update=self.at.update, counted=self.at.counted, evaluation=dict(numbers))
            self.curve.flush()

    def _flush(self, pending: list[tuple[int, int, Mapping[str, float], Tensor]], bar: Any) -> bool:
        """Write the losses seen since the last call; False if one of them is not finite."""
        values = torch.stack([loss for *_, loss in pending]).cpu().tolist()
        if self.world.size > 1:
            values = [sum(shares) for shares in zip(*self.world.gather(values), strict=True)]
        finite = all(math.isfinite(v) for v in values)
        if not finite:
            # The job ends at its first loss that is no number, wherever the flush happened to be.
            end = next(i for i, v in enumerate(values) if not math.isfinite(v))
            del pending[end + 1 :], values[end + 1 :]
            self.at.update, self.at.counted = pending[end][:2]
        if self.world.leads:
            for (update, counted, noted, _), value in zip(pending, values, strict=True):
                loss = value if math.isfinite(value) else None
                self.curve.add(update=update, counted=counted, loss=loss, **noted)
            self.curve.flush()
            bar.set_postfix(loss=f"{values[-1]:.3f}", refresh=False)
            bar.update(len(pending))
        pending.clear()
        return finite

    # -- checkpoints and snapshots --

    def _resume(self) -> str:
        """Go to the newest checkpoint, whose digest of the curve is returned; empty: there is none."""
        missing = [update_of(stage) for stage in self.keep if not self._snapshot(stage).is_dir()]
        state = checkpoint.load(
            self.work, self.task.job, self.task.model, self.task.optimizer, at_most=min(missing, default=None)
        )
        if state:
            self.at = Progress(
                state["update"], state["counted"], state["wall_seconds"], (*state["resumed_from"], state["update"])
            )
        else:
            self.at = self.task.trunk() or Progress()
        return state["curve"] if state else ""

    def _save(self) -> None:
        if self.world.leads:
            state = {**vars(self.at), "curve": self.curve.secure()}
            checkpoint.save(self.work, self.task.job, self.task.model, self.task.optimizer, state)
        self.world.barrier()

    def _snapshot(self, stage: Stage) -> Path:
        return self.work / "snapshots" / folder_of(stage)

    def _sums(self, snapshot: Path) -> Path:
        return snapshot.with_name(f"{snapshot.name}.json")

    def _keep_stages(self) -> None:
        """Write what is to be kept of this update and is not there; a folder appears whole or not at all."""
        for stage in self.keep if self.world.leads else ():
            target = self._snapshot(stage)
            if update_of(stage) != self.at.update or target.is_dir():
                continue
            temporary = target.with_name(f".{target.name}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            if isinstance(stage, Trunk):
                task = self.task
                checkpoint.write(temporary, task.job, task.model, task.optimizer, vars(self.at))
            else:
                self.task.save(temporary)
            write_sums(self._sums(target), SNAPSHOT, temporary)
            temporary.rename(target)

    def hand_over(self, folder: Path) -> None:
        """Write the model and its snapshots into `folder`: what the job leaves for others."""
        self.task.save(folder)
        for stage in self.keep:
            if (kept := self._snapshot(stage)).is_dir():
                remedy = f"delete {kept}: training goes back to where it was made"
                check_sums(self._sums(kept), SNAPSHOT, kept, CheckpointError, remedy)
                shutil.copytree(kept, folder / folder_of(stage), dirs_exist_ok=True)

    def cost(self, flops_per_slot: float | None = None, begun_at: int = 0) -> Cost:
        """What the job took on this machine, of whose updates those before `begun_at` are another job's."""
        updates, seconds = self._timed
        slots = self.task.slots_per_update
        on_gpu = self.world.device.type == "cuda"
        peak = (
            torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        return Cost(
            wall_seconds=round(self.at.wall_seconds, 2),
            train_seconds=round(seconds, 2),
            tokens_per_second=round(updates * slots / seconds, 1) if updates else None,
            flops=flops_per_slot * (self.at.update - begun_at) * slots if flops_per_slot else None,
            peak_memory_mib=round(peak / 2**20, 1),
            micro_batch=self.task.micro_batch,
            compiled=self.compiled,
            world_size=self.world.size,
            resumed_from=list(self.at.resumed_from),
        )


def run_task(
    build: Callable[[int], Task], work: Path, machine: Machine, world: World, keep: Sequence[Stage] = ()
) -> tuple[Engine, Literal["trained", "not_finite", "out_of_memory"]]:
    """Train a task, with ever smaller micro-batches while a GPU's memory is short.

    `build(micro_batch)` makes the task at update 0; 0 lets it choose. Returns the engine in its last state and how it
    ended: out of memory if the smallest micro-batch does not fit.
    """
    micro = machine.micro_batch
    while True:
        engine = Engine(build(micro), work, machine, world, keep)
        try:
            if engine.fits:
                return engine, engine.train()
        except torch.cuda.OutOfMemoryError:
            if world.size > 1:
                raise  # of this one alone: the others wait for its gradients, and torchrun ends them
        used = engine.task.micro_batch
        smaller = [m for m in range(1, used) if used % m == 0]
        if not smaller:
            return engine, "out_of_memory"
        micro = smaller[-1]
        tqdm.write(f"out of memory: going on with a micro-batch of {micro}; the global batch stays")
        del engine
        torch.cuda.empty_cache()


class _Clock:
    """Seconds of updates, evaluations and checkpoints left out."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.began, self.update = device, None, 0

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    def start(self, update: int) -> None:
        self.began, self.update = self._now(), update

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        begin = time.monotonic()
        yield
        if self.began is not None:
            self.began += time.monotonic() - begin

    def stop(self, update: int) -> tuple[int, float]:
        """Updates and seconds since the start; (0, 0.0) if it never started."""
        return (0, 0.0) if self.began is None else (update - self.update, self._now() - self.began)
