"""How fast a model runs, or trains, whose weights are stored in fewer bits (NeuZip, columns Speed)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from paperlm.evaluate.stores import StoredModel, cannot_store, load_into_stores
from paperlm.jobs.base import Inputs, Machine
from paperlm.result import Result

PHASES = ("forward", "backward", "update")
"Of an update: what follows the backward pass is all of it that is not fused."


class StoredSpeed(StoredModel):
    """Iterations a second: forward passes of a model, or whole updates as its pre-training makes them, on a GPU."""

    kind: ClassVar[str] = "stored_speed"
    summary: ClassVar[str] = "iterations a second of a model whose weights are stored in fewer bits, on a GPU"
    behaviour: ClassVar[int] = 2  # memory is that of the iterations alone

    what: Literal["forward", "update"] = "forward"
    "update: of a pretrain job, with that job's optimizer and weights in place of `store`"
    batch: int = Field(gt=0)
    "sequences of an iteration"
    window: int = Field(gt=1)
    "tokens of a sequence"
    repeats: int = Field(20, gt=0)
    "iterations that are timed, each alone, behind three that are not"
    cap_gib: float | None = Field(None, gt=0)
    "memory of the card at most, in GiB, from reading the model on: that of a smaller card; null: all that it has"

    @model_validator(mode="after")
    def updates_are_of_a_pretraining(self) -> StoredSpeed:
        if self.what == "update" and (self.of.kind != "pretrain" or self.store != "plain"):
            raise ValueError("what: update: `of` is a pretrain job, which says how weights lie; store is plain")
        if self.what == "update" and self.of.numerics != "pure_bf16":
            raise ValueError(
                f"what: update: it is timed in bfloat16; numerics of `of` is {self.of.numerics}, not pure_bf16"
            )
        return self

    def metrics(self) -> tuple[str, ...]:
        phases = (f"{phase}/peak_bytes" for phase in PHASES if self.what == "update")
        return ("iterations_per_second", "peak_bytes", *phases)

    def series(self) -> dict[str, tuple[str, ...]]:
        return {}

    def stored_as(self) -> str:
        return super().stored_as() if self.what == "forward" else "update"


def run(job: StoredSpeed, inputs: Inputs, machine: Machine) -> Result:
    """Metrics iterations_per_second, by the median iteration, with how much one varies as its standard error
    (`rate_of`), and peak_bytes, of the device meanwhile; of updates also `<phase>/peak_bytes` (`peaks`), in one more
    behind them. `out_of_memory` where the cap is too small. `blocked` without a GPU, where the time would be that of a
    reference, and for a store that is not to be had here."""
    from paperlm.evaluate.cap import under_cap

    device = machine.torch_device()
    if device.type != "cuda":
        return Result(outcome="blocked", reason="speed is of the kernels, which run on a GPU; there is none here")
    if why := cannot_store(job):
        return Result(outcome="blocked", reason=why)
    return under_cap(device, job.cap_gib, lambda: _measured(job, inputs, device))


def _measured(job: StoredSpeed, inputs: Inputs, device: Any) -> Result:
    import torch

    step = iteration(job, inputs, device)
    found = speed_of(step, job.repeats, device)
    phases = peaks(step, torch.cuda, device) if job.what == "update" else {}
    return replace(found, metrics={**found.metrics, **phases})


def speed_of(step: Callable[[], None], repeats: int, device: Any) -> Result:
    """iterations_per_second of `step` with its error (`rate_of`), and the most bytes of the device meanwhile."""
    import torch
    from paperlm_kernels.neuzip import raise_decode_errors

    torch.cuda.reset_peak_memory_stats(device)  # before it was stored the model lay there whole
    seconds = timed(step, repeats, lambda: torch.cuda.synchronize(device))
    raise_decode_errors(device)
    rate, spread = rate_of(seconds)
    return Result(
        outcome="measured",
        metrics={"iterations_per_second": rate, "peak_bytes": torch.cuda.max_memory_allocated(device)},
        standard_errors={"iterations_per_second": spread},
    )


def rate_of(seconds: list[float]) -> tuple[float, float]:
    """Iterations a second by the median iteration, and the standard deviation of one iteration's rate: not that of the
    mean, for iterations of one process are more alike than those of two."""
    rates = [1 / one for one in seconds]
    return 1 / sorted(seconds)[len(seconds) // 2], statistics.stdev(rates) if len(rates) > 1 else 0.0


def timed(step: Callable[[], None], repeats: int, wait: Callable[[], None]) -> list[float]:
    """Seconds of each of `repeats` calls of `step`, behind three that are not timed; `wait` lets the device finish."""
    found = []
    for index in range(repeats + 3):
        wait()
        start = time.perf_counter()
        step()
        wait()
        if index >= 3:
            found.append(time.perf_counter() - start)
    return found


def peaks(update: Callable[..., None], memory: Any, device: Any) -> dict[str, int]:
    """Most bytes in each phase of an update; `memory` counts them, as torch.cuda does."""
    found: dict[str, int] = {}

    def ended(phase: str) -> None:
        memory.synchronize(device)
        found[f"{phase}/peak_bytes"] = memory.max_memory_allocated(device)
        memory.reset_peak_memory_stats(device)

    memory.synchronize(device)
    memory.reset_peak_memory_stats(device)
    update(ended)
    return found


def iteration(job: StoredSpeed, inputs: Inputs, device: Any) -> Callable[..., None]:
    """One forward pass, or one update, which calls what it is given behind each phase; on ids drawn at random."""
    import torch

    from paperlm.models.folder import load_model
    from paperlm.train.language_model import build_optimizer, store_weights

    folder, forwards = inputs.models["of"], job.what == "forward"
    model = load_into_stores(folder, job, device) if forwards else load_model(folder, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (job.batch, job.window), generator=generator).to(device)
    if forwards:

        @torch.no_grad()
        def forward() -> None:
            model(input_ids=ids, use_cache=False)

        return forward
    model.to(device).train()
    store_weights(job.of, model)
    optimizer = build_optimizer(job.of, model)

    def update(ended: Callable[[str], None] = lambda phase: None) -> None:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        ended("forward")
        loss.backward()
        ended("backward")
        optimizer.step()
        optimizer.zero_grad()
        ended("update")

    return update
